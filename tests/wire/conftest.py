"""A node made of a script: a thread that does on a raw socket what the test says."""

import contextlib
import os
import socket
import threading

import pytest

from holdfast.wire.frame import encode, request_reader
from holdfast.wire.messages import PROTOCOL, Hello, Welcome

ARENA_BYTES = 1 << 20


class Peer:
    """The node's end of one connection."""

    def __init__(self, connected):
        self.socket = connected
        self._reader = request_reader()

    def take(self):
        """Return the next request and its id; None when the client has gone."""
        while (frame := self._reader.next()) is None:
            nbytes = self.socket.recv_into(self._reader.room())
            if not nbytes:
                return None
            self._reader.took(nbytes)
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
