"""Measure prestages of contexts that only a pool holds, over a link of limited bandwidth.

A node and a target are processes on hosts of their own (network namespaces); `tc` limits what the
target sends. Each round saves a new context, drops it from the node, and fetches it four times:
from the pool, from memory, after an announcement one transfer time ahead, and after a wait of
`WAIT_S` that began with a prestage, as the vLLM connector sends it for a request in its queue.
Every byte is compared.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import holdfast
from holdfast.blocks.layout import Layout
from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast.report import Row, at_least, not_measured
from holdfast.session import Session
from holdfast.testing.embedded import fingerprint_for
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.network import NamespaceNetwork, open_network
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pool import PoolUnderTest

BITS_PER_S = 400_000_000
LAYOUT = Layout.portable(layers=8, kv_heads=4, head_size=64, dtype="float16", block_tokens=128)
"""Blocks of 1 MiB."""

BLOCKS = 96
WAIT_S = 1.0
AHEAD = 1.1
"""How long before its use a context is announced, as a multiple of the time of its transfer."""

NO_LINKS = "hosts with limited links need root, ip and tc"
DEADLINE_S = 60.0
SERVED_GOAL = 0.95
FETCH_GOAL = 1.1
GAIN_GOAL = 0.8


class PrestageRound(NamedTuple):
    """Seconds of each fetch of one round, and the blocks that came from memory when announced."""

    pool_s: float
    host_s: float
    announced_s: float
    queued_s: float
    from_host: int


class _Context:
    """A context of random blocks, which a session of a node saves and fetches."""

    def __init__(self, node: NodeUnderTest, session: Session, number: int) -> None:
        rng = np.random.default_rng([SEED, number])
        shape = (BLOCKS, LAYOUT.raw_bytes)
        self.tokens = rng.integers(0, 50_000, BLOCKS * LAYOUT.block_tokens)
        self._blocks: npt.NDArray[np.uint8] = rng.integers(0, 256, shape, dtype=np.uint8)
        self._into = np.zeros_like(self._blocks)
        self._node, self._session = node, session

    def save(self) -> None:
        self._session.save(self.tokens, self._blocks, holdfast.Retention.DURABLE)
        self._node.wait_idle()

    def prestage(self, in_s: float) -> None:
        """Announce the context; raise HoldfastError if the node does not find all of it."""
        tokens = self._session.prestage(self.tokens, in_s)
        if tokens != len(self.tokens):
            raise HoldfastError(f"a prestage found {tokens:,} of {len(self.tokens):,} tokens")

    def fetch(self) -> tuple[float, int]:
        """Fetch all blocks; return the seconds, and how many blocks came from the node's memory.

        Raises HoldfastError if a block is missing or differs.
        """
        self._into[:] = 0
        start_s = time.perf_counter()
        landed = self._session.fetch(self.tokens, self._into, DEADLINE_S)
        seconds = time.perf_counter() - start_s
        if landed.blocks != BLOCKS or not np.array_equal(self._into, self._blocks):
            raise HoldfastError(f"a fetch brought {landed.blocks} of {BLOCKS} blocks: {landed}")
        return seconds, landed.sources.get("host", 0)


def prestage_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield the figures; a row without a value where hosts with links of their own cannot be."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(folder / "network.log"))
        if not isinstance(network, NamespaceNetwork):
            yield not_measured("prestage", NO_LINKS)
            return
        pool = PoolUnderTest(stack, folder, network)
        [target] = pool.start_targets(1)
        node = pool.start_host("host")
        limit_link(pool.targets[target].process.pid, BITS_PER_S)
        store = stack.enter_context(holdfast.open(node.address))
        session = store.session(fingerprint_for(LAYOUT))
        yield from rows_of([_measured(_Context(node, session, at), node) for at in range(rounds)])


def _measured(context: _Context, node: NodeUnderTest) -> PrestageRound:
    context.save()
    node.drop_all()
    pool_s, _ = context.fetch()
    host_s, _ = context.fetch()
    node.drop_all()
    ahead_s = AHEAD * pool_s
    context.prestage(ahead_s)
    time.sleep(ahead_s)
    announced_s, from_host = context.fetch()
    node.drop_all()
    context.prestage(0.0)
    time.sleep(WAIT_S)
    queued_s, _ = context.fetch()
    return PrestageRound(pool_s, host_s, announced_s, queued_s, from_host)


def rows_of(rounds: Sequence[PrestageRound]) -> Iterator[Row]:
    """Yield the rows of all rounds."""
    served = sum(each.from_host == BLOCKS for each in rounds) / len(rounds)
    megabytes = BLOCKS * LAYOUT.raw_bytes / MIB
    link = {"context_mib": megabytes, "link_mbit_per_s": BITS_PER_S / 1e6, "rounds": len(rounds)}
    yield at_least("prestage.announced", served, "of contexts", SERVED_GOAL, **link)
    announced_ms = 1e3 * median(each.announced_s for each in rounds)
    host_ms = 1e3 * median(each.host_s for each in rounds)
    ratio = median(each.announced_s / each.host_s for each in rounds)
    yield Row(
        what="prestage.announced.fetch",
        value=announced_ms,
        unit="ms",
        limit=host_ms,
        ratio=ratio,
        goal=FETCH_GOAL,
        ok=ratio <= FETCH_GOAL,
        more={"limit_is": "a fetch from memory"},
    )
    gain = median((each.pool_s - each.queued_s) / WAIT_S for each in rounds)
    seconds = {
        "pool_s": median(each.pool_s for each in rounds),
        "queued_s": median(each.queued_s for each in rounds),
        "waited_s": WAIT_S,
    }
    yield at_least("prestage.queued.gain", gain, "of the wait", GAIN_GOAL, **seconds)


def limit_link(pid: int, bits_per_s: int) -> None:
    """Limit what the host of a process sends; raise HoldfastError if refused."""
    bucket = ["tbf", "rate", f"{bits_per_s}bit", "burst", "256kb", "latency", "50ms"]
    argv = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", "tc", "qdisc", "add", "dev", "eth0"]
    done = subprocess.run([*argv, "root", *bucket], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HoldfastError(f"tc: {done.stderr.strip() or done.returncode}")
