"""The server: limits hold, one bad peer never harms another, every end is told to its session."""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time

import pytest

from holdfast.errors import BlockError, NodeGoneError, RefusedError
from holdfast.limits import IN_FLIGHT_MAX
from holdfast.node.local.server import NodeServer
from holdfast.wire.frame import RECEIVE_BYTES, encode, reply_reader
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.peer_check import ConnectedPeer

HELLO = m.Hello(m.PROTOCOL, "test")


class Echo:
    """Answers Release with its number, Commit when told to, and fails on request."""

    def __init__(self, hello, peer):
        if hello.peer == "unwelcome":
            raise BlockError("hello.peer is unwelcome")
        self.peer = peer
        self.welcome = m.Welcome(m.PROTOCOL, "echo", b"", 0)
        self.arena_fd = None
        self.going = asyncio.Event()
        self.asked = self.waiting = 0
        self.ends = 0

    def answer(self, request):
        self.asked += 1
        match request:
            case m.Release(lease):
                return m.Committed(lease)
            case m.Commit():
                return self.later()
            case m.Abort():
                self.going.set()
                return m.Done()
            case m.Drop():
                raise BlockError("drop is refused")
            case m.Verify():
                return self.fail()
            case m.List():
                return m.ReportReply({"blocks": "x" * (3 << 20)})
            case m.Status():
                return m.ReportReply({"waiting": self.waiting})
        raise ZeroDivisionError("a bug")

    async def later(self):
        self.waiting += 1
        await self.going.wait()
        return m.Done()

    async def fail(self):
        raise OSError("disk on fire")

    def ended(self):
        self.ends += 1


class Running:
    """A server on a thread of its own."""

    def __init__(self, path, **limits):
        self.address = f"unix://{path}"
        self.sessions = []
        self._path = path
        self._limits = limits
        self._up = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),))
        self._thread.start()
        assert self._up.wait(30)

    async def _main(self):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen(64)
        self.loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.server = NodeServer(listener, self._welcome, **self._limits)
        task = asyncio.create_task(self.server.serve())
        self._up.set()
        await self._over.wait()
        task.cancel()
        self.server.close()
        await asyncio.sleep(0.05)  # connections learn that they are closed

    async def _welcome(self, hello, peer):
        session = Echo(hello, peer)
        self.sessions.append(session)
        return session

    def stop(self):
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def connect(self):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(30)
        raw.connect(str(self._path))
        return raw


@pytest.fixture
def running(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(**limits):
            server = Running(tmp_path / "node.sock", **limits)
            stack.callback(server.stop)
            return server

        yield start


def until(condition, within_s=60):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def closed(raw):
    """Whether the server has closed this connection, after what it still had to say."""
    try:
        while raw.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_each_of_two_clients_gets_the_replies_to_its_own_requests(running):
    server = running()
    one, two = Client(server.address, HELLO, 60), Client(server.address, HELLO, 60)
    ids = [(client, n, client.send(m.Release(n))) for n in range(50) for client in (one, two)]
    assert all(client.wait(i, 60).blocks == n for client, n, i in ids)
    one.close()
    two.close()
    until(lambda: [session.ends for session in server.sessions] == [1, 1])
    assert server.server.connections == 0


def test_a_session_knows_the_process_and_user_of_its_client(running):
    server = running()
    client = Client(server.address, HELLO, 60)
    assert server.sessions[0].peer == (os.getpid(), os.geteuid())
    client.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 100,
        struct.pack("<IIQ", 0xFFFF_FFFF, 1, 0),
        struct.pack("<IIQ", 3, 1, 1 << 40) + b"abc",
        struct.pack("<IIQ", 3, 1, 0) + b"abc",
    ],
    ids=["http", "ones", "body too large", "payload", "no message"],
)
@pytest.mark.parametrize("after_hello", [False, True])
def test_garbage_closes_only_its_own_connection_and_is_logged(running, caplog, data, after_hello):
    server = running()
    good = Client(server.address, HELLO, 60)
    with server.connect() as raw:
        if after_hello:
            raw.sendall(encode(1, HELLO))
            assert raw.recv(4096)
        raw.sendall(data)
        assert closed(raw)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert good.call(m.Release(3), m.Committed, 60) == m.Committed(3)
    until(lambda: server.server.connections == 1)
    good.close()


@pytest.mark.parametrize("said", [0, 5, 20])
def test_a_connection_without_a_timely_hello_is_refused_and_closed(running, said):
    server = running(handshake_s=0.2)
    with server.connect() as raw:
        raw.sendall(bytes(encode(1, HELLO))[:said])
        reader = reply_reader()
        while (frame := reader.next()) is None:
            reader.feed(raw.recv(RECEIVE_BYTES))
        assert frame.message == m.Refused("no hello arrived within 0.2 s; connect again")
        assert closed(raw)
    until(lambda: server.server.connections == 0)


def test_a_timely_hello_is_accepted_even_if_a_busy_node_reads_it_late(running):
    server = running(handshake_s=2.0)
    blocked, resumed = threading.Event(), threading.Event()

    def block():
        blocked.set()
        resumed.wait(60)
        time.sleep(2.1)  # past the deadline

    with server.connect() as raw:
        until(lambda: server.server.connections == 1)
        server.loop.call_soon_threadsafe(block)
        assert blocked.wait(60)
        raw.sendall(encode(1, HELLO))
        resumed.set()
        reader = reply_reader()
        while (frame := reader.next()) is None:
            reader.feed(raw.recv(RECEIVE_BYTES))
        assert frame.message == server.sessions[0].welcome


def test_a_disconnect_in_the_middle_of_a_frame_ends_the_session(running):
    server = running()
    with server.connect() as raw:
        raw.sendall(encode(1, HELLO) + encode(2, m.Release(5))[:-1])
        reader = reply_reader()
        while (frame := reader.next()) is None:
            reader.feed(raw.recv(RECEIVE_BYTES))
        assert isinstance(frame.message, m.Welcome)
        assert server.sessions[0].ends == 0
    until(lambda: server.sessions[0].ends == 1)


def test_requests_sent_along_with_the_hello_are_served(running):
    server = running()
    with server.connect() as raw:
        raw.sendall(encode(1, HELLO) + encode(2, m.Release(5)) + encode(3, m.Release(6)))
        reader, frames = reply_reader(), []
        while len(frames) < 3:
            reader.feed(raw.recv(RECEIVE_BYTES))
            while frame := reader.next():
                frames.append(frame)
    assert [tuple(f) for f in frames[1:]] == [(2, m.Committed(5)), (3, m.Committed(6))]


def test_a_first_message_that_is_no_hello_is_cut_off(running):
    server = running()
    with server.connect() as raw:
        raw.sendall(encode(1, m.Status()))
        assert closed(raw)
    assert server.sessions == []


def test_another_protocol_version_is_refused_with_both_versions(running):
    server = running()
    only = f"version 9 is not supported, only {m.PROTOCOL}; install the same"
    with pytest.raises(RefusedError, match=only):
        Client(server.address, m.Hello(9, "test"), 60)


def test_a_session_that_is_not_wanted_is_refused_with_the_reason(running):
    server = running()
    with pytest.raises(RefusedError, match=r"hello\.peer is unwelcome"):
        Client(server.address, m.Hello(m.PROTOCOL, "unwelcome"), 60)
    until(lambda: server.server.connections == 0)


def test_too_many_connections_are_turned_away_until_one_ends(running):
    server = running(connections_max=2)
    clients = [Client(server.address, HELLO, 60) for _ in range(2)]
    with pytest.raises(RefusedError, match="2 connections are open, the limit"):
        Client(server.address, HELLO, 60)
    clients.pop().close()
    until(lambda: server.server.connections == 1)
    clients.append(Client(server.address, HELLO, 60))
    assert [client.call(m.Release(1), m.Committed, 60) for client in clients] == [
        m.Committed(1)
    ] * 2
    for client in clients:
        client.close()


def test_connections_of_another_user_have_a_lower_limit(running, monkeypatch):
    server = running(connections_max=8)
    monkeypatch.setattr("holdfast.node.local.server.peer_of", lambda _: ConnectedPeer(1, 4321))
    clients = [Client(server.address, HELLO, 60) for _ in range(2)]
    with pytest.raises(RefusedError, match="2 connections of user 4321 are open, the limit"):
        Client(server.address, HELLO, 60)
    monkeypatch.undo()
    clients += [Client(server.address, HELLO, 60) for _ in range(6)]
    for client in clients:
        client.close()
    until(lambda: server.server.connections == 0)
    assert not server.server._users


def test_a_session_that_fails_to_open_is_refused_and_takes_no_connection(running):
    async def fail(_hello, _peer):
        raise MemoryError("no arena")

    server = running(connections_max=1)
    server.server._welcoming, welcoming = fail, server.server._welcoming
    for _ in range(3):
        with pytest.raises(RefusedError, match="the node failed: MemoryError: no arena; see its"):
            Client(server.address, HELLO, 60)
    server.server._welcoming = welcoming
    until(lambda: server.server.connections == 0)
    Client(server.address, HELLO, 60).close()


def test_the_server_stops_reading_a_client_with_too_many_open_requests(running):
    server = running()
    client = Client(server.address, HELLO, 60)
    ids = [client.send(m.Commit(n)) for n in range(IN_FLIGHT_MAX)]
    last = client.send(m.Release(9))
    until(lambda: server.sessions[0].waiting == IN_FLIGHT_MAX)
    time.sleep(0.1)
    assert client.poll(last) is None
    server.loop.call_soon_threadsafe(server.sessions[0].going.set)
    assert {client.wait(i, 60) for i in ids} == {m.Done()}
    assert client.wait(last, 60) == m.Committed(9)
    client.close()


def test_the_server_stops_reading_a_client_that_reads_no_replies(running):
    server = running()
    with server.connect() as raw:
        raw.sendall(encode(1, HELLO))
        assert raw.recv(4096)
        raw.settimeout(1)
        frames = bytes(encode(2, m.Drop("x"))) * 1_000

        def send_on():
            for _ in range(200):  # a server that reads takes each part in time, however slow it is
                raw.sendall(frames)

        with pytest.raises(TimeoutError):
            send_on()
        until(lambda: server.sessions[0].asked)
        assert 0 < server.sessions[0].asked < 60_000
    until(lambda: server.sessions[0].ends == 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (m.Drop("x"), "drop is refused"),
        (m.Verify(), "the node failed: OSError: disk on fire"),
        (m.Cover(b""), "the node failed: ZeroDivisionError: a bug"),
        (m.List(), "the limit is"),
    ],
)
def test_a_request_that_fails_is_refused_and_the_connection_lives(running, request_, words):
    server = running()
    client = Client(server.address, HELLO, 60)
    with pytest.raises(RefusedError, match=words):
        client.call(request_, m.Done, 60)
    assert client.call(m.Release(1), m.Committed, 60) == m.Committed(1)
    client.close()


def test_a_session_ends_once_if_its_client_disconnects_during_requests(running):
    server = running()
    client = Client(server.address, HELLO, 60)
    client.send(m.Commit(1))
    until(lambda: server.sessions and server.sessions[0].waiting == 1)
    client.close()
    until(lambda: server.sessions[0].ends == 1)
    server.loop.call_soon_threadsafe(server.sessions[0].going.set)
    other = Client(server.address, HELLO, 60)
    assert other.call(m.Release(1), m.Committed, 60) == m.Committed(1)
    assert server.sessions[0].ends == 1
    other.close()


def test_invalid_messages_without_end_do_not_fill_the_log(running, caplog):
    server = running()
    for _ in range(40):
        client = Client(server.address, HELLO, 60)
        with pytest.raises(NodeGoneError):
            client.call(m.Cover(b"", plan=2**64 - 1), m.Covered, 60)
        client.close()
    (line,) = [each for each in caplog.messages if "connection closed" in each]
    assert "`int` <= 9223372036854775807 - at `$.plan`" in line


def test_closing_the_server_ends_a_handshake_and_uncounts_its_connection(tmp_path):
    server = Running(tmp_path / "node.sock")
    with server.connect() as silent:
        until(lambda: server.server.connections == 1)
        server.stop()
        assert closed(silent)
    assert server.server.connections == 0


def test_closing_the_server_ends_its_clients(tmp_path):
    server = Running(tmp_path / "node.sock")
    client = Client(server.address, HELLO, 60)
    server.stop()
    with pytest.raises(NodeGoneError):
        client.call(m.Status(), m.Done, 60)
    assert server.sessions[0].ends == 1
