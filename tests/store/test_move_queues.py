"""Moves that wait: blocks queued, deferred and not admitted, in memory and below it."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.index.residency import Residency
from holdfast.policy.admit import AlwaysAdmit, SecondTouch, WriteBudget
from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.block_table import HOST
from holdfast.store.copies import CopyTable
from holdfast.store.move_queues import BELOW_FIRST, BlockMove, MoveQueues, MoveReason
from holdfast.tiers.base import Place

SAVE, REWRITE, PROMOTION, DEMOTION, RENEWAL, _ = MoveReason
NAMESPACE = Namespace(b"f" * 32, b"d" * 16, 1_024, 16)


@pytest.fixture
def index():
    index = Residency(3)
    for number in range(4):
        index.add(NAMESPACE, bytes([number]) * 16, b"", number)
    return index


@pytest.fixture
def rules(index):
    return AdmissionRules(index, ManualClock(), [AlwaysAdmit(), AlwaysAdmit()], [{}, {}])


@pytest.fixture
def copies(index):
    """Every row is in memory."""
    copies = CopyTable(index)
    copies.hold_all(HOST, {row: Place(row) for row in index.rows()})
    return copies


@pytest.fixture
def queues(copies, rules):
    return MoveQueues(copies, rules, [1, 2])


def popped(queues, tier):
    """The row of the next move to a tier; -1 if there is none."""
    move = queues.pop(tier)
    return move.row if move else -1


def test_a_block_is_queued_once_for_each_tier_without_it(queues, copies):
    copies.hold(0, 1, Place(7))
    assert queues.enqueue(0)
    assert queues.enqueue(0)
    assert (queues.length(1), queues.length(2)) == (0, 1)
    assert queues.is_queued(0)
    assert not queues.is_queued(1)


def test_only_the_named_tiers_get_a_block_that_is_written_through(queues):
    queues.write_through([0], [2])
    assert (queues.length(1), queues.length(2)) == (0, 1)


def test_blocks_leave_a_queue_in_order_of_arrival(queues):
    for row in (2, 0, 1):
        queues.enqueue(row, [1])
    assert [popped(queues, 1) for _ in range(4)] == [2, 0, 1, -1]


def test_a_tier_that_does_not_admit_a_block_does_not_get_it(index, copies):
    rules = AdmissionRules(index, ManualClock(), [SecondTouch(100), AlwaysAdmit()], [{}, {}])
    queues = MoveQueues(copies, rules, [1, 2])
    assert not queues.enqueue(0, [1])
    assert queues.enqueue(0), "the other tier takes it"
    queues.write_through([1])
    assert (queues.length(1), queues.length(2)) == (1, 2)


def test_a_block_beyond_its_domains_write_budget_is_queued_for_no_tier(index, copies):
    budget = WriteBudget(AlwaysAdmit(), NAMESPACE.slot_bytes * 24)  # one record a minute
    budgets = [{NAMESPACE.domain: budget}, {NAMESPACE.domain: budget}]
    rules = AdmissionRules(index, ManualClock(), [AlwaysAdmit(), AlwaysAdmit()], budgets)
    queues = MoveQueues(copies, rules, [1, 2])
    assert queues.enqueue(0)
    assert not queues.enqueue(1), "so it may be evicted"
    assert len(queues) == 1


def test_a_deferred_block_may_be_evicted_until_its_tier_answers(queues):
    queues.defer(BlockMove(0, 1, SAVE))
    assert not queues.is_admitted(0)
    assert queues.deferred(1) == 1
    queues.resume(1)
    assert queues.is_admitted(0)
    assert (queues.deferred(1), popped(queues, 1)) == (0, 0)


def test_a_deferred_block_that_is_queued_for_another_tier_stays_in_memory(queues):
    queues.enqueue(0, [2])
    queues.defer(BlockMove(0, 1, SAVE))
    assert queues.is_admitted(0)


def test_queueing_a_block_overrides_an_earlier_refusal(queues):
    queues.do_not_admit([0, 1, 2])
    queues.write_through([0])
    queues.enqueue(1, [2])
    queues.rewrite(2, 1)
    assert all(map(queues.is_admitted, range(3)))


def test_a_save_with_longer_retention_admits_only_blocks_kept_in_memory_only(queues):
    queues.keep_in_memory_only([0])
    queues.do_not_admit([1])
    assert queues.admit_ephemeral([0, 1, 2]) == [0]
    assert queues.is_admitted(0)
    assert not queues.is_admitted(1)
    assert queues.admit_ephemeral([0]) == []


def test_a_block_that_one_tier_refuses_stays_until_the_other_tier_has_it(queues):
    queues.enqueue(0)
    assert popped(queues, 1) == 0
    queues.do_not_admit([0])
    assert queues.is_admitted(0)
    assert popped(queues, 2) == 0
    queues.do_not_admit([0])
    assert not queues.is_admitted(0)


def test_a_block_that_left_memory_and_is_nowhere_else_is_queued_for_no_tier(queues, copies):
    queues.enqueue(0)
    copies.remove(0, HOST)
    queues.defer(BlockMove(0, 1, SAVE))
    queues.do_not_admit([0])
    queues.left_memory(0)
    assert len(queues) == queues.deferred(1) == 0
    assert queues.is_admitted(0)


def test_blocks_being_written_count_as_queued(queues):
    queues.enqueue(0, [1])
    assert popped(queues, 1) == 0
    queues.add_writing(1, 1)
    assert len(queues) == 1
    assert queues.clear(1) == []
    queues.add_writing(1, -1)
    assert len(queues) == 0


def test_a_block_that_left_memory_moves_from_the_tier_that_has_it(queues, copies):
    queues.enqueue(0)
    queues.defer(BlockMove(1, 2, REWRITE))
    for row in (0, 1):
        copies.hold(row, 1, Place(7))
        copies.remove(row, HOST)
        queues.left_memory(row)
    assert queues.pop(1) is None
    assert (queues.from_below(2), queues.deferred(2)) == (1, 1)
    assert queues.pop(2) == BlockMove(0, 2, SAVE)
    queues.resume(2)
    assert queues.pop(2) == BlockMove(1, 2, REWRITE)


def test_demotions_wait_behind_what_is_in_memory_but_do_not_starve(queues, copies):
    for row in (2, 3):
        copies.hold(row, 1, Place(row))
        copies.remove(row, HOST)
        assert queues.demote(row, 2)
        assert queues.demote(row, 2), "it is queued already"
    queues.enqueue(0, [2])
    queues.enqueue(1, [2])
    assert (queues.length(2), queues.from_below(2)) == (4, 2)
    assert queues.pop(2) == BlockMove(0, 2, SAVE)
    assert queues.pop(2, turn=BELOW_FIRST) == BlockMove(2, 2, DEMOTION)
    assert queues.pop(2) == BlockMove(1, 2, SAVE)
    assert queues.pop(2, from_below=False) is None
    assert queues.pop(2) == BlockMove(3, 2, DEMOTION)


def test_a_demotion_that_the_target_does_not_admit_is_not_queued(index, copies):
    rules = AdmissionRules(index, ManualClock(), [AlwaysAdmit(), SecondTouch(100)], [{}, {}])
    queues = MoveQueues(copies, rules, [1, 2])
    assert not queues.demote(0, 2)
    assert queues.length(2) == 0


def test_a_row_that_names_no_block_any_more_moves_nowhere(queues, copies):
    queues.enqueue(0, [1])
    queues.demote(0, 2)
    queues.defer(BlockMove(0, 1, SAVE))
    for tier in range(2):
        copies.remove(0, tier)
    queues.forget(0)
    assert len(queues) == queues.deferred(1) == 0


def test_tiers_that_get_blocks_on_eviction_get_none_at_the_save(copies, rules):
    queues = MoveQueues(copies, rules, [1])
    queues.save(0)
    assert (queues.length(1), queues.length(2)) == (1, 0)
    assert queues.enqueue(1), "when memory evicts it"
    assert (queues.length(1), queues.length(2)) == (2, 1)
