"""A store does not hold its lock while it waits for a tier, which may be of another package."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.store.lookup import PromptTokens, plan_fetch
from holdfast.store.plan_log import EngineId
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.tiers import checked

MIB = 1 << 20
WAIT_S = 10.0
"""How long a method of a tier waits for the store's lock: other threads hold it briefly."""


class Asks:
    """Notes the methods that were called, and those that were called under the store's lock."""

    def __init__(self):
        self.lock = None
        self.called, self.locked = set(), set()

    def note(self, method):
        if self.lock is None:
            return
        self.called.add(method)
        with ThreadPoolExecutor(1) as other:  # the lock is re-entrant, so another thread takes it
            if not other.submit(self._take).result():
                self.locked.add(method)

    def _take(self):
        taken = self.lock.acquire(timeout=WAIT_S)
        if taken:
            self.lock.release()
        return taken


class LocalTier(MemoryTier):
    """A local tier of another package."""

    def __init__(self, capacity, asks):
        super().__init__(capacity)
        self.asks = asks

    def usage(self):
        self.asks.note("usage")
        return super().usage()


class SharedTier(SharedMemoryTier):
    """A shared tier of another package."""

    def __init__(self, asks):
        super().__init__({}, "pool")
        self.asks, self.gone = asks, None

    def reachable(self):
        self.asks.note("reachable")
        return True

    def misplaced(self, namespace, keys):
        return set()

    def lost(self):
        gone, self.gone = self.gone, None
        return gone


@pytest.fixture
def asks(monkeypatch):
    monkeypatch.setattr(checked, "STATE_S", 6 * WAIT_S)  # the store's wait must not end first
    return Asks()


def test_a_scrub_asks_a_tier_for_its_usage_without_the_lock(harness, asks):
    one = harness(MIB, LocalTier(MIB, asks), scrub_every_s=3600.0)
    asks.lock = one.view.lock
    one.store.scrubber.pace()
    assert asks.called == {"usage"}
    assert not asks.locked


def test_a_tier_that_drops_blocks_is_asked_for_its_capacity_without_the_lock(harness, asks):
    one = harness(MIB, tier := LocalTier(100 << 10, asks), public_domain="default")
    asks.lock = one.view.lock
    for seed in range(3):
        one.save(one.chain(seed, 3))
        one.flush()
    assert tier.usage().records < 9, "it dropped blocks"
    assert asks.called == {"usage"}
    assert not asks.locked


def test_a_plan_asks_whether_a_tier_can_be_reached_without_the_lock(harness, asks):
    one = harness(MIB, SharedTier(asks))
    asks.lock = one.view.lock
    chain = one.chain(1, 3)
    plan_fetch(one.store, one.namespace, chain.keys, PromptTokens(EngineId("", "", ""), 0, 0, 1.0))
    assert asks.called == {"reachable"}
    assert not asks.locked


def test_a_tier_tells_which_places_it_lost_without_the_lock(harness, asks):
    one = harness(MIB, tier := SharedTier(asks))
    one.save(one.chain(1, 5))
    one.flush()
    written = tier.usage().written_bytes
    asks.lock = one.view.lock

    def lost(place):
        asks.note("lost")
        return True

    tier.gone = lost
    one.store.housekeep()
    one.flush()
    assert "lost" in asks.called
    assert not asks.locked
    assert tier.usage().written_bytes > written
