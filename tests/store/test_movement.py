"""Moves between tiers below memory: what one tier evicts is found, verified, on a slower one."""

import threading

import pytest

from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.policy.movement import Intake
from holdfast.policy.retention import Retention
from holdfast.store.options import TierRules
from holdfast.store.write_batches import ParallelSeal
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import leave
from holdfast.testing.store_view import HOST

MIB = 1 << 20
SECRET = b"s" * 32
NEAR, FAR = 1, 2
ON_EVICTION = TierRules(intake=Intake(saves=False))
KEEPS = TierRules(intake=Intake(fetched="never"))
TAKES_ALL = TierRules(intake=Intake(saves=False, evicted="always"))
DEMOTED = NEAR, FAR, "demotion"


@pytest.fixture
def ladder(harness):
    """Memory of 1 MiB, a tier that holds 16 blocks, and a tier that takes what that one evicts."""

    def make(far, rules=ON_EVICTION, near=None, **options):
        near = near or MemoryTier(NEAR_BYTES, name="near")
        return harness(MIB, near, far, rules={NEAR: KEEPS, FAR: rules}, **options)

    return make


BLOCK_BYTES = 20 << 10  # a record of the harness: 16 KiB of payload, header and tag
NEAR_BYTES = 16 * BLOCK_BYTES


def save_used(one, seed, blocks, uses=2):
    """Save a chain, use it, and take it out of memory."""
    chain = one.chain(seed, blocks)
    one.save(chain)
    one.flush()
    for _ in range(uses - 1):
        assert one.read(chain) == blocks
    one.leave_memory(chain)
    return chain


def tiers_of(one, chain):
    return [one.view.tiers(one.namespace, key) for key in chain.keys]


def push_out(one, first_seed, chains):
    """Save other chains, of four blocks each, so that the near tier evicts older ones."""
    for seed in range(first_seed, first_seed + chains):
        one.save(one.chain(seed, 4))
        one.flush()
        one.leave_memory()


def test_what_a_tier_evicts_moves_to_the_next_one_and_comes_back(ladder):
    one = ladder(far := MemoryTier(64 * MIB, name="far"))
    chain = save_used(one, 1, 8)
    assert far.usage().records == 0, "it takes nothing at the save"
    push_out(one, 10, 6)
    assert tiers_of(one, chain) == [[FAR]] * 8
    assert one.read(chain) == 8
    assert one.view.moves[DEMOTED] == 8
    assert one.view.dropped_unmoved[NEAR] == 0


def test_what_was_used_once_is_evicted_without_a_move(ladder):
    one = ladder(far := MemoryTier(64 * MIB))
    chain = save_used(one, 1, 8, uses=1)
    push_out(one, 10, 6)
    assert tiers_of(one, chain) == [[]] * 8
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert far.usage().records == 0
    assert one.view.dropped_unmoved[NEAR] == 0, "no tier takes it"


def test_what_is_durable_moves_though_it_was_used_once(ladder):
    one = ladder(far := MemoryTier(64 * MIB), near=(near := MemoryTier(NEAR_BYTES)))
    chain = one.chain(1, 8)
    one.save(chain, retention=Retention.DURABLE)
    one.leave_memory()
    assert far.usage().records == 8, "it is written through"
    leave(one.store, one.namespace, chain.keys, FAR)
    push_out(one, 10, 6)
    assert tiers_of(one, chain) == [[FAR]] * 8
    assert near.usage().records


def test_a_tier_that_takes_all_gets_everything(ladder):
    one = ladder(MemoryTier(64 * MIB), TAKES_ALL)
    chains = [save_used(one, seed, 4, uses=1) for seed in range(12)]
    assert sum(map(one.read, chains)) == 48
    assert one.view.dropped_unmoved[NEAR] == 0


def test_a_tier_that_takes_nothing_evicted_gets_nothing(ladder):
    one = ladder(far := MemoryTier(64 * MIB), TierRules(intake=Intake(False, "never")))
    save_used(one, 1, 8)
    push_out(one, 10, 6)
    assert far.usage().records == 0


def test_a_shared_tier_takes_what_the_tier_above_evicts(ladder, harness):
    records = {}
    one = ladder(SharedMemoryTier(records))
    chain = save_used(one, 1, 8)
    push_out(one, 10, 6)
    assert {key for _, key in records} == set(chain.keys)
    other = harness(MIB, SharedMemoryTier(records))
    other.store.look(other.namespace, chain.keys, 60.0)
    assert other.read(chain) == 8, "another node finds it there"


def test_what_a_target_is_full_of_is_not_moved_and_counted(ladder):
    class FullTier(MemoryTier):
        def write(self, batch):
            self.free([put.place for put in batch])
            return [Outcome.FULL] * len(batch)

    one = ladder(FullTier(64 * MIB))
    chain = save_used(one, 1, 8)
    push_out(one, 10, 6)
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert one.view.moves[DEMOTED] == 0
    assert one.nothing_is_left_over()


def test_evictions_that_overtake_moves_are_counted(ladder):
    class HeldTier(MemoryTier):
        def __init__(self):
            super().__init__(64 * MIB)
            self.go_on = threading.Event()

        def write(self, batch):
            assert self.go_on.wait(60)
            return super().write(batch)

    one = ladder(far := HeldTier(), TAKES_ALL)
    chain = one.chain(1, 40)
    one.save(chain, stop=20)
    one.view.wait_until_written(NEAR)
    one.save(chain, start=20)
    one.view.wait_until_written(NEAR)
    dropped = one.view.dropped_unmoved[NEAR]
    far.go_on.set()
    one.flush()
    one.leave_memory()
    assert dropped
    assert one.store.cover(one.namespace, chain.keys).blocks < 40


def test_moves_to_a_tier_that_is_away_are_made_when_it_is_back(ladder):
    class Away(SharedMemoryTier):
        there = False

        def reachable(self):
            return self.there

    one = ladder(far := Away({}))
    chain = save_used(one, 1, 8)
    one.save(one.chain(50, 4))  # the near tier names candidates, and evicts none yet
    one.flush()
    one.leave_memory()
    assert one.view.deferred(FAR)
    assert not far.records
    far.there = True
    one.store.housekeep()
    one.flush()
    assert {key for _, key in far.records} <= set(chain.keys)
    assert far.records


def test_a_record_that_is_damaged_at_its_source_is_not_moved(ladder):
    records = {}
    one = ladder(far := MemoryTier(64 * MIB), near=MemoryTier(NEAR_BYTES, records))
    chain = save_used(one, 1, 8)
    for place, record in list(records.items())[:3]:
        records[place] = record[:5_000] + bytes([record[5_000] ^ 1]) + record[5_001:]
    push_out(one, 10, 6)
    assert far.usage().records == 5
    assert tiers_of(one, chain)[3:] == [[FAR]] * 5
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert [fault.outcome for fault in one.view.faults] == [Outcome.CORRUPT] * 3


def test_a_source_that_fails_during_a_move_loses_only_what_it_had(ladder):
    class Pulled(MemoryTier):
        pulled = False

        def read(self, batch):
            return [Outcome.GONE] * len(batch) if self.pulled else super().read(batch)

    one = ladder(far := MemoryTier(64 * MIB), near=(near := Pulled(NEAR_BYTES)))
    chain = save_used(one, 1, 8)
    near.pulled = True
    push_out(one, 10, 6)
    assert far.usage().records == 0
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    near.pulled = False
    assert one.save(chain) == 8, "it can be saved again"
    one.flush()
    assert one.nothing_is_left_over()


def test_an_error_of_a_source_during_a_move_is_logged_and_not_taken_for_a_closed_store(
    ladder, caplog
):
    class Raising(MemoryTier):
        raises = False

        def read(self, batch):
            if self.raises:
                raise RuntimeError("a mistake of the tier")
            return super().read(batch)

    one = ladder(MemoryTier(64 * MIB), near=(near := Raising(NEAR_BYTES)))
    save_used(one, 1, 8)
    near.raises = True
    push_out(one, 10, 6)
    assert "a mistake of the tier" in caplog.text
    assert one.nothing_is_left_over()


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "evicted"])
def test_a_block_that_leaves_its_source_during_the_move(ladder, drops):
    class HeldTier(MemoryTier):
        def __init__(self):
            super().__init__(64 * MIB)
            self.reached, self.go_on = threading.Event(), threading.Event()

        def write(self, batch):
            self.reached.set()
            assert self.go_on.wait(60)
            return super().write(batch)

    one = ladder(far := HeldTier())
    chain = save_used(one, 1, 8)
    one.save(one.chain(50, 6))
    assert far.reached.wait(60)
    if drops:
        one.store.drop("*")
    else:
        leave(one.store, one.namespace, chain.keys, NEAR)
    far.go_on.set()
    one.flush()
    if drops:
        assert one.store.cover(one.namespace, chain.keys).blocks == 0
        assert far.usage().records == 0
    else:
        assert [FAR] in tiers_of(one, chain), "its verified bytes were on the way"
        assert one.read(chain) == sum(bool(t) for t in tiers_of(one, chain))


@pytest.mark.parametrize("codec", ["off", "planes"])
def test_sealed_records_move_as_they_are(ladder, codec):
    near, far = {}, {}
    ring = KeyRing(None)
    ring.enrol("default", SECRET)
    one = ladder(
        MemoryTier(64 * MIB, far),
        TierRules(intake=Intake(saves=False), codec=codec),
        near=MemoryTier(NEAR_BYTES, near),
        ring=ring,
    )
    chain = save_used(one, 1, 8)
    before = {bytes(record[16:]) for record in near.values()}
    push_out(one, 10, 6)
    after = {bytes(record[16:]) for record in far.values()}
    assert len(after) == 8
    assert after <= before or codec == "planes"
    assert one.read(chain) == 8


def test_a_sealed_record_whose_key_was_retired_is_not_moved(ladder):
    far, ring = {}, KeyRing(None)
    ring.enrol("default", SECRET)
    one = ladder(MemoryTier(64 * MIB, far), ring=ring)
    save_used(one, 1, 8)
    one.store.rotate("default")
    one.store.retire("default", allow_loss=True)
    push_out(one, 10, 6)
    assert not far


def test_two_tiers_that_offer_each_other_everything_do_not_move_in_a_circle(harness):
    rules = {n: TierRules(intake=Intake(evicted="always", fetched="always")) for n in (1, 2, 3)}
    tiers = [MemoryTier(8 * BLOCK_BYTES, name=f"tier{n}") for n in (1, 2, 3)]
    one = harness(MIB, *tiers, rules=rules)
    chains = [one.chain(seed, 4) for seed in range(12)]
    for chain in chains:
        one.save(chain)
        one.flush()
    one.leave_memory()
    moved = one.view.moves.total()
    assert moved <= 12 * 4 * 3 * 2, "each tier got each block at most once a save and an eviction"
    for _ in range(3):
        one.store.housekeep()
        one.store.mover.wake()
        one.flush()
    assert one.view.moves.total() == moved, "nothing moves without a use"


def test_what_is_used_again_from_below_is_kept_above(harness):
    one = harness(MIB, MemoryTier(64 * MIB), MemoryTier(64 * MIB))
    chain = one.chain(1, 4)
    one.save(chain)
    one.leave_memory()
    leave(one.store, one.namespace, chain.keys, NEAR)
    assert one.read(chain) == 4
    one.flush()
    assert tiers_of(one, chain) == [[HOST, NEAR, FAR]] * 4
    assert one.view.moves[HOST, NEAR, "promotion"] == 4


def test_blocks_are_read_from_their_source_while_others_are_written(ladder, monkeypatch):
    monkeypatch.setattr("holdfast.store.tier_writer.STAGED_GROUP_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.tier_writer.LOCAL_SEAL", ParallelSeal(1, 1, 1, 1))
    reads = threading.Semaphore(0)

    class Source(MemoryTier):
        def read(self, batch):
            reads.release()
            return super().read(batch)

    class Target(MemoryTier):
        waits = True

        def write(self, batch):
            if Target.waits:  # the first group is read before, the second one meanwhile
                for _ in range(2):
                    assert reads.acquire(timeout=60), "nothing is read during a write"
                Target.waits = False
            return super().write(batch)

    near = Source(NEAR_BYTES, name="near")
    one = ladder(Target(64 * MIB), near=near)
    chain = save_used(one, 1, 8)
    while reads.acquire(blocking=False):
        pass
    push_out(one, 10, 6)
    assert tiers_of(one, chain) == [[FAR]] * 8
    assert one.read(chain) == 8


def test_moves_from_below_keep_to_their_limit(ladder):
    limited = TierRules(intake=Intake(False, "always"), move_bytes_per_s=1.0)
    one = ladder(far := MemoryTier(64 * MIB), limited)
    chain = one.chain(1, 12)
    one.save(chain)
    one.view.wait_until_written(NEAR)
    one.save(one.chain(2, 4))
    until = threading.Event()
    while not far.usage().records:
        one.store.mover.wake()
        until.wait(0.01)
    one.save(one.chain(3, 4))
    one.view.wait_until_written(NEAR)
    first = far.usage().records
    for _ in range(20):
        one.store.mover.wake()
        until.wait(0.005)
    assert far.usage().records == first, "the clock of this store stands still"
    one.clock.advance(1e9)
    one.flush()
