"""A place that a tier gave to a new block is not freed when the block before it is let go.

The tier is of another package: its `reserve` evicts a block, gives its place to a new one, and
returns late. Until it returns, the store still lists the evicted block at that place.
"""

import contextlib
import threading

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.codec.pack import payload
from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.policy.retention import Retention
from holdfast.store.options import StoreOptions
from holdfast.store.scrub import scrub
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import is_payload_of, key_of, payload_of
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.tiers.base import ReservedPlaces

MIB = 1 << 20
PAYLOAD, TOKENS, BLOCKS = 16 << 10, 16, 4
RECORD = Namespace(b"f" * 16, b"d" * 16, PAYLOAD, TOKENS).slot_bytes


class SlotTier(MemoryTier):
    """Gives the places of evicted blocks to new ones; a reserve that evicts waits for `go_on`."""

    def __init__(self, blocks):
        super().__init__(blocks * RECORD)
        self.evicted, self.go_on = threading.Event(), threading.Event()
        self.freed = []

    def reserve(self, sizes):
        places, dropped = super().reserve(sizes)
        reused = [each.place for each in dropped]
        for at, place in enumerate(places):
            if reused and place >= 0:
                places[at] = reused.pop(0)
                self._sizes[places[at]] = self._sizes.pop(place)
        if dropped:
            self.evicted.set()
            assert self.go_on.wait(60)
        return ReservedPlaces(places, dropped)

    def free(self, places):
        super().free(places)
        self.freed += places


class Node:
    """A store of the domains `old` and `new`, whose blocks a test saves, fetches and lets go."""

    def __init__(self, tier, ring):
        options = StoreOptions(clock=ManualClock(), ring=ring)
        names = {"old": b"o" * 32, "new": b"n" * 32}
        self.store = Store(2 * MIB, [tier], names, options)
        self.store.start()

    def namespace(self, name):
        fingerprint = name.encode().ljust(16)
        return Namespace(fingerprint, self.store.domain(name)[1], PAYLOAD, TOKENS)

    def save(self, name, numbers):
        namespace, keys = self.namespace(name), [*map(key_of, numbers)]
        reserved = self.store.reserve(namespace, keys, namespace.fingerprint, 0)
        for key, place in zip(keys, reserved.places, strict=True):
            payload(self.store.record(namespace, place), PAYLOAD)[:] = payload_of(key, PAYLOAD)
        self.store.commit(reserved.ticket, Retention.DURABLE)

    def leave_memory(self):
        """Wait until all is written to the tier, then take it out of memory."""
        StoreView(self.store).wait_until_written()
        leave_all(self.store)

    def fetch(self, name, numbers):
        """Fetch and check every byte; return how many blocks landed."""
        namespace, keys = self.namespace(name), [*map(key_of, numbers)]
        fetched = self.store.fetch(namespace, keys, 30.0)
        for key, place in zip(keys, fetched.places, strict=False):
            assert is_payload_of(key, payload(self.store.record(namespace, place), PAYLOAD))
        assert self.store.release(fetched.lease)
        return len(fetched.places)


@pytest.fixture
def node(tmp_path):
    """Make nodes over a tier, and close them."""
    with contextlib.ExitStack() as closing:

        def make(tier, **keys):
            ring = KeyRing(tmp_path / "ring.json")
            for name, key in keys.items():
                ring.enrol(name, key)
            one = Node(tier, ring)
            closing.callback(one.store.close)
            closing.callback(tier.go_on.set)
            return one

        yield make


WAYS = {
    "drop": lambda one: one.store.drop(one.namespace("old").fingerprint.hex()),
    "erase": lambda one: one.store.erase("old"),
    "fetch": lambda one: one.fetch("old", range(BLOCKS)),
    "verify": lambda one: scrub(one.store),
}


@pytest.mark.parametrize("let_go", WAYS.values(), ids=WAYS)
def test_blocks_that_leave_while_their_places_are_reserved_free_no_new_block(node, let_go):
    one = node(tier := SlotTier(BLOCKS), old=b"o" * 32)
    one.save("old", range(BLOCKS))
    one.leave_memory()
    one.save("new", range(10, 10 + BLOCKS))
    assert tier.evicted.wait(60)
    let_go(one)
    assert one.fetch("old", range(BLOCKS)) == 0
    tier.go_on.set()
    one.leave_memory()
    assert one.fetch("new", range(10, 10 + BLOCKS)) == BLOCKS
    assert one.store.status().tiers[1].records == BLOCKS


def test_places_of_blocks_that_the_tier_keeps_are_freed_after_the_reserve(node):
    one = node(tier := SlotTier(BLOCKS + 1), old=b"o" * 32)
    one.save("old", range(BLOCKS + 1))
    one.leave_memory()
    one.save("new", [10])
    assert tier.evicted.wait(60)
    WAYS["drop"](one)
    tier.go_on.set()
    one.leave_memory()
    one.save("new", range(11, 11 + BLOCKS))
    one.leave_memory()
    assert len(tier.freed) == BLOCKS
    assert one.fetch("new", [10, *range(11, 11 + BLOCKS)]) == BLOCKS + 1


class FailingTier(SlotTier):
    """Fails to write its first batch, and frees its places itself, after `before_failing`."""

    def write(self, batch):
        if self.before_failing is None:
            return super().write(batch)
        self.before_failing()
        self.before_failing = None
        MemoryTier.free(self, [put.place for put in batch])
        return [Outcome.GONE] * len(batch)


def test_places_of_a_failed_write_are_not_freed_again_for_blocks_that_left_meanwhile(node):
    tier = FailingTier(2 * BLOCKS)
    tier.before_failing = lambda: one.store.drop(one.namespace("old").fingerprint.hex())
    one = node(tier)
    one.save("old", range(BLOCKS))
    one.leave_memory()
    assert tier.before_failing is None
    one.save("new", range(10, 10 + BLOCKS))
    one.leave_memory()
    assert tier.freed == []
    assert one.fetch("new", range(10, 10 + BLOCKS)) == BLOCKS
