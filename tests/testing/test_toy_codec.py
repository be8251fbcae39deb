"""A codec that no tier knows: records that it shortens pass the contracts of all kinds of tiers."""

import numpy as np
import pytest

from holdfast.codec.codec import register, unregister
from holdfast.errors import FormatError
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.testing.tier_contract import TierContract
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

PAGE = 4096


class ZeroPages:
    """Leaves out pages of zeros: one byte for each page says whether it is stored."""

    number = 200
    name = "zero-pages"

    def encode(self, raw, into, element_bytes):
        pages = np.frombuffer(bytes(raw).ljust(-(-len(raw) // PAGE) * PAGE, b"\0"), np.uint8)
        pages = pages.reshape(-1, PAGE)
        kept = pages.any(axis=1)
        encoded = kept.astype(np.uint8).tobytes() + pages[kept].tobytes()
        if len(encoded) > 0.95 * len(raw):
            return 0
        into[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, stored, into):
        count = -(-len(into) // PAGE)
        kept = np.frombuffer(stored[:count], np.bool_)
        if len(kept) < count or len(stored) != count + PAGE * int(kept.sum()):
            raise FormatError("the lengths do not add up")
        pages = np.zeros((count, PAGE), np.uint8)
        pages[kept] = np.frombuffer(stored[count:], np.uint8).reshape(-1, PAGE)
        into[:] = pages.reshape(-1)[: len(into)].data


TOY = ZeroPages()


@pytest.fixture(autouse=True)
def _registered():
    register(TOY)
    yield
    unregister(TOY)


class TestMemoryTier(TierContract):
    codec = TOY

    def make_tier(self, folder, capacity_bytes):
        return MemoryTier(capacity_bytes)


class TestCxlTier(TierContract):
    codec = TOY

    def make_tier(self, folder, capacity_bytes):
        return CxlTier(CxlOptions(capacity=capacity_bytes))


class TestDiskTier(TierContract):
    codec = TOY
    durable = True

    def make_tier(self, folder, capacity_bytes):
        return DiskTier(DiskConfig(path=str(folder), capacity_bytes=capacity_bytes))


class Memory:
    """Records of a shared tier in memory, and its outages."""

    def __init__(self):
        self.records = {}
        self.tiers = []
        self.answers = True

    def tier(self):
        self.tiers.append(SharedMemoryTier(self.records))
        self.tiers[-1].answers = self.answers
        return self.tiers[-1]

    def kill(self):
        self.records.clear()
        self.stall()

    def stall(self):
        self._answer(False)

    def wake(self):
        self._answer(True)

    def _answer(self, answers):
        self.answers = answers
        for tier in self.tiers:
            tier.answers = answers

    restart = wake

    def close(self):
        pass


class TestSharedMemoryTier(SharedTierContract):
    codec = TOY

    def make_remote_side(self, folder):
        return Memory()

    def make_tier(self, remote_side):
        return remote_side.tier()
