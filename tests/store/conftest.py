"""A small store, and blocks whose bytes are a function of their key."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from holdfast.blocks.key import Chain
from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.codec.pack import payload
from holdfast.policy.retention import Retention
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave, leave_all
from holdfast.testing.store_view import StoreView

PAYLOAD = 16 << 10
BLOCK_TOKENS = 16
SECRET = b"s" * 32
MIB = 1 << 20


class Harness:
    """One store and its clock, with a writer and a reader that check every byte."""

    def __init__(self, host_bytes: int, *tiers: MemoryTier, **options: Any) -> None:
        self.clock = ManualClock()
        self.tier = tiers[0] if tiers else None
        chosen = StoreOptions(clock=self.clock, **options)
        self.store = Store(host_bytes, tiers, {"default": SECRET}, chosen)
        self.view = StoreView(self.store)
        key, domain = self.store.domain("default")
        self.namespace = Namespace(b"f" * 16, domain, PAYLOAD, BLOCK_TOKENS)
        self._key = key
        self.store.start()

    def chain(self, seed: int, blocks: int) -> Chain:
        chain = Chain(self._key, self.namespace.fingerprint, BLOCK_TOKENS)
        tokens = np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK_TOKENS)
        chain.extend(tokens)
        return chain

    def save(
        self,
        chain: Chain,
        start: int = 0,
        stop: int | None = None,
        retention: Retention = Retention.SESSION,
    ) -> int:
        keys = chain.keys[start:stop]
        reserved = self.store.reserve(self.namespace, keys, chain.parent(start), start)
        self.fill(keys, reserved.places)
        return self.store.commit(reserved.ticket, retention)

    def fill(self, keys: list[bytes], places: list[int]) -> None:
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(keys, places, strict=True):
            if place >= 0:
                payload(arena[place:], PAYLOAD)[:] = bytes_of(key)

    def read(self, chain: Chain, deadline_s: float = 60.0) -> int:
        """Fetch, check every byte, release; return how many blocks landed."""
        fetched = self.store.fetch(self.namespace, chain.keys, deadline_s)
        arena = self.store.arena(self.namespace.domain).view
        for key, place in zip(chain.keys, fetched.places, strict=False):
            assert bytes(payload(arena[place:], PAYLOAD)) == bytes_of(key)
        assert self.store.release(fetched.lease)
        return len(fetched.places)

    def flush(self) -> None:
        """Wait until everything dirty is written below."""
        self.flush_writes()
        assert not self.store.status().leases

    def flush_writes(self) -> None:
        """Wait until everything dirty is written below, whatever is leased."""
        self.view.wait_until_written()

    def leave_memory(self, chain: Chain | None = None) -> None:
        """Wait until all is written below, then take a chain out of memory, or everything."""
        self.flush_writes()
        if chain:
            leave(self.store, self.namespace, chain.keys)
        else:
            leave_all(self.store)

    def nothing_is_left_over(self) -> bool:
        """Whether no row is pinned, leased or loading, and no slot waits for its last reader."""
        return self.view.is_idle


def bytes_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(PAYLOAD)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    """Call for a store, with options; its housekeeping runs when a test calls it."""
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)
    made: list[Harness] = []

    def make(
        host_bytes: int = 2 * MIB,
        *tiers: MemoryTier,
        tier: MemoryTier | None = None,
        **options: Any,
    ) -> Harness:
        made.append(Harness(host_bytes, *tiers, *([tier] if tier else []), **options))
        return made[-1]

    yield make
    for one in made:
        one.store.close()
