"""A target behind TLS, in this process: who is idle stays, and nobody outlasts its end."""

import contextlib
import socket
import threading
import time

import pytest

from holdfast.limits import MIB
from holdfast.node.target import Entry, TargetServer, address_of, bind
from holdfast.node.target_service import Limits, Service
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, record_of, world_of
from holdfast.wire.address import tcp_endpoint
from holdfast.wire.credentials import Credentials, server_context
from holdfast.wire.target import Target

WORLD = world_of(30_000)
KEYS = [key_of(i) for i in range(4)]
STEP_S = 0.2


class Behind:
    """A target, its server and its service."""

    def __init__(self, files, undo):
        store = Store(16 * MIB, [], {"default": b"s" * 32})
        undo.callback(store.close)
        store.take_foreign()
        store.start()
        self.service = Service(store, Limits(idle_s=30, body_s=STEP_S))
        undo.callback(self.service.close)
        listener = bind("tcp://127.0.0.1:0")
        self.address = address_of(listener)
        self.server = TargetServer(listener, self.service, Entry(server_context(files)))
        self.server.start()
        undo.callback(self.server.close)


@pytest.fixture
def files(tmp_path):
    """A certificate for both sides."""
    pytest.importorskip("cryptography")
    from holdfast.rig.certificates import Authority

    return Authority(tmp_path).issue("peer", "127.0.0.1")


@pytest.fixture
def behind(files):
    """A target that looks up often while nothing is said."""
    with contextlib.ExitStack() as undo:
        yield Behind(files, undo)


def test_who_is_idle_keeps_its_connection(behind, files):
    with contextlib.closing(Target(behind.address, Credentials(tls=files))) as target:
        assert target.put([record_of(WORLD, key) for key in KEYS], 10) == ["ok"] * 4
        for _ in range(3):
            time.sleep(2 * STEP_S)
            assert target.exist(WORLD, KEYS, 5).held == b"\1" * 4
    assert behind.service.counters.accepted == 1
    assert behind.service.counters.protocol_errors == 0


def test_closing_ends_who_is_in_the_middle_of_a_handshake(behind):
    with socket.create_connection(tcp_endpoint(behind.address), 10) as raw:
        end = time.monotonic() + 10
        while not any(behind.server._peers.values()):
            assert time.monotonic() < end
            time.sleep(0.01)
        start_s = time.monotonic()
        behind.server.close()
        assert time.monotonic() - start_s < 5
        assert raw.recv(1) == b""
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-peer"]


def test_who_shakes_hands_while_it_closes_is_not_served(behind, monkeypatch):
    """The handshake begins after whoever closes has counted its peers."""
    opened, closing = threading.Event(), threading.Event()
    plainly = behind.server._open

    def held(connected):
        stream = plainly(connected)
        opened.set()
        assert closing.wait(10)
        return stream

    monkeypatch.setattr(behind.server, "_open", held)
    with socket.create_connection(tcp_endpoint(behind.address), 10) as raw:
        assert opened.wait(10)
        thread = threading.Thread(target=behind.server.close)
        thread.start()
        while not behind.server._closing:
            time.sleep(0.01)
        closing.set()
        thread.join(30)
        assert raw.recv(1) == b""
    assert behind.service.counters.requests == 0
