"""Measure a real node from an engine's side: coverage, fetches into pages, recovery from a crash.

An engine's process is busy with Python code, so every speed is measured twice: without and with a
second thread that holds the interpreter.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES
from holdfast.blocks.key import KEY_BYTES, Chain
from holdfast.buffers import aligned_buffer
from holdfast.devices.base import Move, Pages
from holdfast.devices.host import THREADS, HostDevice
from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS, GIB, MIB
from holdfast.policy.retention import Retention
from holdfast.report import Row, at_least, at_most, share
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.hardware_limits import SEED, CopyLimit
from holdfast_bench.harness.node import NodeUnderTest, call
from holdfast_bench.harness.paired_runs import (
    Speed,
    busy_thread,
    median_speed,
    paired,
    speed_row,
    timed,
)

PAYLOAD_BYTES = 2 * MIB
LAYERS = 16
PAGE_BYTES = PAYLOAD_BYTES // LAYERS
BATCH = 32
PAGE_BLOCKS = 8 * BATCH
FINGERPRINT = b"holdfast-bench-1"
CONTEXTS = 24
HOST_BYTES = 1 * GIB
COVERED_BLOCKS = 1_024
LEASED = 12 * BATCH
"""Leased blocks from which a pass copies a random batch: together larger than any CPU cache."""

HOST_GOAL = 0.85
BUSY_GOAL = 0.5
COVER_GOAL_MS = 1.0
SERVING_GOAL_S = 2.0
WARM_GOAL = 0.99
ANSWER_S = 30.0
PREFAULT_WAIT_S = 4.0
"""How long the node may take to fault in an arena: it begins after a second of rest."""


class BenchSession:
    """The engine's side of one session: saves synthetic contexts and fetches them into pages.

    The pages are as in an engine, `PAGE_BLOCKS` of `PAGE_BYTES` in each of `LAYERS` layers; all of
    their memory has been written once.
    """

    def __init__(self, address: str) -> None:
        hello = m.Hello(m.PROTOCOL, "bench", FINGERPRINT, PAYLOAD_BYTES, BLOCK_TOKENS)
        self.client = Client(address, hello, ANSWER_S)
        self._memory = aligned_buffer(PAGE_BLOCKS * PAYLOAD_BYTES)
        self._memory[:] = b"\1" * len(self._memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        bases = tuple(start + layer * PAGE_BLOCKS * PAGE_BYTES for layer in range(LAYERS))
        pages = Pages.uniform(bases, PAGE_BYTES, PAGE_BYTES, PAGE_BLOCKS, 1)
        self.device = HostDevice(pages, self._memory)
        if self.client.arena is None:
            raise HoldfastError("the node opened no arena for the benchmark's session")
        self.arena = self.client.arena
        self._turn = itertools.count()

    def chain(self, seed: int, blocks: int) -> Chain:
        chain = Chain(self.client.welcome.domain_key, FINGERPRINT, BLOCK_TOKENS)
        chain.extend([seed] * (blocks * BLOCK_TOKENS))
        return chain

    def save(self, chain: Chain, retention: Retention = Retention.SESSION) -> None:
        """Save every block of a context; the payload is the block's key, repeated."""
        reserve = m.Reserve(chain.packed(), FINGERPRINT, 0)
        reserved = call(self.client, reserve, m.Reserved)
        for key, place in zip(chain.keys, reserved.places, strict=True):
            if place >= 0:
                start = place + HEADER_BYTES
                repeated = key * (PAYLOAD_BYTES // KEY_BYTES)
                self.arena.view[start : start + PAYLOAD_BYTES] = repeated
        committed = call(self.client, m.Commit(reserved.ticket, retention), m.Committed)
        if committed.blocks != len(chain):
            raise HoldfastError(f"saved {committed.blocks} of {len(chain)} blocks")

    def fetch(self, chain: Chain) -> m.Fetched:
        """Fetch a context into the next pages; raise HoldfastError if a block is missing."""
        fetched = call(self.client, m.Fetch(chain.packed(), ANSWER_S), m.Fetched)
        first = next(self._turn) * BATCH % (PAGE_BLOCKS - BATCH)
        moves = [Move(place + HEADER_BYTES, [first + i]) for i, place in enumerate(fetched.places)]
        moved = self.device.scatter(self.arena, moves).result()
        released = call(self.client, m.Release(fetched.lease), m.Released)
        if not moved or not released.valid or len(fetched.places) != len(chain):
            raise HoldfastError(f"fetched {len(fetched.places)} of {len(chain)}: {fetched.reason}")
        for i, key in enumerate(chain.keys):
            last_page = ((LAYERS - 1) * PAGE_BLOCKS + first + i) * PAGE_BYTES
            if self._memory[last_page : last_page + KEY_BYTES] != key:
                raise HoldfastError("a page differs from the saved payload")
        return fetched

    def fetch_from_disk(self, chain: Chain) -> None:
        """Fetch a context as `fetch` does; raise HoldfastError if a block is not from disk."""
        sources = self.fetch(chain).sources
        if sources != {"disk": len(chain)}:
            raise HoldfastError(f"expected {len(chain)} blocks from disk, got {sources}")

    def scatter(self, moves: Sequence[Move]) -> None:
        if not self.device.scatter(self.arena, moves).result():
            raise HoldfastError("the copy was incomplete")

    def close(self) -> None:
        self.device.close()
        self.client.close()


def attached(node: NodeUnderTest) -> AbstractContextManager[BenchSession]:
    """Open a session for the duration of a `with` block."""
    return closing(BenchSession(node.address))


def node_rows(folder: Path, rounds: int, disk_bytes: int) -> list[Row]:
    """Measure coverage, fetches from host and disk, and recovery after kill -9."""
    copy = CopyLimit(LEASED * PAYLOAD_BYTES, PAYLOAD_BYTES, PAGE_BLOCKS * PAYLOAD_BYTES, THREADS)
    with NodeUnderTest(folder, HOST_BYTES, disk_bytes) as node:
        with attached(node) as engine:
            rows = [_cover_row(node.address, rounds), *_host_rows(engine, copy, rounds)]
            contexts = [engine.chain(seed, BATCH) for seed in range(CONTEXTS)]
            for chain in contexts:
                engine.save(chain)
                node.wait_idle()
            rows += _promotion_rows(engine, contexts, rounds)
        return rows + recovery_rows(node, disk_bytes)


def _cover_row(address: str, rounds: int) -> Row:
    """Time the coverage of a long context that is held, in a namespace of small blocks."""
    fingerprint, raw_bytes = b"holdfast-bench-2", 4096 - HEADER_BYTES - TAG_BYTES
    hello = m.Hello(m.PROTOCOL, "bench", fingerprint, raw_bytes, BLOCK_TOKENS)
    with closing(Client(address, hello, ANSWER_S)) as client:
        chain = Chain(client.welcome.domain_key, fingerprint, BLOCK_TOKENS)
        prompt_tokens = COVERED_BLOCKS * BLOCK_TOKENS
        chain.extend([7] * prompt_tokens)
        reserve = m.Reserve(chain.packed(), fingerprint, 0)
        call(client, m.Commit(call(client, reserve, m.Reserved).ticket), m.Committed)
        times_ms = []
        for _ in range(20 * rounds):
            start_s = time.perf_counter()
            covered = call(client, m.Cover(chain.packed(), prompt_tokens), m.Covered)
            times_ms.append(1e3 * (time.perf_counter() - start_s))
            if covered.blocks != COVERED_BLOCKS:
                raise HoldfastError(f"{covered.blocks} of {COVERED_BLOCKS} blocks covered")
    return at_most("node.cover", statistics.median(times_ms), "ms", COVER_GOAL_MS)


def _host_rows(engine: BenchSession, copy: CopyLimit, rounds: int) -> list[Row]:
    """Measure copies of leased blocks from the arena to pages.

    Starts `PREFAULT_WAIT_S` after the first save, when the arena's memory is faulted in.
    """
    chain = engine.chain(2 << 20, LEASED)
    engine.save(chain)
    time.sleep(PREFAULT_WAIT_S)
    request = m.Fetch(chain.packed(), ANSWER_S)
    leased = call(engine.client, request, m.Fetched)
    if len(leased.places) != LEASED:
        raise HoldfastError(f"{len(leased.places)} of {LEASED} blocks leased")
    rng = random.Random(SEED)  # noqa: S311  # an order, not a secret

    def scatter() -> Speed:
        places = rng.choices(leased.places, k=BATCH)
        pages = rng.sample(range(PAGE_BLOCKS), BATCH)
        moves = [
            Move(place + HEADER_BYTES, [page]) for place, page in zip(places, pages, strict=True)
        ]
        return timed(BATCH * PAYLOAD_BYTES, lambda: engine.scatter(moves))

    idle = paired(rounds, scatter, lambda: copy.gb_per_s(BATCH))
    with busy_thread():
        busy = median_speed([scatter() for _ in range(rounds)])
    call(engine.client, m.Release(leased.lease), m.Released)
    return [
        speed_row("host.fetch", idle, HOST_GOAL),
        _busy_row("host.fetch.busy", busy, idle.ours.gb_per_s),
    ]


def _promotion_rows(engine: BenchSession, contexts: Sequence[Chain], rounds: int) -> list[Row]:
    """Measure fetches from disk to pages, with more contexts than fit in the arena."""
    turn = itertools.cycle(contexts)

    def fetch() -> Speed:
        chain = next(turn)
        return timed(BATCH * PAYLOAD_BYTES, lambda: engine.fetch_from_disk(chain))

    idle = median_speed([fetch() for _ in range(2 * rounds)])
    with busy_thread():
        busy = median_speed([fetch() for _ in range(2 * rounds)])
    return [_busy_row("disk.fetch.busy", busy, idle.gb_per_s)]


def recovery_rows(node: NodeUnderTest, disk_bytes: int) -> list[Row]:
    """Fill the disk, kill and start the node; measure the time to serve and the recovered share."""
    blocks = int(0.9 * disk_bytes) // (PAYLOAD_BYTES + 4096) // BATCH * BATCH
    with attached(node) as engine:
        contexts = [engine.chain((3 << 20) + i, BATCH) for i in range(blocks // BATCH)]
        for chain in contexts:
            engine.save(chain)
            node.wait_idle()
        stored = sum(_covered(engine, chain) for chain in contexts)
    node.kill()
    start_s = time.perf_counter()
    node.start()
    serving_s = time.perf_counter() - start_s
    node.wait_recovered()
    recovered_s = time.perf_counter() - start_s
    with attached(node) as engine:
        warm = sum(_covered(engine, chain) for chain in contexts)
        for chain in contexts[:: max(1, len(contexts) // 16)]:
            if _covered(engine, chain) == BATCH:
                engine.fetch(chain)
    times = {"recovered_s": recovered_s, "stored_bytes": stored * PAYLOAD_BYTES}
    counts = {"stored_blocks": stored, "warm_blocks": warm}
    return [
        at_most("recover.serving", serving_s, "s", SERVING_GOAL_S, **times),
        at_least("recover.warm", warm / stored, "share", WARM_GOAL, **counts),
    ]


def _covered(engine: BenchSession, chain: Chain) -> int:
    return call(engine.client, m.Cover(chain.packed()), m.Covered).blocks


def _busy_row(what: str, busy: Speed, idle_gb_per_s: float) -> Row:
    more = {"cpu_s_per_gb": busy.cpu_s_per_gb, "limit_is": "ours, idle"}
    return share(what, busy.gb_per_s, "GB/s", idle_gb_per_s, BUSY_GOAL, **more)
