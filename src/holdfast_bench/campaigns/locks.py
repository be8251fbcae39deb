"""Locks campaign: engines of two domains page-lock memory, and take it from each other.

Their devices are io_uring's fixed buffers, which pin memory as the driver of a GPU does. Engines
hang and come back, and blocks are dropped. Each block that a device loads is checked. So are blocks
that an engine without locks reads from the arena, where a device could read pages of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from holdfast.errors import NodeGoneError
from holdfast.fairness.shares import Quota
from holdfast.limits import MIB
from holdfast.node.local.server import NodeServer
from holdfast.node.local.sessions import NodeContext, open_session
from holdfast.node.local.threads import NodeThreads
from holdfast.node.local.users import PermittedUsers
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.locking_engine import LockingEngine
from holdfast.testing.payloads import key_of
from holdfast.testing.pinned_device import PinnedDevice
from holdfast.wire.local.messages import AwaitRecall
from holdfast_bench.campaigns.campaign import CampaignBudget, CampaignResult

DOMAINS = ("default", "other")
HOST_BYTES = 4 * MIB
"""Memory of both domains: RLIMIT_MEMLOCK, which bounds what io_uring pins, is often 8 MiB."""

PAYLOAD_BYTES = 20_000
CONTEXT_BLOCKS = 16
CONTEXTS = 14
"""Contexts of each domain: together more than memory holds."""

STEPS = 60
"""Saves and loads of each engine in a round."""

_HANGS = 0.1
_CLEARS = 0.05
_START_S = 30.0


class LocalNode:
    """A node of two domains on a socket in a folder, on threads of this process."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix://{folder}/locks.sock"
        keys = {name: name.encode().ljust(32, b"k") for name in DOMAINS}
        quotas = {"default": {}, "other": {0: Quota(reserved_bytes=MIB)}}
        self.store = Store(HOST_BYTES, [], keys, StoreOptions(quotas=quotas))
        self.store.start()
        self._path = folder / "locks.sock"
        self._up = threading.Event()
        self._over: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="campaign-node", daemon=True)
        self._thread.start()
        if not self._up.wait(_START_S):
            raise AssertionError(f"no node at {self.address} within {_START_S:g} s")

    def close(self) -> None:
        """End the node."""
        if self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_START_S)
        self.store.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen()
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        threads = NodeThreads()
        context = NodeContext(self.store, threads, PermittedUsers(os.geteuid(), {}))
        server = NodeServer(listener, partial(open_session, context))
        serving = asyncio.ensure_future(server.serve())
        self._up.set()
        await self._over.wait()
        serving.cancel()
        server.close()
        await asyncio.sleep(0.1)  # connections end
        threads.close()


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Let engines of two domains save and load, more than memory holds, round after round."""
    result = CampaignResult("locks", "blocks")
    try:
        PinnedDevice().close()
    except OSError as error:
        result.skipped = f"io_uring cannot be used here: {error.strerror}"
        yield result
        return
    node = LocalNode(budget.folder)
    try:
        for number, rng in enumerate(budget.rounds(result)):
            seeds = [rng.random() for _ in DOMAINS]
            engines = [
                threading.Thread(target=_engine, args=(node, name, seed, result, number))
                for name, seed in zip(DOMAINS, seeds, strict=True)
            ]
            for engine in engines:
                engine.start()
            if rng.random() < _CLEARS:
                node.store.drop("*")
                result.counts["drops"] += 1
            for engine in engines:
                engine.join()
            _check_budget(node, result, number)
        for outcome, times in node.store.table.recalls.outcomes.items():
            result.counts[f"recalls {outcome}"] += times
    finally:
        node.close()
    locked = result.counts["locked"]
    budget.expect_enough(result, locked, "no block was copied through locked memory")
    yield result


def _engine(node: LocalNode, domain: str, seed: float, result: CampaignResult, number: int) -> None:
    """Save and load contexts of one domain in a session, whose engine hangs in some rounds."""
    rng = random.Random(seed)  # noqa: S311 - rounds must replay
    engine = LockingEngine(node.address, domain, PAYLOAD_BYTES)
    reader = LockingEngine(node.address, domain, PAYLOAD_BYTES)
    hangs = rng.random() < _HANGS
    try:
        engine.memory.lock_at_start()
        if hangs:  # it waits for recalls, and answers none
            engine.client.send(AwaitRecall())
        else:
            engine.memory.start()
        with contextlib.suppress(NodeGoneError):  # a session that missed a recall
            for _ in range(STEPS):
                keys = _context(domain, rng.randrange(CONTEXTS))
                engine.save(keys)
                engine.load(keys)
                reader.load(_context(domain, rng.randrange(CONTEXTS)))
    except Exception as error:  # noqa: BLE001  # any failure is the campaign's finding
        result.fail(f"round {number}, domain {domain}: {error!r:.200}")
    finally:
        engine.close()
        reader.close()
    for each in (engine, reader):
        result.tried += each.counts["loaded"]
        result.counts.update({name: each.counts[name] for name in ("locked", "bounced")})
        for _ in range(each.counts["wrong"]):
            result.fail(f"round {number}, domain {domain}: a wrong block")


def _context(domain: str, number: int) -> list[bytes]:
    seed = 1_000 * DOMAINS.index(domain) + number
    return [key_of(block, seed) for block in range(CONTEXT_BLOCKS)]


def _check_budget(node: LocalNode, result: CampaignResult, number: int) -> None:
    """Check that arenas do not have more memory than the budget; one chunk may be on its way."""
    hosts = node.store.table.hosts.values()
    resident = sum(host.resident_bytes() for host in hosts)
    most = HOST_BYTES + node.store.budget.chunk_bytes
    result.expect(resident <= most, f"round {number}: {resident} bytes of memory, of {most}")
