"""Real nodes in processes of their own, and a small engine that checks every byte it reads."""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from holdfast.address import tcp_endpoint
from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetLimits, TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import is_right
from holdfast.wire.frame import encode
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.remote import messages
from holdfast.wire.remote.client import TargetClient

PEERS = StoreOptions(serves_peers=True)

FINGERPRINT = b"fingerprint-16-b"
PAYLOAD_BYTES = 20_000
BLOCK_TOKENS = 128
MIB = 1 << 20
READY_S = 240


def payload_of(key, nbytes=PAYLOAD_BYTES):
    """What a block of this key holds, everywhere in these tests."""
    return hashlib.shake_128(key).digest(nbytes)


def keys_of(name, count):
    return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(count)]


class Node:
    """`holdfast serve` on a folder of its own."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.config = {
            "listen": f"unix://{folder}/node.sock",
            "tiers": [
                {"kind": "host", "capacity": 64 * MIB},
                {"kind": "disk", "path": str(folder / "disk"), "capacity": 64 * MIB},
            ],
            **settings,
        }
        listen = self.config["listen"]
        self.addresses = [listen] if isinstance(listen, str) else listen
        self.address = self.addresses[0]
        self.process = None

    def start(self):
        """Start and wait until it serves."""
        file = self.folder / "node.yaml"
        file.write_text(json.dumps(self.config))
        self.log = (self.folder / "node.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "serve", "--config", str(file)],
            stdout=subprocess.PIPE,
            stderr=self.log,
        )
        line = first_line(self.process)
        assert line.split() == ["READY", *self.addresses], (line, self.said())
        return self

    def said(self):
        return (self.folder / "node.log").read_text()

    def kill(self):
        self.end(signal.SIGKILL)

    def stop(self):
        self.end(signal.SIGTERM)
        return self.process.returncode

    def end(self, number):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
        if self.process is not None:
            self.process.wait(60)
            self.process.stdout.close()
            self.log.close()


def first_line(process):
    end, said = time.monotonic() + READY_S, b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0, end - time.monotonic()))
        part = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not part:
            break
        said += part
    return said.decode()


class Engine:
    """A client that saves and reads blocks whose payload follows from their key."""

    def __init__(
        self, address, fingerprint=FINGERPRINT, domain="default", timeout_s=60, publish=b""
    ):
        self.fingerprint = fingerprint
        hello = m.Hello(
            m.PROTOCOL,
            "test engine",
            fingerprint,
            PAYLOAD_BYTES,
            BLOCK_TOKENS,
            domain,
            publish=publish,
        )
        self.client = Client(address, hello, timeout_s)

    def call(self, message):
        return self.client.wait(self.client.send(message), 240)

    def reserve(self, keys):
        return self.call(m.Reserve(b"".join(keys), self.fingerprint, 0))

    def fill(self, keys, reserved):
        for key, place in zip(keys, reserved.places, strict=False):
            if place >= 0:
                start = place + HEADER_BYTES
                self.client.arena.view[start : start + PAYLOAD_BYTES] = payload_of(key)

    def save(self, keys):
        """Save a chain; return how many blocks are new."""
        reserved = self.reserve(keys)
        self.fill(keys, reserved)
        return self.call(m.Commit(reserved.ticket)).blocks

    def cover(self, keys):
        return self.call(m.Cover(b"".join(keys))).blocks

    def read(self, keys):
        """Fetch a chain, check every byte, release; return how many blocks landed and whence."""
        fetched = self.call(m.Fetch(b"".join(keys), 10.0))
        for key, place in zip(keys, fetched.places, strict=False):
            start = place + HEADER_BYTES
            assert self.client.arena.view[start : start + PAYLOAD_BYTES] == payload_of(key)
        if fetched.lease:
            assert self.call(m.Release(fetched.lease)).valid
        return len(fetched.places), fetched.sources

    def status(self):
        return self.call(m.Status()).data

    def until(self, condition, within_s=240):
        """Wait until the node's status says so."""
        end = time.monotonic() + within_s
        while not condition(status := self.status()):
            assert time.monotonic() < end, status
            time.sleep(0.02)

    def until_on_disk(self, blocks):
        self.until(lambda s: sum(t["records"] for t in s["tiers"] if t["tier"] == "disk") >= blocks)

    def until_recovered(self):
        self.until(lambda s: s["recovery_s"] is not None)

    def close(self):
        self.client.close()


class TargetHere:
    """A target in this process, its parts, and a client in front of it."""

    def __init__(self, namespace, limits, tiers, host_bytes, transfer_buffers):
        self.namespace = namespace
        self._undo = undo = contextlib.ExitStack()
        self.store = Store(
            host_bytes, tiers, {"default": b"s" * 32}, StoreOptions(serves_peers=True)
        )
        undo.callback(self.store.close)
        self.store.start()
        self.service = TargetService(self.store, limits)
        listener = bind("tcp://127.0.0.1:0")
        self.address = address_of(listener)
        server = TargetServer(listener, self.service, EntryRules())
        server.start()
        undo.callback(server.close)
        self.target = TargetClient(self.address, transfer_buffers=transfer_buffers)
        undo.callback(self.target.close)

    def close(self):
        """Close it all, once."""
        self._undo.close()

    def connect(self):
        """Return a plain socket that has joined."""
        raw = socket.create_connection(tcp_endpoint(self.address), 60)
        raw.recv(4096)
        join = messages.Join(messages.TARGET_PROTOCOL, "raw", b"n" * 32)
        raw.sendall(encode(1, join))
        assert b"joined" in raw.recv(4096)
        return raw

    def get(self, keys, namespace=None):
        """Get blocks; return how many there were, every byte checked."""
        namespace = namespace or self.namespace
        into = [aligned_buffer(namespace.slot_bytes) for _ in keys]
        got = self.target.get(namespace, keys, into, 60)
        for key, record in zip(keys[: got.blocks], into, strict=False):
            assert is_right(record, namespace, key)
        return got.blocks

    def until(self, condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.service.status()
            time.sleep(0.01)


@pytest.fixture
def serve_here():
    """Call to serve a target in this process; all are closed with the test."""
    with contextlib.ExitStack() as undo:

        def serve(namespace, limits=None, tiers=(), host_bytes=16 * MIB, transfer_buffers=None):
            made = TargetHere(
                namespace, limits or TargetLimits(), list(tiers), host_bytes, transfer_buffers
            )
            undo.callback(made.close)
            return made

        yield serve


@pytest.fixture
def ended():
    """Return the function that says whether the other side ends a connection in time."""

    def drain(raw, within_s=60.0):
        raw.settimeout(within_s)
        try:
            while raw.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    return drain


@pytest.fixture
def start_node(tmp_path):
    """Call to start a node; all are ended with the test, and a failed test shows their logs."""
    with contextlib.ExitStack() as stack:

        def start(folder=tmp_path, **settings):
            folder.mkdir(exist_ok=True)
            node = Node(folder, **settings)
            stack.callback(node.kill)
            stack.callback(lambda: sys.stdout.write(node.said()))
            return node.start()

        yield start


@pytest.fixture
def engine():
    """Call with an address to get an engine; all are closed with the test."""
    with contextlib.ExitStack() as stack:

        def connect(address, **options):
            made = Engine(address, **options)
            stack.callback(made.close)
            return made

        yield connect


@pytest.fixture
def names():
    """Return the function from a name and a count to keys."""
    return keys_of


@pytest.fixture
def payload():
    """Return the function from a key to what its block holds."""
    return payload_of
