"""What a target sends: nobody's flood, and nobody who does not read, holds up another domain."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from holdfast.fairness.fair_queue import WorkItem
from holdfast.node.remote import send_budget
from holdfast.node.remote.send_budget import (
    MIN_COST_BYTES,
    PIECE_BYTES,
    SMALL_BYTES,
    SendBudget,
    SendScheduler,
)
from holdfast.wire.remote.stream import ProgressLimit

MIB = 1 << 20
FLOOD, VICTIM, THIRD = b"f" * 16, b"v" * 16, b"t" * 16
MESSAGE = memoryview(bytearray(8 * MIB))


class Peer:
    """Takes whole pieces, `takes` at a time; says whose they were, in the order they went."""

    def __init__(self, name, log, takes=None, reads=True):
        self.name, self.log, self.takes = name, log, takes
        self.reading = threading.Event()
        if reads:
            self.reading.set()

    def send(self, parts, limit):
        left, moved = sum(map(len, parts)), 0
        while left:
            wait_s = limit.seconds(moved)
            moved = 0
            if self.reading.wait(wait_s):
                moved = min(left, self.takes or left)
                self.log.append((self.name, moved))
                if self.takes:
                    time.sleep(wait_s)
            left -= moved

    def drains(self, wait_s):
        return self.reading.wait(wait_s)


@pytest.fixture
def senders():
    """Run sends side by side; they end with the test."""
    with ThreadPoolExecutor(64) as pool:
        yield pool


def until(condition, within_s=60.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def kept_in_time(kept, domain, nbytes, share=1.0, within_s=0.0):
    work_item = WorkItem(domain, nbytes, share)
    return work_item if kept.acquire(work_item, within_s) else None


# Memory


def test_a_domain_gets_the_whole_send_budget_alone_and_its_share_with_others():
    kept = SendBudget(12 * MIB)
    assert all(kept_in_time(kept, FLOOD, 2 * MIB) for _ in range(6))
    assert kept_in_time(kept, FLOOD, 1) is None
    first = kept_in_time(kept, VICTIM, 5 * MIB, share=2.0)
    assert first  # one message always
    assert kept_in_time(kept, VICTIM, 2 * MIB, share=2.0) is None  # all of it is kept
    assert kept.total() == 17 * MIB
    work_slots = [WorkItem(FLOOD, 2 * MIB)] * 4
    for work_item in work_slots:
        kept.release(work_item)
    assert kept_in_time(kept, FLOOD, MIB) is None  # 4 MiB is its part beside a share of 2
    assert kept_in_time(kept, VICTIM, 3 * MIB, share=2.0)
    kept.release(WorkItem(VICTIM, 3 * MIB))
    kept.release(first)
    assert kept_in_time(kept, FLOOD, 8 * MIB)


def test_a_waiting_work_item_proceeds_when_memory_is_released(senders):
    kept = SendBudget(4 * MIB)
    work_item = WorkItem(FLOOD, 4 * MIB)
    assert kept.acquire(work_item, 0)
    waiting = senders.submit(kept.acquire, work_item, 30)
    assert not kept.acquire(work_item, 0.01)
    kept.release(work_item)
    assert waiting.result(60)
    assert kept.total() == 4 * MIB


def test_a_work_item_that_times_out_leaves_nothing_in_the_queue():
    kept = SendBudget(4 * MIB)
    work_item = WorkItem(FLOOD, 4 * MIB)
    assert kept.acquire(work_item, 0)
    for _ in range(50):
        assert not kept.acquire(work_item, 0)
    assert not len(kept._queue)
    kept.release(work_item)
    assert kept.total() == 0
    assert kept.acquire(work_item, 0)


def test_requests_of_zero_bytes_take_no_send_budget():
    kept = SendBudget(MIB)
    work_item = WorkItem(FLOOD, 0)
    assert kept.acquire(work_item, 0)
    assert kept.acquire(work_item, 0)
    kept.release(work_item)
    kept.release(work_item)
    assert kept.total() == 0


# The line


def test_a_flood_of_connections_does_not_delay_another_domain(senders, monkeypatch):
    """Of fifty with four pieces each, few go before all four of the victim's are gone."""
    # With one slot, which is never taken from a slow sender, the scheduler alone sets the order.
    monkeypatch.setattr(send_budget, "SPARE_SLOTS", 0)
    monkeypatch.setattr(send_budget, "SLOT_S", 600.0)
    line, log = SendScheduler(1), []
    holder = WorkItem(THIRD)
    line.enter(holder)
    flood = [
        senders.submit(line.send, Peer("flood", log), [MESSAGE], WorkItem(FLOOD), ProgressLimit())
        for _ in range(50)
    ]
    until(lambda: len(line._work_slots) == 50)
    victim = senders.submit(
        line.send, Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit()
    )
    until(lambda: len(line._work_slots) == 51)
    line.leave(holder)
    for sent in (*flood, victim):
        sent.result(60)
    assert len(log) == 204
    last = max(i for i, (name, _) in enumerate(log) if name == "victim")
    assert last < 60


def test_peers_that_do_not_read_lose_their_slots_and_end_at_their_time_limit(senders, monkeypatch):
    monkeypatch.setattr(send_budget, "SPARE_SLOTS", 0)  # the other domain would take a spare slot
    line, log = SendScheduler(1), []
    peers = [Peer("stuck", log, reads=False) for _ in range(20)]
    stuck = [
        senders.submit(line.send, peer, [MESSAGE], WorkItem(FLOOD), ProgressLimit(1, 120.0))
        for peer in peers
    ]
    until(lambda: not line._work_slots.empty)
    for _ in range(5):
        line.send(Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit())
    assert sum(nbytes for _, nbytes in log) == 5 * len(MESSAGE)
    assert not any(each.done() for each in stuck)
    for peer in peers:
        peer.reading.set()
    for each in stuck:
        each.result(60)
    silent = Peer("stuck", log, reads=False)
    with pytest.raises(TimeoutError, match="bytes moved in"):
        line.send(silent, [MESSAGE], WorkItem(FLOOD), ProgressLimit(1, 0.5))
    assert line._work_slots.empty


@pytest.fixture
def shift_s(monkeypatch):
    """A list with the seconds by which the clock of senders is ahead."""
    shift_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + shift_s[0])
    monkeypatch.setattr("holdfast.wire.remote.stream.time", clock)
    monkeypatch.setattr(send_budget, "time", clock)
    return shift_s


def test_a_peer_that_reads_slowly_does_not_keep_its_send_slot(senders, shift_s):
    """It never takes a piece in its time; others go in between."""
    line, log = SendScheduler(1), []
    slow = Peer("slow", log, takes=1 << 10)
    end = ProgressLimit(MIB, 600.0)
    trickling = senders.submit(line.send, slow, [MESSAGE], WorkItem(FLOOD), end)
    until(lambda: log)
    line.send(Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit())
    line.send(Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit())
    assert not trickling.done()
    shift_s[0] = 600.0
    with pytest.raises(TimeoutError, match="at least 1048576 must"):
        trickling.result(60)
    assert line._work_slots.empty


def test_waiting_for_a_send_slot_does_not_count_toward_the_progress_limit(senders, shift_s):
    line, log = SendScheduler(1), []
    holders = [WorkItem(domain) for domain in (FLOOD, VICTIM, THIRD)]
    for work_item in holders:  # the usual slot, and the spare ones
        line.enter(work_item)
    waits = senders.submit(
        line.send,
        Peer("late", log),
        [MESSAGE[: 3 * PIECE_BYTES]],
        WorkItem(FLOOD),
        ProgressLimit(MIB, 30.0),
    )
    until(lambda: len(line._work_slots) == 1)
    shift_s[0] = 60.0
    assert not log
    for work_item in holders:
        line.leave(work_item)
    waits.result(60)
    assert [nbytes for _, nbytes in log] == [PIECE_BYTES] * 3


def test_small_messages_bypass_the_queue_while_it_is_empty(senders):
    line, log = SendScheduler(1), []
    small = MESSAGE[:SMALL_BYTES]
    work_slots = [WorkItem(domain) for domain in (FLOOD, VICTIM, THIRD)]
    for work_item in work_slots:
        line.enter(work_item)
    line.send(Peer("small", log), [small], WorkItem(FLOOD), ProgressLimit())
    assert log == [("small", SMALL_BYTES)]
    large = senders.submit(
        line.send, Peer("large", log), [MESSAGE], WorkItem(FLOOD), ProgressLimit()
    )
    until(lambda: len(line._work_slots))
    behind = senders.submit(
        line.send, Peer("small", log), [small], WorkItem(FLOOD), ProgressLimit()
    )
    time.sleep(0.05)
    assert len(log) == 1
    for work_item in work_slots:
        line.leave(work_item)
    large.result(60)
    behind.result(60)
    assert len(log) > 2


def test_a_flood_of_small_messages_is_queued_and_delays_no_other_domain(senders, monkeypatch):
    """One goes beside the line; of the others, no more go before the victim than its share."""
    monkeypatch.setattr(send_budget, "SLOT_S", 10.0)  # of 60 threads one may wait long for the core
    line, log = SendScheduler(1), []
    work_slots = [WorkItem(domain) for domain in (THIRD, b"x", b"y")]
    for work_item in work_slots:
        line.enter(work_item)
    peers = [Peer("flood", log, reads=False) for _ in range(60)]
    work_item = WorkItem(FLOOD, SMALL_BYTES)
    flood = [
        senders.submit(line.send, peer, [MESSAGE[:SMALL_BYTES]], work_item, ProgressLimit())
        for peer in peers
    ]
    until(lambda: len(line._work_slots) == 59, 60.0)
    victim = senders.submit(
        line.send, Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit()
    )
    until(lambda: len(line._work_slots) == 60)
    for peer in peers:
        peer.reading.set()
    for work_item in work_slots:
        line.leave(work_item)
    for sent in (*flood, victim):
        sent.result(60)
    last = max(i for i, (name, _) in enumerate(log) if name == "victim")
    assert sum(nbytes for name, nbytes in log[:last] if name == "flood") <= 10 * MIB
    line.send(Peer("small", log), [MESSAGE[:1]], WorkItem(THIRD), ProgressLimit())
    assert line._bypassing == 0
    assert line._work_slots.empty


def test_small_messages_of_a_lone_domain_are_never_queued(senders):
    line, log = SendScheduler(1), []
    peers = [Peer("alone", log, reads=False) for _ in range(20)]
    sent = [
        senders.submit(line.send, p, [MESSAGE[:1]], WorkItem(FLOOD), ProgressLimit()) for p in peers
    ]
    until(lambda: line._bypassing == 20, 60.0)
    for peer in peers:
        peer.reading.set()
    for each in sent:
        each.result(60)


def test_tiny_messages_are_charged_a_minimum_cost(senders):
    """A thousand of them would go before one piece of another domain otherwise."""
    line, log = SendScheduler(1), []
    work_slots = [WorkItem(domain) for domain in (THIRD, b"x", b"y")]
    for work_item in work_slots:
        line.enter(work_item)
    for _ in range(2 * PIECE_BYTES // MIN_COST_BYTES):
        line.send(Peer("tiny", log), [MESSAGE[:1]], WorkItem(FLOOD, 1), ProgressLimit())
    flood = senders.submit(
        line.send, Peer("flood", log), [MESSAGE], WorkItem(FLOOD), ProgressLimit()
    )
    until(lambda: len(line._work_slots) == 1)
    victim = senders.submit(
        line.send, Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit()
    )
    until(lambda: len(line._work_slots) == 2)
    log.clear()
    line.leave(work_slots.pop())
    until(lambda: log)
    assert log[0][0] == "victim"
    for work_item in work_slots:
        line.leave(work_item)
    for sent in (flood, victim):
        sent.result(60)


def test_messages_that_bypassed_the_queue_are_charged_to_their_domain(senders):
    line, log = SendScheduler(1), []
    work_slots = [WorkItem(domain) for domain in (THIRD, b"x", b"y")]
    for work_item in work_slots:
        line.enter(work_item)
    for _ in range(64):
        small = [MESSAGE[:SMALL_BYTES]]
        line.send(Peer("small", log), small, WorkItem(FLOOD, SMALL_BYTES), ProgressLimit())
    flood = senders.submit(
        line.send, Peer("flood", log), [MESSAGE], WorkItem(FLOOD), ProgressLimit()
    )
    until(lambda: len(line._work_slots) == 1)
    victim = senders.submit(
        line.send, Peer("victim", log), [MESSAGE], WorkItem(VICTIM), ProgressLimit()
    )
    until(lambda: len(line._work_slots) == 2)
    line.leave(work_slots.pop())  # one place only: who gets it came last, and had less
    until(lambda: len(log) > 64)
    assert log[64][0] == "victim"
    for work_item in work_slots:
        line.leave(work_item)
    for sent in (flood, victim):
        sent.result(60)
