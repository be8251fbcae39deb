"""Large batches go over two connections at once, and a batch is no more than its leading run."""

import socket
import threading

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.wire.frame import HEADER_BYTES, encode
from holdfast.wire.remote import messages as m
from holdfast.wire.remote.batches import SPLIT_BYTES

NAMESPACE = namespace_of(30_000)
KEYS = [key_of(i) for i in range(8)]
RECORDS = [record_of(NAMESPACE, key) for key in KEYS]
LATE_S = 5.0


def room(count=8):
    """Return buffers for so many records."""
    return [aligned_buffer(NAMESPACE.slot_bytes) for _ in range(count)]


def test_a_large_batch_goes_over_two_connections_and_keeps_its_order(target):
    count = SPLIT_BYTES // NAMESPACE.slot_bytes + 2
    seen = []

    def script(far):
        far.welcome()
        message, request_id, _ = far.take()
        headers = range(0, len(message.headers), 128)
        held = bytes(message.headers[i : i + 128] != RECORDS[3][:128] for i in headers)
        seen.append(message.headers)
        far.say(request_id, m.Stored(held))

    records = [RECORDS[i % 8] for i in range(count)]
    expected = [Outcome.FULL if i % 8 == 3 else Outcome.OK for i in range(count)]
    assert target(script, script).put(records, 60) == expected
    whole = b"".join(record[:128] for record in records)
    assert whole in (seen[0] + seen[1], seen[1] + seen[0])
    assert sorted(map(len, seen)) == [128 * (count // 2), 128 * (count - count // 2)]


def test_a_get_reports_progress_before_the_whole_answer_has_arrived(target):
    on_progress, go_on = [], threading.Event()

    def script(far):
        far.welcome()
        _, request_id, _ = far.take()
        whole = encode(
            request_id, m.RecordsFollow(m.pack_sizes(RECORDS), "ok"), 8 * len(RECORDS[0])
        ) + b"".join(RECORDS)
        far.socket.sendall(whole[:100])
        assert go_on.wait(60)
        far.socket.sendall(whole[100:])

    def hear(nbytes):
        on_progress.append(nbytes)
        go_on.set()

    assert target(script).get(NAMESPACE, KEYS, room(), 60, hear).blocks == 8
    assert on_progress[0] == HEADER_BYTES


def test_a_put_reports_progress_before_all_bytes_are_sent(target):
    records = [RECORDS[i % 8] for i in range(SPLIT_BYTES // NAMESPACE.slot_bytes - 1)]
    on_progress, go_on = [], threading.Event()

    def script(far):
        far.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        far.welcome()
        assert go_on.wait(60)
        far.say(far.take()[1], m.Stored(bytes([1]) * len(records)))

    def hear(nbytes):
        on_progress.append(nbytes)
        go_on.set()

    assert target(script).put(records, 60, hear) == [Outcome.OK] * len(records)
    assert 0 < on_progress[0] < SPLIT_BYTES


@pytest.mark.parametrize("said", ["full", "ok"])
def test_a_missing_block_in_the_first_half_ends_the_run(said, target):
    count = SPLIT_BYTES // NAMESPACE.slot_bytes + 2
    keys = [key_of(i) for i in range(count)]

    def script(far):
        far.welcome()
        message, request_id, _ = far.take()
        first = message.keys.startswith(keys[0])
        blocks = 2 if first else len(message.keys) // 16
        reply = m.RecordsFollow(m.pack_sizes([RECORDS[0]] * blocks), said if first else "ok")
        far.say(request_id, reply, bytes(RECORDS[0]) * blocks)

    got = target(script, script).get(NAMESPACE, keys, room(count), 60)
    assert (got.blocks, got.outcome) == (2, Outcome(said))


def test_both_halves_end_before_the_call_returns(target):
    count = SPLIT_BYTES // NAMESPACE.slot_bytes + 2
    keys = [key_of(i) for i in range(count)]

    def script(far):
        far.welcome()
        message, request_id, _ = far.take()
        if message.keys.startswith(keys[0]):
            far.say(request_id, m.RecordsFollow(b"", "miss"))
        far.socket.recv(1)  # the other half is never answered

    node = target(script, script)
    got = node.get(NAMESPACE, keys, room(count), LATE_S)
    assert (got.blocks, got.outcome) == (0, Outcome.MISS)
    assert node.trouble.startswith("late: ")
