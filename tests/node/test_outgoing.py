"""What a target sends: nobody's flood, and nobody who does not read, holds up another domain."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.node import outgoing
from holdfast.node.outgoing import LEAST_BYTES, PIECE_BYTES, SMALL_BYTES, TURN_S, Kept, Line
from holdfast.policy.turns import Turn
from holdfast.wire.stream import Progress

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

    def send(self, parts, pace):
        left, moved = sum(map(len, parts)), 0
        while left:
            wait_s = pace.seconds(moved)
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
    turn = Turn(domain, nbytes, share)
    return turn if kept.take(turn, within_s) else None


# Memory


def test_one_domain_may_keep_all_of_it_and_beside_others_its_part_by_share():
    kept = Kept(12 * MIB)
    assert all(kept_in_time(kept, FLOOD, 2 * MIB) for _ in range(6))
    assert kept_in_time(kept, FLOOD, 1) is None
    first = kept_in_time(kept, VICTIM, 5 * MIB, share=2.0)
    assert first  # one message always
    assert kept_in_time(kept, VICTIM, 2 * MIB, share=2.0) is None  # all of it is kept
    assert kept.total() == 17 * MIB
    turns = [Turn(FLOOD, 2 * MIB)] * 4
    for turn in turns:
        kept.give(turn)
    assert kept_in_time(kept, FLOOD, MIB) is None  # 4 MiB is its part beside a share of 2
    assert kept_in_time(kept, VICTIM, 3 * MIB, share=2.0)
    kept.give(Turn(VICTIM, 3 * MIB))
    kept.give(first)
    assert kept_in_time(kept, FLOOD, 8 * MIB)


def test_who_waits_for_memory_is_let_on_when_there_is_some(senders):
    kept = Kept(4 * MIB)
    turn = Turn(FLOOD, 4 * MIB)
    assert kept.take(turn, 0)
    waiting = senders.submit(kept.take, turn, 30)
    assert not kept.take(turn, 0.01)
    kept.give(turn)
    assert waiting.result(10)
    assert kept.total() == 4 * MIB


def test_what_was_not_let_on_in_time_leaves_nothing_behind():
    kept = Kept(4 * MIB)
    turn = Turn(FLOOD, 4 * MIB)
    assert kept.take(turn, 0)
    for _ in range(50):
        assert not kept.take(turn, 0)
    assert not len(kept._queue)
    kept.give(turn)
    assert kept.total() == 0
    assert kept.take(turn, 0)


def test_requests_that_bring_nothing_cost_nothing():
    kept = Kept(MIB)
    turn = Turn(FLOOD, 0)
    assert kept.take(turn, 0)
    assert kept.take(turn, 0)
    kept.give(turn)
    kept.give(turn)
    assert kept.total() == 0


# The line


def test_a_flood_of_connections_does_not_delay_another_domain(senders):
    """Of fifty with four pieces each, few go before all four of the victim's are gone."""
    line, log = Line(1), []
    turns = [Turn(domain) for domain in (THIRD, b"x", b"y")]
    for turn in turns:
        line.enter(turn)
    flood = [
        senders.submit(line.send, Peer("flood", log), [MESSAGE], Turn(FLOOD), Progress())
        for _ in range(50)
    ]
    until(lambda: len(line._turns) == 50)
    victim = senders.submit(line.send, Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    until(lambda: len(line._turns) == 51)
    for turn in turns:
        line.leave(turn)
    for sent in (*flood, victim):
        sent.result(30)
    assert len(log) == 204
    last = max(i for i, (name, _) in enumerate(log) if name == "victim")
    assert last < 60


def test_peers_that_do_not_read_lose_their_turns_and_keep_their_pace(senders):
    line, log = Line(1), []
    stuck = [
        senders.submit(
            line.send, Peer("stuck", log, reads=False), [MESSAGE], Turn(FLOOD), Progress(1, 0.5)
        )
        for _ in range(20)
    ]
    time.sleep(2 * TURN_S)
    for _ in range(5):
        line.send(Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    assert sum(nbytes for _, nbytes in log) == 5 * len(MESSAGE)
    for each in stuck:
        with pytest.raises(TimeoutError, match="bytes moved in"):
            each.result(30)
    assert line._turns.empty


def test_a_peer_that_trickles_has_short_turns(senders):
    """It never takes a piece in its time; others go in between."""
    line, log = Line(1), []
    slow = Peer("slow", log, takes=1 << 10)
    end = Progress(MIB, 3.0)
    trickling = senders.submit(line.send, slow, [MESSAGE], Turn(FLOOD), end)
    until(lambda: log)
    line.send(Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    line.send(Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    assert not trickling.done()
    with pytest.raises(TimeoutError, match="at least 1048576 must"):
        trickling.result(30)
    assert line._turns.empty


def test_time_in_line_is_not_held_against_the_peer(senders):
    line, log = Line(1), []
    turns = [Turn(domain) for domain in (FLOOD, VICTIM, THIRD)]
    for turn in turns:  # the usual place, and the spare ones
        line.enter(turn)
    waits = senders.submit(
        line.send, Peer("late", log), [MESSAGE[: 3 * PIECE_BYTES]], Turn(FLOOD), Progress(MIB, 0.5)
    )
    time.sleep(1.0)
    assert not log
    for turn in turns:
        line.leave(turn)
    waits.result(10)
    assert [nbytes for _, nbytes in log] == [PIECE_BYTES] * 3


def test_small_messages_go_beside_the_line_until_somebody_waits(senders):
    line, log = Line(1), []
    small = MESSAGE[:SMALL_BYTES]
    turns = [Turn(domain) for domain in (FLOOD, VICTIM, THIRD)]
    for turn in turns:
        line.enter(turn)
    line.send(Peer("small", log), [small], Turn(FLOOD), Progress())
    assert log == [("small", SMALL_BYTES)]
    large = senders.submit(line.send, Peer("large", log), [MESSAGE], Turn(FLOOD), Progress())
    until(lambda: len(line._turns))
    behind = senders.submit(line.send, Peer("small", log), [small], Turn(FLOOD), Progress())
    time.sleep(0.05)
    assert len(log) == 1
    for turn in turns:
        line.leave(turn)
    large.result(10)
    behind.result(10)
    assert len(log) > 2


def test_a_flood_of_small_messages_stands_in_line_and_does_not_delay_another_domain(
    senders, monkeypatch
):
    """One goes beside the line; of the others, no more go before the victim than its share."""
    monkeypatch.setattr(outgoing, "TURN_S", 10.0)  # of 60 threads one may wait long for the core
    line, log = Line(1), []
    turns = [Turn(domain) for domain in (THIRD, b"x", b"y")]
    for turn in turns:
        line.enter(turn)
    peers = [Peer("flood", log, reads=False) for _ in range(60)]
    turn = Turn(FLOOD, SMALL_BYTES)
    flood = [
        senders.submit(line.send, peer, [MESSAGE[:SMALL_BYTES]], turn, Progress()) for peer in peers
    ]
    until(lambda: len(line._turns) == 59, 10.0)
    victim = senders.submit(line.send, Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    until(lambda: len(line._turns) == 60)
    for peer in peers:
        peer.reading.set()
    for turn in turns:
        line.leave(turn)
    for sent in (*flood, victim):
        sent.result(30)
    last = max(i for i, (name, _) in enumerate(log) if name == "victim")
    assert sum(nbytes for name, nbytes in log[:last] if name == "flood") <= 10 * MIB
    line.send(Peer("small", log), [MESSAGE[:1]], Turn(THIRD), Progress())
    assert line._slipping == 0
    assert line._turns.empty


def test_small_messages_of_a_domain_that_is_alone_never_stand_in_line(senders):
    line, log = Line(1), []
    peers = [Peer("alone", log, reads=False) for _ in range(20)]
    sent = [senders.submit(line.send, p, [MESSAGE[:1]], Turn(FLOOD), Progress()) for p in peers]
    until(lambda: line._slipping == 20, 10.0)
    for peer in peers:
        peer.reading.set()
    for each in sent:
        each.result(10)


def test_tiny_messages_count_as_more_than_their_bytes(senders):
    """A thousand of them would go before one piece of another domain otherwise."""
    line, log = Line(1), []
    turns = [Turn(domain) for domain in (THIRD, b"x", b"y")]
    for turn in turns:
        line.enter(turn)
    for _ in range(2 * PIECE_BYTES // LEAST_BYTES):
        line.send(Peer("tiny", log), [MESSAGE[:1]], Turn(FLOOD, 1), Progress())
    flood = senders.submit(line.send, Peer("flood", log), [MESSAGE], Turn(FLOOD), Progress())
    until(lambda: len(line._turns) == 1)
    victim = senders.submit(line.send, Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    until(lambda: len(line._turns) == 2)
    log.clear()
    line.leave(turns.pop())
    until(lambda: log)
    assert log[0][0] == "victim"
    for turn in turns:
        line.leave(turn)
    for sent in (flood, victim):
        sent.result(10)


def test_small_messages_that_went_beside_the_line_count_for_who_waits_in_it_later(senders):
    line, log = Line(1), []
    turns = [Turn(domain) for domain in (THIRD, b"x", b"y")]
    for turn in turns:
        line.enter(turn)
    for _ in range(64):
        small = [MESSAGE[:SMALL_BYTES]]
        line.send(Peer("small", log), small, Turn(FLOOD, SMALL_BYTES), Progress())
    flood = senders.submit(line.send, Peer("flood", log), [MESSAGE], Turn(FLOOD), Progress())
    until(lambda: len(line._turns) == 1)
    victim = senders.submit(line.send, Peer("victim", log), [MESSAGE], Turn(VICTIM), Progress())
    until(lambda: len(line._turns) == 2)
    line.leave(turns.pop())  # one place only: who gets it came last, and had less
    until(lambda: len(log) > 64)
    assert log[64][0] == "victim"
    for turn in turns:
        line.leave(turn)
    for sent in (flood, victim):
        sent.result(10)
