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
def test_what_is_sent_in_parts_arrives_in_other_parts(ends, sizes):
    near, far = ends
    sent = random.Random(1).randbytes(sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    out = [memoryview(sent)[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    thread = beside(PlainStream(far).send, out, Deadline.within(20))
    into = parts_of(sizes[::-1])
    near.receive(into, Deadline.within(20))
    thread.join()
    assert b"".join(into) == sent


def test_a_receive_ends_at_its_deadline_and_keeps_what_came(ends):
    near, far = ends
    far.sendall(b"abc")
    (into,) = parts_of([10])
    with pytest.raises(TimeoutError):
        near.receive([into], Deadline.within(0.5))
    assert bytes(into) == b"abc" + bytes(7)


def test_a_send_nobody_takes_ends_at_its_deadline(ends):
    near, _ = ends
    with pytest.raises(TimeoutError):
        near.send([bytes(64 * MIB)], Deadline.within(0.2))


def test_who_wants_to_hear_of_bytes_hears_of_them_while_a_receive_goes_on(ends):
    near, far = ends
    sent, on_progress, told = random.Random(4).randbytes(MIB), [], threading.Event()

    def hear(nbytes):
        on_progress.append(nbytes)
        told.set()

    def speak():
        far.sendall(sent[:1000])
        if told.wait(5):
            far.sendall(sent[1000:])

    thread = beside(speak)
    (into,) = parts_of([MIB])
    near.receive([into], Deadline.within(5, hear))
    thread.join()
    assert (into, on_progress[0]) == (sent, 1000)


def test_who_wants_to_hear_of_bytes_hears_of_them_while_a_send_goes_on(ends):
    near, far = ends[0], PlainStream(ends[1])
    sent, told = bytes(64 * MIB), threading.Event()
    thread = beside(near.send, [sent], Deadline.within(20, lambda _: told.set()))
    assert told.wait(10), "what the system holds for the other side went"
    (into,) = parts_of([len(sent)])
    far.receive([into], Deadline.within(20))
    thread.join()


def test_no_time_out_is_set_anew_for_each_call_that_somebody_hears_of(ends, monkeypatch):
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
    for left_s in (9.0, 8.0, 2.0, 0.5):
        far.sendall(b"ab")
        near.receive(parts_of([1, 1]), Deadline.within(left_s, lambda _: None))
    assert len(set_to) == 1
    assert Deadline.within(9.0, lambda _: None).seconds() == PROGRESS_S
    assert Deadline.within(9.0).seconds() > 8.0


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
    end = time.monotonic() + 20
    while pace.stalls < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not near.drains(0.0)
    (into,) = parts_of([len(sent)])
    far.receive([into], Deadline.within(60))
    thread.join()
    assert into == sent
    assert near.drains(10.0)
    if sealed:
        near.close()
        far.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_receive_looks_up_every_so_often_and_goes_on(ends, tmp_path, sealed):
    near, far = ends[0], PlainStream(ends[1])
    if sealed:
        near, far = sealed_ends(ends, tmp_path)
    sent, pace = random.Random(3).randbytes(MIB), Short()

    def speak():
        for start in range(0, len(sent), MIB // 4):
            time.sleep(0.1)
            far.send([sent[start : start + MIB // 4]], Deadline.within(20))

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
        lambda: sealed.append(start_tls(raw, server_context(files), Deadline.within(20)))
    )
    far = start_tls(ends[1], client_context(files), Deadline.within(20), "127.0.0.1")
    thread.join()
    return sealed[0], far


def test_a_trickle_is_given_up(ends):
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


def test_a_peer_that_takes_enough_over_tls_keeps_its_pace(ends, tmp_path):
    """It takes 468 KiB in 4 s, of which 160 must move: less than one large call has."""
    for end in (ends[0]._socket, ends[1]):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    near, far = sealed_ends(ends, tmp_path)

    def take():
        (into,) = parts_of([8 << 10])
        with contextlib.suppress(OSError):
            for _ in range(96):
                far.receive([into], Deadline.within(20))
                time.sleep(0.07)

    thread = beside(take)
    try:
        near.send([bytes(96 * (8 << 10))], ProgressLimit(160 << 10, 4.0))
    finally:
        near.cut()
        thread.join()
        near.close()
        far.close()


def test_enough_bytes_buy_more_time():
    pace = ProgressLimit(1000, 0.05)
    time.sleep(0.06)
    assert pace.seconds(1000) > 0
    time.sleep(0.06)
    with pytest.raises(TimeoutError):
        pace.seconds(999)


def test_the_end_of_the_other_side_is_an_error(ends):
    near, far = ends
    far.sendall(b"ab")
    far.close()
    with pytest.raises(ConnectionError):
        near.receive(parts_of([3]), Deadline.within(5))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_cut_wakes_whoever_waits(ends, tmp_path, sealed):
    near, far = sealed_ends(ends, tmp_path) if sealed else ends
    timer = threading.Timer(0.1, near.cut)
    timer.start()
    with pytest.raises(ConnectionError):
        near.receive(parts_of([3]), Deadline.within(20))
    timer.join()
    near.close()
    far.close()
