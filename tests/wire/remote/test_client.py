"""The client of a target: whatever the other end does, a call ends in time and says what it was."""

import contextlib
import socket
import struct
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import ConfigError, Outcome, RefusedError
from holdfast.status import NodeStatus
from holdfast.testing.payloads import is_right, key_of, namespace_of, record_of
from holdfast.wire.frame import encode
from holdfast.wire.local.messages import Refused
from holdfast.wire.remote import client as client_module
from holdfast.wire.remote import messages as m
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials

NAMESPACE = namespace_of(30_000)
KEYS = [key_of(i) for i in range(8)]
RECORDS = [record_of(NAMESPACE, key) for key in KEYS]
MARK = 0xA5
LATE_S = 1.0
SLACK_S = 1.5


SIZE = NAMESPACE.slot_bytes


def sizes_of(count):
    """The announcement of this many records."""
    return m.pack_sizes((RECORDS * 2)[:count])


def marked(count=8):
    """Return buffers that show whether anything was written to them."""
    buffers = [aligned_buffer(NAMESPACE.slot_bytes) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = bytes([MARK]) * len(buffer)
    return buffers


def serving(*replies):
    """Answer requests with these replies in turn, each a message or (message, payload)."""

    def script(far):
        far.welcome()
        for reply in replies:
            _, request_id, _ = far.take()
            far.say(request_id, *(reply if isinstance(reply, tuple) else (reply,)))
        far.take()

    return script


def silent(far):
    far.welcome()
    far.take()
    far.socket.recv(1)


def test_records_land_in_the_callers_buffers_and_nowhere_else(target):
    reply = m.RecordsFollow(sizes_of(3), "gone", "the disk failed", 9), b"".join(RECORDS[:3])
    node, into = target(serving(reply)), marked()
    got = node.get(NAMESPACE, KEYS, into, 60)
    assert got == (3, Outcome.GONE, "the disk failed")
    assert [is_right(into[i], NAMESPACE, KEYS[i]) for i in range(3)] == [True] * 3
    assert all(bytes(buffer) == bytes([MARK]) * len(buffer) for buffer in into[3:])


def test_records_may_be_shorter_than_their_buffers(target):
    short = [bytes(RECORDS[0][:4096]), bytes(RECORDS[1]), bytes(RECORDS[2][:8192])]
    reply = m.RecordsFollow(m.pack_sizes([*map(memoryview, short)]), "ok"), b"".join(short)
    node, into = target(serving(reply)), marked()
    assert node.get(NAMESPACE, KEYS, into, 60) == (3, Outcome.OK, "")
    for record, buffer in zip(short, into, strict=False):
        assert bytes(buffer[: len(record)]) == record
        assert set(buffer[len(record) :]) <= {MARK}


def test_a_record_longer_than_its_buffer_ends_the_run(target):
    reply = m.RecordsFollow(sizes_of(3), "ok"), b"".join(RECORDS[:3])
    node, into = target(serving(reply)), marked()
    into[1] = into[1][:4096]
    assert node.get(NAMESPACE, KEYS, into, 60)[:2] == (1, Outcome.MISS)
    assert set(into[1]) == {MARK}


def test_nonprintable_characters_in_a_targets_messages_are_escaped(target):
    hostile = "\x1b[2J\x9b31m\u202e\n"
    script = serving(m.RecordsFollow(b"", "gone", hostile), Refused(hostile))
    node = target(script)
    assert node.get(NAMESPACE, KEYS, marked(), 60).reason == r"\x1b[2J\x9b31m\u202e\n"
    node.put(RECORDS[:1], 60)
    assert r"refused: \x1b[2J\x9b31m\u202e\n" in node.trouble


def test_a_put_carries_headers_ahead_and_whole_records_behind(target):
    seen = []

    def script(far):
        far.welcome()
        message, request_id, payload = far.take()
        seen.append((message, payload))
        far.say(request_id, m.Stored(b"\1\0\1"))

    node = target(script)
    assert node.put(RECORDS[:3], 60) == [Outcome.OK, Outcome.FULL, Outcome.OK]
    ((message, payload),) = seen
    assert message == m.PutRecords(b"".join(record[:128] for record in RECORDS[:3]))
    assert payload == b"".join(RECORDS[:3])


def test_a_missing_answer_is_late_and_its_connection_is_closed(target):
    node, into = target(silent, serving(m.Existing(b"\1"))), marked()
    got = node.get(NAMESPACE, KEYS, into, LATE_S)
    assert (got.blocks, got.outcome) == (0, Outcome.LATE)
    assert node.exist(NAMESPACE, KEYS[:1], 60) == (b"\1", Outcome.OK)


def test_nothing_is_written_after_a_late_return(target):
    go, gone = threading.Event(), threading.Event()

    def script(far):
        far.welcome()
        _, request_id, _ = far.take()
        far.say(request_id, m.Existing(b"\1"))
        _, request_id, _ = far.take()
        payload = b"".join(RECORDS)
        frame = encode(request_id, m.RecordsFollow(sizes_of(8), "ok"), len(payload)) + payload
        far.socket.sendall(frame[: len(frame) // 2])
        assert go.wait(60)
        with contextlib.suppress(OSError):
            far.socket.sendall(frame[len(frame) // 2 :])
        gone.set()

    node, into = target(script), marked()
    # A busy machine may need longer than LATE_S to connect.
    assert node.exist(NAMESPACE, KEYS[:1], 60) == (b"\1", Outcome.OK)
    assert node.get(NAMESPACE, KEYS, into, LATE_S).outcome is Outcome.LATE
    after = [bytes(buffer) for buffer in into]
    go.set()
    assert gone.wait(60)
    assert [bytes(buffer) for buffer in into] == after
    assert after[-1] == bytes([MARK]) * NAMESPACE.slot_bytes


def test_a_dribble_does_not_extend_the_deadline(target):
    def script(far):
        far.welcome()
        _, request_id, _ = far.take()
        payload = b"".join(RECORDS)
        far.socket.sendall(encode(request_id, m.RecordsFollow(sizes_of(8), "ok"), len(payload)))
        for byte in payload:
            far.socket.send(bytes([byte]))
            time.sleep(0.001)

    got = target(script).get(NAMESPACE, KEYS, marked(), LATE_S)
    assert got.outcome is Outcome.LATE


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200),
        struct.pack("<IIQ", 1 << 30, 2, 0),
        struct.pack("<IIQ", 10, 2, 1 << 60) + bytes(10),
        struct.pack("<IIQ", 3, 2, 0) + b"\xc1\xc1\xc1",
        bytes(encode(7, m.RecordsFollow(b"", "miss"))),
        bytes(encode(1, m.RecordsFollow(b"", "miss"))),
        bytes(encode(2, m.RecordsFollow(sizes_of(8), "ok"), 4096 * 7)) + bytes(4096 * 7),
        bytes(encode(2, m.RecordsFollow(b"\0\x08\0\0", "ok"), 2048)) + bytes(2048),
        bytes(encode(2, m.RecordsFollow(b"\0\x10\0", "ok"), 4096)) + bytes(4096),
        bytes(encode(2, m.RecordsFollow(bytes(4), "ok"))),
        bytes(encode(2, m.RecordsFollow(b"\0\0\0\x80", "ok"), 1 << 20)) + bytes(4096),
        bytes(encode(2, m.RecordsFollow(sizes_of(2), "ok"), SIZE)) + bytes(RECORDS[0]),
        bytes(encode(2, m.RecordsFollow(b"", "ok"))),
        bytes(encode(2, m.RecordsFollow(sizes_of(1), "good"), SIZE)) + bytes(RECORDS[0]),
        bytes(encode(2, m.Stored(b""))),
        bytes(encode(2, m.Challenge(1, b""))),
    ],
    ids=[
        "another protocol", "huge body", "huge payload", "no message", "another request",
        "a reply once more", "part of a record", "part of a sector", "part of a length",
        "an empty record", "a bomb", "fewer records", "none, and well", "no outcome",
        "another reply", "hello again",
    ],
)  # fmt: skip
def test_a_target_that_answers_garbage_is_gone(target, data):
    def script(far):
        far.welcome()
        far.take()
        far.socket.sendall(data)

    got = target(script).get(NAMESPACE, KEYS, marked(), 60)
    assert (got.blocks, got.outcome) == (0, Outcome.GONE)


def test_a_payload_larger_than_asked_for_never_leaves_the_buffers(target):
    payload = b"".join(RECORDS)
    node, into = target(serving((m.RecordsFollow(sizes_of(8), "ok"), payload))), marked(9)
    got = node.get(NAMESPACE, KEYS[:2], into[:2], 60)
    assert (got.blocks, got.outcome) == (0, Outcome.GONE)
    assert all(bytes(buffer) == bytes([MARK]) * len(buffer) for buffer in into[2:])


def test_a_connection_that_breaks_mid_answer_is_gone(target):
    def script(far):
        far.welcome()
        _, request_id, _ = far.take()
        payload = b"".join(RECORDS)
        far.socket.sendall(
            encode(request_id, m.RecordsFollow(sizes_of(8), "ok"), len(payload)) + payload[:50_000]
        )

    got = target(script).get(NAMESPACE, KEYS, marked(), 60)
    assert (got.blocks, got.outcome) == (0, Outcome.GONE)


def test_a_restarted_target_is_found_again_without_an_error(target):
    def dies(far):
        far.welcome()
        _, request_id, _ = far.take()
        far.say(request_id, m.Existing(b"\1"))

    node = target(dies, serving(m.Existing(b"\0")))
    assert node.exist(NAMESPACE, KEYS[:1], 60).held == b"\1"
    assert node.exist(NAMESPACE, KEYS[:1], 60) == (b"\0", Outcome.OK)


def test_an_unreachable_target_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "tcp://{}:{}".format(*listener.getsockname())
    node = TargetClient(address)
    held = node.exist(NAMESPACE, KEYS, 60)
    assert held == (bytes(8), Outcome.GONE)
    assert node.put(RECORDS, 60) == [Outcome.GONE] * 8
    assert node.stats(60) == (NodeStatus(), Outcome.GONE)
    node.close()
    assert node.exist(NAMESPACE, KEYS, 60).outcome is Outcome.GONE


def test_records_are_unsent_without_a_free_connection_but_lookups_get_one(target):
    go, asked = threading.Event(), threading.Event()

    def busy(far):
        far.welcome()
        while True:
            _, request_id, _ = far.take()
            asked.set()
            assert go.wait(60)
            far.say(request_id, m.RecordsFollow(b"", "miss"))

    beside = serving(m.Existing(b"\1"), m.RecordsFollow(b"", "miss"))
    node = target(busy, beside, connections_max=1)
    first = threading.Thread(target=node.get, args=(NAMESPACE, KEYS, marked(), 60))
    first.start()
    assert asked.wait(60)
    assert node.get(NAMESPACE, KEYS, marked(), 0.1) == (0, Outcome.UNSENT, "")
    assert node.put(RECORDS[:2], 0.1) == [Outcome.UNSENT] * 2
    assert node.exist(NAMESPACE, KEYS[:1], 60) == (b"\1", Outcome.OK)
    on_progress = []
    last = threading.Thread(
        target=node.get, args=(NAMESPACE, KEYS, marked(), 60, on_progress.append)
    )
    last.start()
    while not node._freed._waiters:
        time.sleep(0.01)
    go.set()
    first.join()
    last.join()
    assert on_progress[0] == 0, "from then on it is the target who is waited for"
    assert on_progress[1] > 0


def test_a_call_that_fails_before_it_connects_releases_its_connection_slot(target, monkeypatch):
    """Otherwise calls with records would find no connection free after as many failures."""
    transfer_buffers = SimpleNamespace(buffer_pool=lambda: None)
    monkeypatch.setattr(client_module, "FALLBACK_S", 0.0)
    node = target(
        serving(m.Existing(b"\1")),
        serving(m.Stored(b"\1")),
        connections_max=1,
        transfer_buffers=transfer_buffers,
    )
    assert node.exist(NAMESPACE, KEYS[:1], 60).outcome is Outcome.OK

    def fail():
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(transfer_buffers, "buffer_pool", fail)
        with pytest.raises(RuntimeError):
            node.exist(NAMESPACE, KEYS[:1], 60)
    assert node.put(RECORDS[:1], 60) == [Outcome.OK]


def test_a_call_with_a_deadline_of_zero_is_late():
    assert TargetClient("tcp://127.0.0.1:1").exist(NAMESPACE, KEYS, 0) == (bytes(8), Outcome.LATE)


def test_a_target_that_refuses_one_request_is_gone_and_says_why(target):
    node = target(serving(Refused("no room for this")))
    assert node.exist(NAMESPACE, KEYS, 60).outcome is Outcome.GONE
    assert node.refusal == "no room for this"


def test_trouble_describes_the_last_call_even_if_an_earlier_refusal_repeats(target):
    def script(far):
        far.welcome()
        _, request_id, _ = far.take()
        far.say(request_id, Refused("no room"))
        _, request_id, _ = far.take()
        far.say(request_id + 7, m.Existing(b"\1"))

    node, troubles = target(script, serving(Refused("no room"))), []
    for _ in range(3):
        assert node.exist(NAMESPACE, KEYS[:1], 60).outcome is Outcome.GONE
        troubles.append(node.trouble)
    assert troubles == ["refused: no room", "the answer to request 10, not 3", "refused: no room"]


def test_a_refusal_during_the_handshake_raises_an_error(target):
    def script(far):
        far.say(0, m.Challenge(m.TARGET_PROTOCOL, b"n" * 32))
        _, request_id, _ = far.take()
        far.say(request_id, Refused("token: expired 9 s ago"))

    with pytest.raises(RefusedError, match="expired 9 s ago"):
        target(script).exist(NAMESPACE, KEYS, 60)


def test_a_first_message_that_only_a_later_target_sends_counts_as_gone(target):
    class Later(msgspec.Struct, tag="later"):
        connections: int = 1_024

    node = target(lambda far: far.say(0, Later()))
    assert node.exist(NAMESPACE, KEYS, 60).outcome is Outcome.GONE


def test_another_version_is_an_error_that_names_both(target):
    def script(far):
        far.say(0, m.Challenge(99, b"n" * 32))
        far.take()

    with pytest.raises(RefusedError, match="version 99, this node 2; install the same"):
        target(script).exist(NAMESPACE, KEYS, 60)


def test_a_target_without_the_tokens_key_is_rejected(target, tmp_path):
    from holdfast.wire.remote import token

    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(token.issue(b"k" * 32, "me", ("read",), 60, time.time()))
    with pytest.raises(RefusedError, match="does not know the key"):
        target(serving(), credentials=Credentials(token_file=str(file))).exist(NAMESPACE, KEYS, 60)


@pytest.mark.parametrize(
    "text", ["unix:///a", "tcp://host", "tcp://:1", "tcp://h:70000", "tcp://::1:1", "h:1"]
)
def test_an_address_is_checked_when_made(text):
    with pytest.raises(ConfigError, match="is not tcp://host:port, such as"):
        TargetClient(text)


def test_many_threads_share_a_target(target):
    node = target(*[serving(*[m.Existing(b"\1")] * 400)] * 16)
    wrong = []

    def ask():
        wrong.extend(
            found
            for found in (node.exist(NAMESPACE, KEYS[:1], 60) for _ in range(50))
            if found != (b"\1", Outcome.OK)
        )

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def at_once(calls):
    """Return a script that answers only when as many calls are in progress, and notes its end."""
    together, ended = threading.Barrier(calls), threading.Semaphore(0)

    def script(far):
        far.welcome()
        try:
            while True:
                _, request_id, _ = far.take()
                together.wait(60)
                far.say(request_id, m.Existing(b"\1"))
        finally:
            ended.release()

    return script, ended


def ask_at_once(node, calls):
    found = []

    def ask():
        found.append(node.exist(NAMESPACE, KEYS[:1], 60))

    threads = [threading.Thread(target=ask) for _ in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(b"\1", Outcome.OK)] * calls


def test_calls_that_are_made_at_once_again_and_again_open_no_connection_again(target, monkeypatch):
    monkeypatch.setattr(client_module, "BUSY_S", 600.0)
    script, _ = at_once(4)
    node = target(*[script] * 4)  # a fifth connection is not answered
    for _ in range(3):
        ask_at_once(node, 4)


def test_connections_that_are_no_longer_needed_are_closed(target, monkeypatch):
    # Below 0: a thread may look at the clock before another one and give back after it.
    monkeypatch.setattr(client_module, "BUSY_S", -600.0)
    script, ended = at_once(4)
    node = target(*[script] * 4)
    ask_at_once(node, 4)
    assert ended.acquire(timeout=60)
    assert ended.acquire(timeout=60)
    assert not ended.acquire(blocking=False), "two are kept"
