"""A small store, and blocks whose bytes are a function of their key."""

import hashlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from holdfast.blocks.key import Chain
from holdfast.blocks.world import World
from holdfast.clock import ManualClock
from holdfast.codec.pack import payload
from holdfast.policy.retention import Retention
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier

PAYLOAD = 16 << 10
BLOCK_TOKENS = 16
SECRET = b"s" * 32
MIB = 1 << 20


class Rig:
    """One store and its clock, with a writer and a reader that check every byte."""

    def __init__(self, host_bytes: int, *tiers: MemoryTier) -> None:
        self.clock = ManualClock()
        self.tier = tiers[0] if tiers else None
        self.store = Store(host_bytes, tiers, {"default": SECRET}, clock=self.clock)
        key, domain = self.store.domain("default")
        self.world = World(b"f" * 16, domain, PAYLOAD, BLOCK_TOKENS)
        self._key = key
        self.store.start()

    def chain(self, seed: int, blocks: int) -> Chain:
        chain = Chain(self._key, self.world.fingerprint, BLOCK_TOKENS)
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
        reserved = self.store.reserve(self.world, keys, chain.parent(start), start)
        self.fill(keys, reserved.places)
        return self.store.commit(reserved.ticket, retention)

    def fill(self, keys: list[bytes], places: list[int]) -> None:
        arena = self.store.arena(self.world.domain).view
        for key, place in zip(keys, places, strict=True):
            if place >= 0:
                payload(arena[place:], PAYLOAD)[:] = bytes_of(key)

    def read(self, chain: Chain, deadline_s: float = 5.0) -> int:
        """Fetch, check every byte, release; return how many blocks landed."""
        fetched = self.store.fetch(self.world, chain.keys, deadline_s)
        arena = self.store.arena(self.world.domain).view
        for key, place in zip(chain.keys, fetched.places, strict=False):
            assert bytes(payload(arena[place:], PAYLOAD)) == bytes_of(key)
        assert self.store.release(fetched.lease)
        return len(fetched.places)

    def settle(self) -> None:
        """Wait until everything dirty is written below."""
        self.settle_writes()
        assert not self.store.status()["leases"]

    def settle_writes(self) -> None:
        """Wait until everything dirty is written below, whatever is leased."""
        deadline = time.monotonic() + 60
        while self.store.states.unwritten():
            assert time.monotonic() < deadline, "the writer did not settle"
            self.store.ladder.wake()

    def leave_memory(self, chain: Chain | None = None) -> None:
        """Wait until all is written below, then take a chain out of memory, or everything."""
        self.settle_writes()
        index = self.store.states.index
        with self.store.states.lock:
            rows = index.find_all(chain.keys) if chain else list(index.rows())
            for row in rows:
                self.store.states.vacate(row, 0)

    def nothing_is_left_over(self) -> bool:
        """Whether no row is pinned, leased or loading, and no slot waits for its last reader."""
        states = self.store.states
        with states.lock:
            pinned = sum(states.index.leases)
            return not (pinned or states.leases or states.loading or states.leaving)


def bytes_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(PAYLOAD)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Call for a store; its house is kept when a test says so, not in between."""
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)
    made: list[Rig] = []

    def make(host_bytes: int = 2 * MIB, *tiers: MemoryTier, tier: MemoryTier | None = None) -> Rig:
        made.append(Rig(host_bytes, *tiers, *([tier] if tier else [])))
        return made[-1]

    yield make
    for one in made:
        one.store.close()
