"""Write queues of the lower tiers: blocks queued, deferred and not admitted."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.index.residency import Residency
from holdfast.policy.admit import AlwaysAdmit, SecondTouch, WriteBudget
from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.copies import CopyTable
from holdfast.store.write_queues import WriteQueues

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
def queues(index, rules):
    return WriteQueues(CopyTable(index), rules)


def test_a_block_is_queued_once_for_each_tier_without_it(queues, index):
    index.places[1][0] = 7
    assert queues.enqueue(0)
    assert queues.enqueue(0)
    assert (queues.length(1), queues.length(2)) == (0, 1)
    assert queues.is_queued(0)
    assert not queues.is_queued(1)


def test_a_tier_that_is_skipped_does_not_get_a_block(queues):
    queues.write_through([0], skipped={0, 1})
    assert (queues.length(1), queues.length(2)) == (0, 1)


def test_blocks_leave_a_queue_in_order_of_arrival(queues):
    for row in (2, 0, 1):
        queues.enqueue(row, [1])
    assert [queues.pop(1) for _ in range(4)] == [2, 0, 1, -1]


def test_a_tier_that_does_not_admit_a_block_does_not_get_it(index):
    rules = AdmissionRules(index, ManualClock(), [SecondTouch(100), AlwaysAdmit()], [{}, {}])
    queues = WriteQueues(CopyTable(index), rules)
    assert not queues.enqueue(0, [1])
    assert queues.enqueue(0), "the other tier takes it"
    queues.write_through([1])
    assert (queues.length(1), queues.length(2)) == (1, 2)


def test_a_block_beyond_its_domains_write_budget_is_queued_for_no_tier(index):
    budget = WriteBudget(AlwaysAdmit(), NAMESPACE.slot_bytes * 24)  # one record a minute
    budgets = [{NAMESPACE.domain: budget}, {NAMESPACE.domain: budget}]
    rules = AdmissionRules(index, ManualClock(), [AlwaysAdmit(), AlwaysAdmit()], budgets)
    queues = WriteQueues(CopyTable(index), rules)
    assert queues.enqueue(0)
    assert not queues.enqueue(1), "so it may be evicted"
    assert len(queues) == 1


def test_a_deferred_block_may_be_evicted_until_its_tier_answers(queues):
    queues.defer(0, 1)
    assert not queues.is_admitted(0)
    assert queues.deferred(1) == 1
    queues.resume(1)
    assert queues.is_admitted(0)
    assert (queues.deferred(1), queues.pop(1)) == (0, 0)


def test_a_deferred_block_that_is_queued_for_another_tier_stays_in_memory(queues):
    queues.enqueue(0, [2])
    queues.defer(0, 1)
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
    assert queues.pop(1) == 0
    queues.do_not_admit([0])
    assert queues.is_admitted(0)
    assert queues.pop(2) == 0
    queues.do_not_admit([0])
    assert not queues.is_admitted(0)


def test_a_block_that_left_memory_is_queued_for_no_tier(queues):
    queues.enqueue(0)
    queues.defer(0, 1)
    queues.do_not_admit([0])
    queues.left_memory(0)
    assert len(queues) == queues.deferred(1) == 0
    assert queues.is_admitted(0)


def test_blocks_being_written_count_as_queued(queues):
    queues.enqueue(0, [1])
    assert queues.pop(1) == 0
    queues.set_writing(1, 1)
    assert len(queues) == 1
    assert queues.clear(1) == []
    queues.set_writing(1, 0)
    assert len(queues) == 0
