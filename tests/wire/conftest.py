"""A node and a target made of scripts: threads that do on raw sockets what the test says."""

import contextlib
import os
import socket
import threading

import msgspec
import pytest

from holdfast.wire.frame import HEADER_BYTES, RECEIVE_BYTES, encode, read_head, request_reader
from holdfast.wire.local.messages import PROTOCOL, Hello, Welcome
from holdfast.wire.remote import messages as m
from holdfast.wire.remote.client import TargetClient

ARENA_BYTES = 1 << 20
DECODER = msgspec.msgpack.Decoder(m.TargetRequest)


class Peer:
    """The node's end of one connection."""

    def __init__(self, connected):
        self.socket = connected
        self._reader = request_reader()

    def take(self):
        """Return the next request and its id; None when the client has gone."""
        while (frame := self._reader.next()) is None:
            data = self.socket.recv(RECEIVE_BYTES)
            if not data:
                return None
            self._reader.feed(data)
        return frame

    def say(self, request_id, reply):
        self.socket.sendall(encode(request_id, reply))

    def welcome(self, arena_bytes=0):
        """Answer the hello, with an arena if asked to."""
        frame = self.take()
        assert isinstance(frame.message, Hello)
        data = encode(frame.request_id, Welcome(PROTOCOL, "fake", b"k" * 32, arena_bytes))
        if not arena_bytes:
            self.socket.sendall(data)
            return
        fd = os.memfd_create("arena")
        os.ftruncate(fd, arena_bytes)
        os.pwrite(fd, b"from the node", 0)
        socket.send_fds(self.socket, [data], [fd])
        os.close(fd)


@pytest.fixture
def fake_node(tmp_path):
    """Call with a script per connection, `script(peer)`; returns the address."""
    path = tmp_path / "node.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    threads, failures, peers = [], [], []

    def play(script, connected):
        with connected:
            try:
                script(Peer(connected))
            except OSError:
                pass
            except BaseException as error:
                failures.append(error)
                raise

    def accept(scripts):
        with contextlib.suppress(OSError):
            for script in scripts:
                connected, _ = listener.accept()
                peers.append(connected)
                thread = threading.Thread(target=play, args=(script, connected))
                thread.start()
                threads.append(thread)

    def start(*scripts):
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=accept, args=(scripts,))
        thread.start()
        threads.append(thread)
        return f"unix://{path}"

    yield start
    for peer in (listener, *peers):
        with contextlib.suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    listener.close()
    assert failures == []


class Far:
    """The target's end of one connection, played by a test."""

    def __init__(self, connected):
        self.socket = connected

    def take(self):
        """Return the next request, its id and its payload; EOFError when the client has gone."""
        head = read_head(self._exactly(HEADER_BYTES))
        message = DECODER.decode(self._exactly(head.body_bytes))
        return message, head.request_id, self._exactly(head.payload_bytes)

    def say(self, request_id, reply, payload=b""):
        self.socket.sendall(encode(request_id, reply, len(payload)) + payload)

    def welcome(self):
        self.say(0, m.Challenge(m.TARGET_PROTOCOL, b"n" * 32))
        join, request_id, _ = self.take()
        assert isinstance(join, m.Join)
        self.say(request_id, m.Joined(m.TARGET_PROTOCOL, "fake"))

    def _exactly(self, nbytes):
        data = b""
        while len(data) < nbytes:
            part = self.socket.recv(nbytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@pytest.fixture
def target():
    """Call with one script per connection; returns a Target in front of them."""
    with contextlib.ExitStack() as undo:
        threads, failures = [], []

        def play(script, connected):
            with connected:
                try:
                    script(Far(connected))
                except (EOFError, OSError):
                    pass
                except BaseException as error:
                    failures.append(error)
                    raise

        def accept(listener, scripts):
            for script in scripts:
                try:
                    connected, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=play, args=(script, connected)))
                threads[-1].start()

        def start(*scripts, **options):
            listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            threads.append(threading.Thread(target=accept, args=(listener, scripts)))
            threads[-1].start()
            undo.callback(listener.shutdown, socket.SHUT_RDWR)
            made = TargetClient(
                "tcp://{}:{}".format(*listener.getsockname()), batch_parts=2, **options
            )
            undo.callback(made.close)
            return made

        yield start
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
