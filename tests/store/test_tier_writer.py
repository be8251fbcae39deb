"""On the way down: what is dropped or found bad while it is written does not come back."""

import itertools
import threading

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import fail_check, leave, write_through
from holdfast.testing.store_view import HOST
from holdfast.tiers.base import NOWHERE, ReservedPlaces
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.write_stop import PAUSE_S

MIB = 1 << 20


class HeldTier(MemoryTier):
    """Writes only once it is let go on."""

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, batch):
        self.reached.set()
        assert self.go_on.wait(60)
        return super().write(batch)


def test_a_block_dropped_while_it_is_written_stays_dropped(harness) -> None:
    one = harness(2 * MIB, HeldTier())
    chain = one.chain(1, 4)
    one.save(chain)
    assert one.tier.reached.wait(60)
    assert one.store.drop("*") == {"dropped": 4, "complete": True}
    one.tier.go_on.set()
    one.flush()
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert one.tier.usage().records == 0
    assert one.save(chain) == 4


def test_a_block_found_bad_while_it_is_written_is_not_published_below(harness) -> None:
    one = harness(2 * MIB, HeldTier())
    chain = one.chain(1, 2)
    one.save(chain)
    assert one.tier.reached.wait(60)
    fail_check(one.store, one.namespace, chain.keys[1], HOST, Outcome.CORRUPT)
    one.tier.go_on.set()
    one.flush()
    assert one.store.cover(one.namespace, chain.keys).blocks == 1
    assert one.save(chain) == 1, "so it is really written again"


class RaisingTier(MemoryTier):
    """Its first calls of one method end in an error, as no tier's should."""

    def __init__(self, method: str) -> None:
        super().__init__(64 * MIB)
        self._method, self.raised = method, 0

    def _raise(self, method: str) -> None:
        if method == self._method and self.raised < 2:
            self.raised += 1
            raise RuntimeError(f"{method} failed")

    def reserve(self, sizes):
        self._raise("reserve")
        return super().reserve(sizes)

    def write(self, batch):
        self._raise("write")
        return super().write(batch)


@pytest.mark.parametrize("method", ["reserve", "write"])
def test_a_tier_whose_write_raised_an_exception_is_written_to_again(harness, method) -> None:
    one = harness(2 * MIB, RaisingTier(method))
    for seed in (1, 2):
        one.save(one.chain(seed, 2))
        one.flush()
    one.save(one.chain(3, 2))
    one.flush()
    assert one.tier.raised == 2
    assert one.tier.usage().records == 2
    assert one.view.is_idle
    assert one.view.writing() == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_with_a_damaged_header_is_not_written_and_does_not_stop_the_writer(
    harness, shared
) -> None:
    tier = SharedMemoryTier({}) if shared else MemoryTier(64 * MIB)
    one = harness(2 * MIB, tier, writes_behind=False)
    chain = one.chain(1, 2)
    one.save(chain)
    one.view.record(one.namespace, chain.keys[1])[40] ^= 1
    write_through(one.store, one.namespace, chain.keys)
    one.flush()
    assert one.store.cover(one.namespace, chain.keys).blocks == 1, "it passes for held no longer"
    assert one.save(chain) == 1
    write_through(one.store, one.namespace, chain.keys)
    one.flush()
    leave(one.store, one.namespace, chain.keys[1:])
    assert one.read(chain) == 2, "the writer goes on"


class FullTier(MemoryTier):
    """Has no place for any record."""

    def reserve(self, sizes):
        return ReservedPlaces([NOWHERE] * len(sizes), [])


def test_a_block_refused_by_one_tier_is_not_offered_again_while_another_is_slow(harness):
    slow = HeldTier()
    one = harness(2 * MIB, FullTier(64 * MIB), slow)
    chain = one.chain(2, 4)
    one.save(one.chain(1, 2))
    assert slow.reached.wait(60)
    one.save(chain)
    one.view.wait_until_written(1)
    evictable = [one.view.is_evictable(one.namespace, key) for key in chain.keys]
    assert not any(evictable), "the slow tier is to have them"
    assert (one.view.waiting(1), one.view.waiting(2)) == (0, 4)
    slow.go_on.set()
    one.flush()
    assert slow.usage().records == 6


def test_blocks_that_left_memory_wait_for_a_stuck_tier_up_to_a_bound(harness, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.store.move_queues.FROM_BELOW_MAX", 100)
    slow = HeldTier()
    one = harness(MIB, MemoryTier(64 * MIB), slow)
    for seed in range(40):
        one.save(one.chain(seed, 10))
        one.view.wait_until_written(1)
    assert slow.reached.wait(60)
    waiting, in_memory = one.view.waiting(2), one.view.used_slots(one.namespace)
    assert 100 <= waiting <= 100 + in_memory
    slow.go_on.set()
    one.flush()
    assert slow.usage().records >= waiting, "they came from the other tier"


class UncertainTier(SharedMemoryTier):
    """Fails once when it is asked, after a write, whether it can be reached."""

    def __init__(self) -> None:
        super().__init__({})
        self.raised, self._fails = False, False

    def write(self, batch):
        self._fails = not self.raised
        return super().write(batch)

    def reachable(self):
        if self._fails:
            self._fails, self.raised = False, True
            raise RuntimeError("reachable failed")
        return True

    def misplaced(self, namespace, keys):
        return set()

    def lost(self):
        return None


def test_a_tier_that_raises_an_error_after_a_write_keeps_no_block_in_memory(harness) -> None:
    one = harness(2 * MIB, UncertainTier())
    one.save(one.chain(1, 2))
    one.flush()
    assert one.tier.raised
    assert one.nothing_is_left_over()
    one.save(one.chain(2, 2))
    one.flush()
    assert len(one.tier.records) == 4


def test_blocks_queued_while_disk_writes_are_stopped_are_written_on_resume(harness) -> None:
    medium, clock = MemoryExtents.formatted(32 * SECTOR, 16), ManualClock()
    one = harness(4 * MIB, tier_on(medium, clock))
    assert one.store.recovery.wait(60)
    medium.fails = lambda what, at, nbytes: what == "write"
    seeds = itertools.count()
    while not one.store.status().tiers[1].writes_stopped:
        one.save(one.chain(next(seeds), 1))
        one.flush()
    chain = one.chain(next(seeds), 5)
    one.save(chain)
    one.flush()
    medium.fails = None
    one.store.housekeep()
    assert one.store.status().tiers[1].records == 0, "it is tried again after a pause"
    clock.advance(PAUSE_S)
    one.store.housekeep()
    one.flush()
    (_, disk) = one.store.status().tiers
    assert (disk.records, disk.writes_stopped) == (6, ""), "with the block at which it stopped"
    one.leave_memory(chain)
    assert one.read(chain) == 5
