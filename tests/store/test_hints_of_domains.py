"""Hints of several domains: whatever one of them asks for, the others' hints have an effect."""

import pytest

from holdfast.clock import ManualClock
from holdfast.fairness.shares import Quota
from holdfast.store import pending_hints
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView

MIB = 1 << 20
KEYS = {"a": b"a" * 32, "b": b"b" * 32}
HOST_BYTES = 2 * MIB


class Tenants:
    """A store with two domains over a tier."""

    def __init__(self, quotas=None):
        options = StoreOptions(clock=ManualClock(), quotas=quotas)
        self.store = Store(HOST_BYTES, [MemoryTier(64 * MIB)], KEYS, options)
        self.view = StoreView(self.store)
        self.store.start()
        self.a, self.b = (self.store.session(FINGERPRINT, name) for name in "ab")
        self.half = HOST_BYTES // 2 // self.a.namespace.slot_bytes
        """Blocks that fit half of the memory."""

    def below(self, session, seed, blocks):
        """Save a context to the tier only; return its tokens."""
        tokens = tokens_for(seed, blocks)
        for stop in range(10, blocks + 10, 10):
            part = tokens_for(seed, min(stop, blocks))
            session.save(part, blocks_for(seed, min(stop, blocks)))
            self.view.wait_until_written()
            leave_all(self.store)
        return tokens

    @staticmethod
    def blocks(tokens):
        return tokens // LAYOUT.block_tokens


@pytest.fixture
def tenants(monkeypatch):
    """Call for a store; its housekeeping runs when a test calls it."""
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 3_600.0)
    made = []

    def make(quotas=None):
        made.append(Tenants(quotas))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


def test_a_domain_with_endless_prestages_does_not_stop_those_of_another(tenants, monkeypatch):
    monkeypatch.setattr(pending_hints, "WAITING_MAX", 8)
    one = tenants()
    flood, context = one.below(one.a, 1, 3), one.below(one.b, 2, 3)
    for _ in range(20):
        one.a.prestage(flood, 80_000.0)
    assert one.a.prestage(flood, 80_000.0) == 0, "its part is full"
    assert one.blocks(one.b.prestage(context, 0.0)) == 3
    one.view.wait_until(lambda: one.store.status().hints.staged_bytes, "it is in memory")


def test_a_domain_that_pins_all_it_can_leaves_room_for_pins_and_prestages_of_another(tenants):
    one = tenants()
    flood, context = (one.below(session, 1, one.half) for session in (one.a, one.b))
    short = one.below(one.b, 2, 4)
    pinned = one.blocks(one.a.pin(flood, 3_600.0))
    assert pinned == one.half // 2
    assert one.blocks(one.b.prestage(short, 0.0)) == 4
    one.view.wait_until(lambda: one.store.status().hints.staged_bytes, "it is in memory")
    assert one.blocks(one.b.pin(context, 60.0)) == (one.half - pinned) // 2 - 4


def test_a_domain_that_is_alone_on_a_store_may_pin_half_of_the_memory(harness):
    one = harness(2 * MIB, MemoryTier(64 * MIB))
    half = one.store.host_bytes // 2 // one.namespace.slot_bytes
    chain = one.chain(1, half)
    one.save(chain)
    one.flush_writes()
    assert one.store.pin(one.namespace, chain.keys, 60.0) == half


def test_prestages_leave_what_other_domains_have_reserved(tenants):
    reserved = HOST_BYTES * 3 // 4
    one = tenants({"b": {0: Quota(reserved_bytes=reserved)}})
    open_blocks = (HOST_BYTES - reserved) // 2 // one.a.namespace.slot_bytes
    context = one.below(one.a, 1, one.half)
    assert one.blocks(one.a.prestage(context, 0.0)) == open_blocks // 2
    one.view.wait_until(lambda: one.store.status().hints.staged_bytes, "it is in memory")
    kept = one.store.status().hints.staged_bytes
    assert kept == open_blocks // 2 * one.a.namespace.slot_bytes
