"""Streams: whole buffers, in order, and never for longer than the pace allows."""

import contextlib
import random
import socket
import threading
import time

import pytest

from holdfast.wire.remote.credentials import client_context, server_context
from holdfast.wire.remote.stream import (
    PROGRESS_S,
    Deadline,
    IdleLimit,
    PlainStream,
    ProgressLimit,
    start_tls,
)

MIB = 1 << 20


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield PlainStream(near), far


def parts_of(sizes):
    return [memoryview(bytearray(size)) for size in sizes]


def beside(work, *args):
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "sizes", [[0], [1], [5 * MIB + 3], [1, 0, 4096, 3 * MIB, 7], [100] * 1500, [700_000] * 9]
)
def test_bytes_sent_in_parts_are_received_in_parts_of_other_sizes(ends, sizes):
    near, far = ends
    sent = random.Random(1).randbytes(sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    out = [memoryview(sent)[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    thread = beside(PlainStream(far).send, out, Deadline.within(60))
    into = parts_of(sizes[::-1])
    near.receive(into, Deadline.within(60))
    thread.join()
    assert b"".join(into) == sent


def test_a_receive_ends_at_its_deadline_and_keeps_what_came(ends):
    near, far = ends
    far.sendall(b"abc")
    (into,) = parts_of([10])
    with pytest.raises(TimeoutError):
        near.receive([into], Deadline.within(0.5))
    assert bytes(into) == b"abc" + bytes(7)


def test_a_send_that_the_peer_does_not_read_ends_at_its_deadline(ends):
    near, _ = ends
    with pytest.raises(TimeoutError):
        near.send([bytes(64 * MIB)], Deadline.within(0.2))


def test_progress_is_reported_during_a_receive(ends):
    near, far = ends
    sent, on_progress, told = random.Random(4).randbytes(MIB), [], threading.Event()

    def hear(nbytes):
        on_progress.append(nbytes)
        told.set()

    def speak():
        far.sendall(sent[:1000])
        if told.wait(60):
            far.sendall(sent[1000:])

    thread = beside(speak)
    (into,) = parts_of([MIB])
    near.receive([into], Deadline.within(60, hear))
    thread.join()
    assert (into, on_progress[0]) == (sent, 1000)


def test_progress_is_reported_during_a_send(ends):
    near, far = ends[0], PlainStream(ends[1])
    sent, told = bytes(64 * MIB), threading.Event()
    thread = beside(near.send, [sent], Deadline.within(60, lambda _: told.set()))
    assert told.wait(60), "what the system holds for the other side went"
    (into,) = parts_of([len(sent)])
    far.receive([into], Deadline.within(60))
    thread.join()


def test_calls_that_report_progress_set_the_socket_timeout_once(ends, monkeypatch):
    near, far = ends
    set_to = []
    limit = near._socket.setsockopt

    class Counted:
        def __getattr__(self, name):
            return getattr(raw, name)

        def setsockopt(self, *option):
            set_to.append(option)
            limit(*option)

    raw, near._socket = near._socket, Counted()
    for left_s in (90.0, 80.0, 70.0, 60.0):
        far.sendall(b"ab")
        near.receive(parts_of([1, 1]), Deadline.within(left_s, lambda _: None))
    assert len(set_to) == 1
    assert Deadline.within(90.0, lambda _: None).seconds() == PROGRESS_S
    assert Deadline.within(90.0).seconds() > 8.0


class Short:
    """A pace of many short calls, without an end; counts those in which nothing moved."""

    def __init__(self):
        self.stalls = -1

    def seconds(self, moved):
        self.stalls += not moved
        return 0.01


@pytest.mark.parametrize("sealed", [False, True])
def test_a_send_cut_into_short_calls_loses_and_repeats_nothing(ends, tmp_path, sealed):
    near, far = ends[0], PlainStream(ends[1])
    if sealed:
        near, far = sealed_ends(ends, tmp_path)
    sent, pace = random.Random(2).randbytes(24 * MIB), Short()
    parts = [memoryview(sent)[i : i + 5 * MIB] for i in range(0, len(sent), 5 * MIB)]
    thread = beside(near.send, parts, pace)
    end = time.monotonic() + 60
    while pace.stalls < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not near.drains(0.0)
    (into,) = parts_of([len(sent)])
    far.receive([into], Deadline.within(60))
    thread.join()
    assert into == sent
    assert near.drains(60.0)
    if sealed:
        near.close()
        far.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_receive_checks_its_limit_while_it_waits_and_continues(ends, tmp_path, sealed):
    near, far = ends[0], PlainStream(ends[1])
    if sealed:
        near, far = sealed_ends(ends, tmp_path)
    sent, pace = random.Random(3).randbytes(MIB), Short()

    def speak():
        for number, start in enumerate(range(0, len(sent), MIB // 4)):
            while pace.stalls <= number:  # the receiver has waited in vain once more
                time.sleep(0.01)
            far.send([sent[start : start + MIB // 4]], Deadline.within(60))

    thread = beside(speak)
    (into,) = parts_of([len(sent)])
    near.receive([into], pace)
    thread.join()
    assert into == sent
    assert pace.stalls >= 3
    with pytest.raises(ConnectionAbortedError, match=r"nothing was received for 0\.2 s"):
        near.receive(parts_of([1]), IdleLimit(0.2, 0.05))
    near.close()
    far.close()


def sealed_ends(ends, folder):
    pytest.importorskip("cryptography")
    from holdfast_bench.harness.certificates import Authority

    files = Authority(folder).issue("peer", "127.0.0.1")
    sealed = []
    raw = ends[0]._socket
    thread = beside(
        lambda: sealed.append(start_tls(raw, server_context(files), Deadline.within(60)))
    )
    far = start_tls(ends[1], client_context(files), Deadline.within(60), "127.0.0.1")
    thread.join()
    return sealed[0], far


def test_a_receive_below_the_minimum_rate_times_out(ends):
    near, far = ends
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.02):
            far.send(b"x")

    thread = beside(trickle)
    with pytest.raises(TimeoutError, match=r"bytes moved in 0\.3 s; at least 1000 must"):
        near.receive(parts_of([MIB]), ProgressLimit(1000, 0.3))
    stop.set()
    thread.join()


def test_a_slow_tls_reader_above_the_minimum_rate_does_not_time_out(ends, tmp_path):
    """It takes 468 KiB in 4 s, of which 32 must move: less than one large call has."""
    for end in (ends[0]._socket, ends[1]):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    near, far = sealed_ends(ends, tmp_path)

    def take():
        (into,) = parts_of([8 << 10])
        with contextlib.suppress(OSError):
            for _ in range(96):
                far.receive([into], Deadline.within(60))
                time.sleep(0.07)

    thread = beside(take)
    try:
        near.send([bytes(96 * (8 << 10))], ProgressLimit(32 << 10, 4.0))
    finally:
        near.cut()
        thread.join()
        near.close()
        far.close()


def test_enough_bytes_extend_the_progress_limit():
    pace = ProgressLimit(1000, 0.05)
    time.sleep(0.06)
    assert pace.seconds(1000) > 0
    time.sleep(0.06)
    with pytest.raises(TimeoutError):
        pace.seconds(999)


def test_a_receive_raises_if_the_other_side_closes(ends):
    near, far = ends
    far.sendall(b"ab")
    far.close()
    with pytest.raises(ConnectionError):
        near.receive(parts_of([3]), Deadline.within(60))


@pytest.mark.parametrize("sealed", [False, True])
def test_cutting_a_stream_ends_a_waiting_receive(ends, tmp_path, sealed):
    near, far = sealed_ends(ends, tmp_path) if sealed else ends
    timer = threading.Timer(0.1, near.cut)
    timer.start()
    with pytest.raises(ConnectionError):
        near.receive(parts_of([3]), Deadline.within(60))
    timer.join()
    near.close()
    far.close()
