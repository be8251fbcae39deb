"""A target in this process, for tests that talk to it."""

import socket
import time

from holdfast.buffers import aligned_buffer
from holdfast.node.target import Entry, TargetServer, address_of, bind
from holdfast.node.target_service import Limits, Service
from holdfast.store.store import Store
from holdfast.testing.payloads import is_right, key_of, record_of, world_of
from holdfast.wire import target_messages as m
from holdfast.wire.address import tcp_endpoint
from holdfast.wire.frame import encode
from holdfast.wire.target import Target

WORLD = world_of(30_000)
KEYS = [key_of(i) for i in range(40)]
RECORDS = [record_of(WORLD, key) for key in KEYS]
QUICK = Limits(handshake_s=0.3, idle_s=30, body_s=0.3, pace_s=0.3, pace_bytes=4096)


class Served:
    """A target in this process, and a client in front of it."""

    def __init__(self, undo, limits, tier, host_bytes):
        self.store = Store(host_bytes, [tier] if tier else [], {"default": b"s" * 32})
        undo.callback(self.store.close)
        self.store.take_foreign()
        self.store.start()
        self.service = Service(self.store, limits)
        undo.callback(self.service.close)
        listener = bind("tcp://127.0.0.1:0")
        self.address = address_of(listener)
        server = TargetServer(listener, self.service, Entry())
        server.start()
        undo.callback(server.close)
        self.target = Target(self.address)
        undo.callback(self.target.close)

    def connect(self):
        """Return a plain socket that has joined."""
        raw = socket.create_connection(tcp_endpoint(self.address), 10)
        raw.recv(4096)
        raw.sendall(encode(1, m.Join(m.TARGET_PROTOCOL, "raw", b"n" * 32)))
        assert b"joined" in raw.recv(4096)
        return raw

    def get(self, keys, world=WORLD):
        """Get blocks; return how many there were, every byte checked."""
        into = [aligned_buffer(world.record_bytes) for _ in keys]
        got = self.target.get(world, keys, into, 10)
        for key, record in zip(keys[: got.blocks], into, strict=False):
            assert is_right(record, world, key)
        return got.blocks

    def until(self, condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.service.status()
            time.sleep(0.01)


def ended(raw, within_s=5.0):
    """Whether the other side ends the connection in time; what it still says is dropped."""
    raw.settimeout(within_s)
    try:
        while raw.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
