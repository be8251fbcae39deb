"""Measure what an acknowledged save costs, beside an ordinary one, on a real node with a disk."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.limits import GIB
from holdfast.policy.retention import Retention
from holdfast.report import Row, at_most
from holdfast.wire.local import messages as m
from holdfast_bench.harness.hardware_limits import SyncedWriteLimit
from holdfast_bench.harness.node import NodeUnderTest, call
from holdfast_bench.measure.node import ANSWER_S, BATCH, PAYLOAD_BYTES, BenchSession, attached

HOST_BYTES = 1 * GIB
DISK_BYTES = 2 * GIB
FIRST_SEED = 4 << 20


def durable_rows(folder: Path, rounds: int) -> list[Row]:
    """Measure saves of 32 blocks of 2 MiB until the node has them, and until the disk has."""
    ordinary_s, acknowledged_s, plain_s = list[float](), list[float](), list[float]()
    with (
        NodeUnderTest(folder / "node", HOST_BYTES, DISK_BYTES) as node,
        attached(node) as engine,
        closing(SyncedWriteLimit(folder, BATCH, PAYLOAD_BYTES)) as limit,
    ):
        for number in range(2 * rounds):
            retention = (Retention.SESSION, Retention.DURABLE)[number % 2]
            seconds = _save(engine, FIRST_SEED + number, retention)
            node.wait_idle()
            if retention == Retention.DURABLE:
                acknowledged_s.append(seconds)
                plain_s.append(limit.seconds())
            else:
                ordinary_s.append(seconds)
    ordinary, durable = statistics.median(ordinary_s), statistics.median(acknowledged_s)
    plain_ms = 1e3 * statistics.median(plain_s)
    return [
        at_most("durable.save.ordinary", 1e3 * ordinary, "ms"),
        at_most("durable.save", 1e3 * durable, "ms", plain_ms=plain_ms),
        at_most("durable.save.beside_ordinary", durable / ordinary, "x"),
    ]


def _save(engine: BenchSession, seed: int, retention: Retention) -> float:
    """Save a new context; return the seconds until the node has it, or the disk if durable."""
    chain = engine.chain(seed, BATCH)
    start_s = time.perf_counter()
    engine.save(chain, retention)
    if retention == Retention.DURABLE:
        kept = call(engine.client, m.Sync(chain.packed(), ANSWER_S, saving=True), m.Hinted).blocks
        if kept != BATCH:
            raise HoldfastError(f"{kept} of {BATCH} blocks were acknowledged within {ANSWER_S:g} s")
    return time.perf_counter() - start_s
