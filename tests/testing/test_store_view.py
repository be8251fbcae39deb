"""The view of a store tells what the store's own interface has done."""

import threading
from types import SimpleNamespace

import pytest

from holdfast.store.store import Store
from holdfast.testing import store_view
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import (
    end_leases,
    leave,
    leave_all,
    release_reservations,
    write_all_through,
)
from holdfast.testing.store_view import HOST, StoreView
from holdfast_bench.campaigns.contexts import Contexts, chain_of

MIB = 1 << 20
PAYLOAD = 16 << 10


class HeldTier(MemoryTier):
    """Writes and reads nothing before it is told to."""

    def __init__(self, capacity_bytes):
        super().__init__(capacity_bytes)
        self.go_on = threading.Event()

    def write(self, batch):
        assert self.go_on.wait(60)
        return super().write(batch)

    def read(self, batch):
        assert self.go_on.wait(60)
        return super().read(batch)


@pytest.fixture
def one():
    """A store over a tier that waits, and a context of four blocks in it."""
    tier = HeldTier(64 * MIB)
    with Store(4 * MIB, [tier], {"default": b"s" * 32}) as store:
        store.start()
        contexts, chain = Contexts(store, PAYLOAD), chain_of("a", 4)
        contexts.save(chain)
        view = StoreView(store)
        yield SimpleNamespace(
            store=store,
            view=view,
            tier=tier,
            chain=chain,
            contexts=contexts,
            namespace=contexts.namespace,
        )
        tier.go_on.set()


def test_the_view_tells_copies_from_their_save_to_their_end(one):
    view, space, [first, *_] = one.view, one.namespace, one.chain
    assert (view.held(space, one.chain), view.held(space, one.chain, 1)) == (4, 0)
    assert view.writing() == 4
    assert not view.is_saved(space, first)
    one.tier.go_on.set()
    view.wait_until_written()
    assert (view.tiers(space, first), view.is_saved(space, first)) == ([HOST, 1], True)
    assert view.copy(space, first, 1).nbytes == space.slot_bytes
    assert view.used_bytes(1) == view.used_bytes(HOST) == 4 * space.slot_bytes
    leave(one.store, space, one.chain[:1])
    assert (view.tiers(space, first), view.place(space, first)) == ([1], -1)
    with pytest.raises(KeyError):
        view.record(space, first)
    leave_all(one.store)
    leave_all(one.store, 1)
    assert (view.entries, view.copies(1), view.used_slots()) == (0, [], 0)


def test_the_view_tells_what_is_read_and_leased(one):
    one.tier.go_on.set()
    one.view.wait_until_written()
    leave_all(one.store)
    one.tier.go_on.clear()
    reader = threading.Thread(target=one.store.fetch, args=(one.namespace, one.chain, 60.0))
    reader.start()
    one.view.wait_until(lambda: one.view.reading == set(one.chain), "all blocks are read")
    one.tier.go_on.set()
    one.view.wait_until_read()
    reader.join(60)
    assert (one.view.leases, one.view.is_idle) == (1, False)
    end_leases(one.store)
    one.view.wait_until_idle()
    assert one.view.leases == 0


def test_the_view_tells_reservations_and_their_slots(one):
    keys = chain_of("b", 2)
    one.store.reserve(one.namespace, keys, one.namespace.fingerprint, 0)
    assert (one.view.reservations, one.view.used_slots(one.namespace)) == (1, 6)
    release_reservations(one.store)
    assert (one.view.reservations, one.view.used_slots(one.namespace)) == (0, 4)


def test_a_state_that_never_comes_is_named(one, monkeypatch):
    monkeypatch.setattr(store_view, "WAIT_S", 0.01)
    write_all_through(one.store)
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: all queued blocks are written"):
        one.view.wait_until_written()
