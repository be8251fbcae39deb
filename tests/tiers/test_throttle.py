"""A throttled tier keeps the promises of its inner tier, and the rate limit."""

import threading

from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import namespace_of
from holdfast.testing.tier_contract import TierContract
from holdfast.tiers.base import Erasable, Lockable, TierGet
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.throttle import ThrottledTier

MIB = 1 << 20


class TestThrottledTier(TierContract):
    """With a very high rate limit it behaves like the tier it wraps."""

    def make_tier(self, folder, capacity_bytes):
        return ThrottledTier(CxlTier(CxlOptions(capacity=capacity_bytes)), 1e12)


class Clock:
    def __init__(self):
        self.at, self.slept = 100.0, []

    def now(self):
        return self.at

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.at += seconds


def gets(tier, count, nbytes):
    places = tier.reserve([nbytes] * count).places
    namespace = namespace_of(nbytes)
    return [TierGet(place, bytes(16), memoryview(bytearray(nbytes)), namespace) for place in places]


def test_reads_wait_for_the_rate_limit_and_idle_time_gives_no_credit():
    clock = Clock()
    tier = ThrottledTier(MemoryTier(8 * MIB), MIB, clock.now, clock.sleep)
    batch = gets(tier, 4, MIB // 4)
    tier.read(batch)
    tier.read(batch[:2])
    clock.at += 10.0
    tier.read(batch[:1])
    assert clock.slept == [1.0, 0.5, 0.25]


def test_threads_share_the_rate_limit():
    clock, done = Clock(), []
    inner = MemoryTier(8 * MIB)
    tier = ThrottledTier(inner, MIB, clock.now, done.append)
    batch = gets(tier, 1, MIB)
    threads = [threading.Thread(target=tier.read, args=(batch,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [1.0, 2.0, 3.0]


def test_it_can_be_wiped_and_given_up_if_its_inner_tier_can(tmp_path):
    disk = ThrottledTier(DiskTier(DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB)), MIB)
    memory = ThrottledTier(MemoryTier(MIB), MIB)
    for feature in (Erasable, Lockable):
        assert isinstance(disk, feature)
        assert not isinstance(memory, feature)
    disk.close()
