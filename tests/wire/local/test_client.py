"""The client: answers find their askers; whatever goes wrong, it ends in time and for good."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.errors import ConfigError, NodeGoneError, ProtocolError, RefusedError
from holdfast.wire.frame import CONNECTION_ID, encode
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

HELLO = m.Hello(m.PROTOCOL, "test")
ARENA_BYTES = 1 << 20


def silent(peer):
    peer.welcome()
    while peer.take():
        pass


def counting(peer):
    """Answers each Release with its number, as Committed."""
    peer.welcome()
    while frame := peer.take():
        peer.say(frame.request_id, m.Committed(frame.message.lease))


def test_an_arena_smaller_than_announced_is_a_protocol_error(fake_node):
    def small(peer):
        frame = peer.take()
        data = encode(frame.request_id, m.Welcome(m.PROTOCOL, "fake", b"k" * 32, 1 << 40))
        fd = os.memfd_create("arena")
        os.ftruncate(fd, 4096)
        socket.send_fds(peer.socket, [data], [fd])
        os.close(fd)

    with pytest.raises(ProtocolError, match="an arena of 1099511627776 bytes"):
        Client(fake_node(small), HELLO, 60)


@pytest.mark.parametrize(
    "answer",
    [
        m.Refused("no"),
        m.Done(),
        m.Welcome(m.PROTOCOL, "fake", b"k" * 32, 1 << 40),
        m.Welcome(m.PROTOCOL, "fake", b"k" * 32, 0),
    ],
    ids=["refused", "no-welcome", "another-size", "no-arena"],
)
def test_descriptors_that_a_node_sends_in_the_handshake_are_closed(fake_node, answer):
    name = f"descriptor-{id(answer)}"
    given = threading.Event()

    def give_two(peer):
        frame = peer.take()
        data = bytes(encode(frame.request_id, answer))
        fd = os.memfd_create(name)
        for part in (data[:3], data[3:]):
            socket.send_fds(peer.socket, [part], [fd])
        os.close(fd)
        given.set()

    with contextlib.suppress(RefusedError, ProtocolError):
        Client(fake_node(give_two), HELLO, 60).close()
    assert given.wait(60)
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            assert name not in str(fd.readlink())


def test_sending_to_a_node_that_does_not_read_times_out(fake_node, monkeypatch):
    still = threading.Event()

    def stand_still(peer):
        peer.welcome()
        still.wait(20)

    waited = []
    poll = select.poll

    def noted():
        waiting = poll()
        return SimpleNamespace(
            register=waiting.register, poll=lambda ms: waited.append(ms) or waiting.poll(ms)
        )

    client = Client(fake_node(stand_still), HELLO, 60)
    monkeypatch.setattr("holdfast.wire.local.client.select.poll", noted)

    def ask_on():
        while True:
            client.send(m.Cover(bytes(16 * 1000)))

    with pytest.raises(NodeGoneError, match=r"accepted no request for 0\.1 s"):
        ask_on()
    still.set()
    assert max(waited) <= 100


def test_a_client_refused_before_its_hello_gets_the_reason(tmp_path, monkeypatch):
    address = f"unix://{tmp_path}/full.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "full.sock"))
        listener.listen()

        def turn_away_first(request_id, message):
            with listener.accept()[0] as accepted:
                accepted.sendall(encode(0, m.Refused("1024 connections are open, the limit")))
            return encode(request_id, message)

        monkeypatch.setattr("holdfast.wire.local.client.encode", turn_away_first)
        with pytest.raises(RefusedError, match="1024 connections"):
            Client(address, HELLO, 60)


def test_replies_in_any_order_reach_their_requests(fake_node):
    def script(peer):
        peer.welcome()
        frames = [peer.take() for _ in range(3)]
        for frame in reversed(frames):
            peer.say(frame.request_id, m.Committed(frame.message.lease))

    client = Client(fake_node(script), HELLO, 60)
    ids = [client.send(m.Release(n)) for n in range(3)]
    assert [client.wait(i, 60).blocks for i in ids] == [0, 1, 2]
    client.close()


def test_poll_never_waits_and_finds_the_reply_once_it_came(fake_node):
    go = threading.Event()

    def script(peer):
        peer.welcome()
        frame = peer.take()
        assert go.wait(30)
        peer.say(frame.request_id, m.Done())
        peer.take()

    client = Client(fake_node(script), HELLO, 60)
    request_id = client.send(m.Status())
    assert client.poll(request_id) is None
    go.set()
    end = time.monotonic() + 30
    while (reply := client.poll(request_id)) is None and time.monotonic() < end:
        pass
    assert reply == m.Done()
    with pytest.raises(ValueError, match="was taken"):
        client.poll(request_id)
    client.close()


def test_expect_waits_for_its_reply_behind_replies_to_other_requests(fake_node, monkeypatch):
    go = threading.Event()

    def script(peer):
        peer.welcome()
        first, second = peer.take(), peer.take()
        peer.say(first.request_id, m.Done())
        assert go.wait(30)
        peer.say(second.request_id, m.Committed(7))
        peer.take()

    def a_moment(fd, seconds):
        assert 0 < seconds < 0.006
        go.set()
        return select.select([fd], [], [], 60)[0]

    client = Client(fake_node(script), HELLO, 60)
    client.forget(client.send(m.Status()))
    expected = client.send(m.Status())
    assert select.select([client._socket], [], [], 60)[0]
    monkeypatch.setattr("holdfast.wire.local.client.readable_within", lambda *_: False)
    assert client.expect(expected, 0.005) is None
    monkeypatch.setattr("holdfast.wire.local.client.readable_within", a_moment)
    assert client.expect(expected, 0.005) == m.Committed(7)
    client.close()


def test_many_threads_share_one_connection(fake_node):
    client = Client(fake_node(counting), HELLO, 60)
    wrong = []

    def ask(base):
        numbers = range(base, base + 200)
        wrong.extend(n for n in numbers if client.call(m.Release(n), m.Committed, 60).blocks != n)

    threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert not client.closed
    client.close()


def test_the_arena_is_mapped_and_outlives_the_connection(fake_node):
    client = Client(fake_node(lambda peer: peer.welcome(ARENA_BYTES)), HELLO, 60)
    arena = client.arena
    client.close()
    assert arena.nbytes == len(arena.view) == ARENA_BYTES
    assert bytes(arena.view[:13]) == b"from the node"
    arena.view[-1] = 7
    assert arena.address > 0


def test_a_node_that_is_ready_to_run_may_answer_after_the_timeout(fake_node, monkeypatch):
    answers, looked = threading.Event(), []

    def slow(peer):
        peer.welcome()
        number = peer.take().request_id
        answers.wait(30)
        peer.say(number, m.ReportReply({}))

    def runnable(_client):
        looked.append(True)
        answers.set()
        return True

    monkeypatch.setattr(Client, "node_is_runnable", runnable)
    client = Client(fake_node(slow), HELLO, 60)
    assert client.call(m.Status(), m.ReportReply, 0.05) == m.ReportReply({})
    assert looked
    client.close()


def test_a_silent_node_is_gone_within_the_deadline_and_stays_gone(fake_node, monkeypatch):
    client = Client(fake_node(silent), HELLO, 60)
    with pytest.raises(NodeGoneError, match=r"no answer within 0\.2 s"):
        client.call(m.Status(), m.Done, 0.2)
    assert client.closed
    monkeypatch.setattr(Client, "_receive", lambda *_: pytest.fail("it waits"))
    for call in (
        lambda: client.send(m.Status()),
        lambda: client.poll(1),
        lambda: client.wait(1, 60),
    ):
        with pytest.raises(NodeGoneError):
            call()


def test_every_waiting_thread_gets_an_error_when_the_connection_ends(fake_node):
    client = Client(fake_node(silent), HELLO, 60)
    seen = []

    def ask(timeout_s):
        try:
            client.call(m.Status(), m.Done, timeout_s)
        except NodeGoneError as error:
            seen.append(str(error))

    threads = [threading.Thread(target=ask, args=(s,)) for s in (0.2, 60, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(seen) == 3


def test_a_node_that_dies_mid_request_is_gone_at_once(fake_node):
    def script(peer):
        peer.welcome()
        peer.take()

    client = Client(fake_node(script), HELLO, 60)
    with pytest.raises(NodeGoneError, match="broke"):
        client.call(m.Status(), m.Done, 60)


def test_a_reply_of_another_kind_is_a_protocol_error(fake_node):
    address = fake_node(counting)
    client = Client(address, HELLO, 60)
    words = rf"^node {address} answered Committed\(blocks=3\), not Released$"
    with pytest.raises(ProtocolError, match=words):
        client.call(m.Release(3), m.Released, 60)
    client.close()


def test_wait_gone_notices_the_death_of_an_idle_node(fake_node):
    die = threading.Event()

    def script(peer):
        peer.welcome()
        die.wait(30)

    client = Client(fake_node(script), HELLO, 60)
    watcher = threading.Thread(target=client.wait_gone)
    watcher.start()
    assert watcher.is_alive()
    die.set()
    watcher.join(60)
    assert not watcher.is_alive()
    client.close()


def test_a_refusal_carries_the_nodes_words_and_the_client_lives_on(fake_node):
    def script(peer):
        peer.welcome()
        peer.say(peer.take().request_id, m.Refused("fewer keys, please"))
        peer.say(peer.take().request_id, m.Done())

    client = Client(fake_node(script), HELLO, 60)
    with pytest.raises(RefusedError, match="fewer keys, please"):
        client.call(m.Status(), m.Done, 60)
    assert client.call(m.Status(), m.Done, 60) == m.Done()
    client.close()


def test_a_refused_hello_raises_with_the_nodes_words(fake_node):
    address = fake_node(lambda peer: peer.say(peer.take().request_id, m.Refused("not you")))
    with pytest.raises(RefusedError, match="not you"):
        Client(address, HELLO, 60)


def test_a_refused_connection_raises_with_the_nodes_words(fake_node):
    with pytest.raises(RefusedError, match="full house"):
        Client(fake_node(lambda peer: peer.say(CONNECTION_ID, m.Refused("full house"))), HELLO, 5)


@pytest.mark.parametrize(
    "answer",
    [
        m.Welcome(m.PROTOCOL + 1, "x", b"", 0),
        m.Welcome(m.PROTOCOL, "x", b"", ARENA_BYTES),  # and no descriptor
        m.Done(),
    ],
)
def test_a_hello_answered_wrongly_is_a_protocol_error(fake_node, answer):
    address = fake_node(lambda peer: peer.say(peer.take().request_id, answer))
    with pytest.raises(ProtocolError):
        Client(address, HELLO, 60)


def test_a_node_that_never_sends_a_welcome_is_gone_at_the_timeout(fake_node):
    with pytest.raises(NodeGoneError, match="no session"):
        Client(fake_node(lambda peer: (peer.take(), peer.take())), HELLO, 0.2)


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, b"\1\0\0\0\1\0\0\0" + bytes(8) + b"\xc1"], ids=["lengths", "body"]
)
def test_garbage_from_a_node_ends_the_client(fake_node, data):
    def script(peer):
        peer.welcome()
        peer.take()
        peer.socket.sendall(data)
        peer.take()

    client = Client(fake_node(script), HELLO, 60)
    with pytest.raises(NodeGoneError):
        client.call(m.Status(), m.Done, 60)
    assert client.closed


def test_a_reply_to_an_unknown_request_closes_the_client(fake_node):
    def script(peer):
        peer.welcome()
        peer.say(peer.take().request_id + 5, m.Done())
        peer.take()

    client = Client(fake_node(script), HELLO, 60)
    with pytest.raises(NodeGoneError, match="which was not sent"):
        client.call(m.Status(), m.Done, 60)


def test_connecting_without_a_node_fails_at_once(tmp_path):
    with pytest.raises(NodeGoneError, match="No such file"):
        Client(f"unix://{tmp_path}/none.sock", HELLO, 60)


@pytest.mark.parametrize(
    "address", ["tcp://1.2.3.4:5", "relative/node.sock", "unix://x", "/" + "x" * 120]
)
def test_an_address_that_is_no_socket_path_is_a_config_error(address):
    with pytest.raises(ConfigError, match="node address"):
        Client(address, HELLO, 60)


def test_a_client_reads_replies_while_it_waits_to_send_requests(fake_node, monkeypatch):
    monkeypatch.setattr("holdfast.wire.local.client.SEND_S", 20.0)  # others may have the processor
    count, size = 200, 64 * 1024

    def script(peer):
        peer.welcome()
        while frame := peer.take():
            peer.say(frame.request_id, m.Refused("x" * 20_000))

    client = Client(fake_node(script), HELLO, 60)
    ids = [client.send(m.Cover(bytes(size))) for _ in range(count)]
    for request_id in ids:
        with pytest.raises(RefusedError):
            client.wait(request_id, 60)
    client.close()


ASKS = """
import sys
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
client = Client(sys.argv[1], m.Hello(m.PROTOCOL, "test"), 60.0)
client.call(m.Status(), m.ReportReply, 60.0)
request = client.send(m.Status())
print("waits", flush=True)
print(type(client.wait(request, 5.0)).__name__, flush=True)
"""


def test_time_during_which_the_client_is_stopped_does_not_count_as_a_timeout(fake_node):
    """Where a machine stalls, the node stalls too: it answers a moment after both go on."""
    goes_on = threading.Event()

    def stalls(peer):
        peer.welcome()
        peer.say(peer.take().request_id, m.ReportReply({}))
        waiting = peer.take()
        goes_on.wait(60)
        peer.say(waiting.request_id, m.ReportReply({}))
        peer.take()

    argv = [sys.executable, "-c", ASKS, fake_node(stalls)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout.readline() == "waits\n"
        asker.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        asker.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        goes_on.set()
        assert asker.stdout.readline() == "ReportReply\n"
    assert asker.returncode == 0
