"""A node in this process, so that tests can shorten its times, and a device that locks nothing."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from functools import partial

import pytest

from holdfast.fairness.shares import Quota
from holdfast.node.local.server import NodeServer
from holdfast.node.local.sessions import NodeContext, open_session
from holdfast.node.local.threads import NodeThreads
from holdfast.node.local.users import PermittedUsers
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.wire.local.locked_memory import LockedMemory

MIB = 1 << 20


class Registrar:
    """Notes what is locked, as a device would; fails from call `fails_from` on."""

    def __init__(self, fails_from=1 << 30):
        self.fails_from = fails_from
        self.calls = 0
        self.locked = {}
        self.threads = set()

    def register(self, address, nbytes):
        self.calls += 1
        if self.calls >= self.fails_from:
            raise OSError(12, "Cannot allocate memory")
        assert address not in self.locked
        self.locked[address] = nbytes
        self.threads.add(threading.current_thread().name)

    def unregister(self, address):
        del self.locked[address]


class NodeHere:
    """A node's store and its Unix socket, on threads of this process."""

    def __init__(self, folder, domains, host_bytes, options):
        self.address = f"unix://{folder}/here.sock"
        self.store = Store(host_bytes, [], domains, options)
        self.store.start()
        self._path = f"{folder}/here.sock"
        self._up = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),))
        self._thread.start()
        assert self._up.wait(30)

    async def _main(self):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._path)
        listener.listen(64)
        threads = NodeThreads()
        context = NodeContext(self.store, threads, PermittedUsers(os.geteuid(), {}))
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = NodeServer(listener, partial(open_session, context))
        task = asyncio.create_task(server.serve())
        self._up.set()
        await self._over.wait()
        task.cancel()
        server.close()
        await asyncio.sleep(0.05)  # connections learn that they are closed
        threads.close()

    def host(self, domain):
        """Return the host tier of a domain."""
        return self.store.table.hosts[self.store.domain_ids[domain]]

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        self.store.close()


@pytest.fixture
def node_here(tmp_path):
    """Call with reserved bytes by domain to serve a node in this process.

    With a folder of gate records, the domain `default` quantises.
    """
    with contextlib.ExitStack() as stack:

        def start(host_bytes=4 * MIB, lock_bytes=None, gates=None, **reserved):
            domains = {"default": b"d" * 32, **{name: name.encode() * 8 for name in reserved}}
            quotas = {name: {0: Quota(reserved_bytes=kept)} for name, kept in reserved.items()}
            options = StoreOptions(
                lock_bytes=lock_bytes,
                quotas=quotas if reserved else None,
                quantise=["default"] if gates else [],
                gates=gates,
            )
            made = NodeHere(tmp_path, domains, host_bytes, options)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def impatient_node(node_here, monkeypatch):
    """As `node_here`, for a node and an engine that wait for less than a second."""
    monkeypatch.setattr("holdfast.node.local.page_locks.LOCK_RECALL_S", 0.5)
    monkeypatch.setattr("holdfast.node.local.sessions.RECLAIM_S", 0.5)
    monkeypatch.setattr("holdfast.node.local.sessions._GONE_WITHIN_S", 0.1)
    monkeypatch.setattr("holdfast.wire.local.locked_memory.END_S", 0.1)
    return node_here


@pytest.fixture
def registrar():
    """Call to get a device that notes what it locks."""
    return Registrar


@pytest.fixture
def locked():
    """Call with a client and a registrar to get locked memory; all are closed with the test."""
    made = []

    def lock(client, device):
        made.append(LockedMemory(client, device))
        return made[-1]

    yield lock
    for memory in made:
        memory.close()


@pytest.fixture
def until():
    """Return the function that waits for a condition."""

    def wait(condition, within_s=60):
        end = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < end
            time.sleep(0.01)
        return found

    return wait
