"""Measure a degraded pool: a member that joins, one late target, and all targets mute.

The targets are real processes over loopback; the host's pool tier runs in this process. The answers
of a late target arrive `LATE_S` later. A mute target is stopped (SIGSTOP): its connections stay
open and it answers nothing. The pools are not striped: a block is on the owner of its segment.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import KIB
from holdfast.membership.members import Member
from holdfast.membership.membership import MembershipOptions
from holdfast.report import Row, at_most
from holdfast.testing.chained import ChainedBlocks
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.segment_batch import segment_of
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import HeldFlags, ReceivedRecords, TargetClient
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.pause import pause, resume
from holdfast_bench.harness.pool import ManualMembers
from holdfast_bench.harness.standard_error import of_median, percentile_99
from holdfast_bench.measure.pool import TargetUnderTest

TARGETS = 4
CHAINS = 240
HOT_CHAINS = 12
LATE_S = 0.1
LATE_WARM_UP_S = 5.0
"""How long the pool reads from a late target before its latency is measured."""

READS = 2_000
LATE_READS = 400
"""Reads without hedging; fewer, because each read from the late target takes `LATE_S`."""

TRIES = 5
LATE_GOAL = 1.3
DIP_GOAL = 0.5
ASKERS = 4
MUTE_S = 10.0
SAVE_S = 30.0
OPENS_GOAL_S = 2.0
OPENS_S_MAX = 60.0
"""Longest wait until the circuit breakers of silent targets open."""

MUTE_ASK_GOAL_MS = 50.0
"""5 % of one second of prefill."""

_NO_EJECTION = HealthOptions(slow_factor=1e9, failure_share_max=1.0)


class LateTarget(TargetClient):
    """A client of a target that delays each call by `late_s`."""

    late_s = 0.0

    def get(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,
        on_progress: Callable[[int], None] | None = None,
    ) -> ReceivedRecords:
        time.sleep(self.late_s)
        return super().get(namespace, keys, into, deadline_s, on_progress)

    def exist(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> HeldFlags:
        time.sleep(self.late_s)
        return super().exist(namespace, keys, deadline_s)


class DegradedPool:
    """A pool tier over targets named by their numbers; the first `listed` are members."""

    def __init__(self, addresses: Sequence[str], options: PoolTierOptions, listed: int) -> None:
        self._members = [
            Member(id=f"t{number}", address=address) for number, address in enumerate(addresses)
        ]
        self._source = ManualMembers()
        self.targets: dict[str, LateTarget] = {}
        self.tier = PoolTier(self._source, self._connect, options)
        self.announce(listed)

    def announce(self, count: int) -> None:
        """Make the first `count` targets the members."""
        self._source.publish(self._members[:count])

    def save(self, blocks: Sequence[ChainedBlocks]) -> None:
        """Write the first block of each chain; raise HoldfastError if one is refused for long."""
        puts = [put for block in blocks for put in block.puts([0])]
        end_s = time.monotonic() + SAVE_S
        while (outcomes := set(self.tier.write(puts))) != {Outcome.OK}:
            if time.monotonic() > end_s:
                raise HoldfastError(f"the pool did not accept {len(blocks)} records: {outcomes}")
            time.sleep(0.05)

    def read(self, block: ChainedBlocks) -> bool:
        """Read a block; return whether it is a hit. Raises AssertionError if it is wrong."""
        return block.load(self.tier, [0]) == [Outcome.OK]

    def ask(self, block: ChainedBlocks) -> float:
        """Query whether the pool holds a block; return the time of the query in milliseconds."""
        start_s = time.perf_counter()
        self.tier.held(block.namespace, block.keys(1), 0)
        return 1e3 * (time.perf_counter() - start_s)

    def owner(self, block: ChainedBlocks) -> LateTarget:
        """Return the client of the target that owns a block; it must be connected."""
        return self.targets[self.tier.lookup.route(segment_of(block.place(0))).write[0].id]

    def measure_reads(
        self, blocks: Sequence[ChainedBlocks], rng: random.Random, reads: int
    ) -> ReadLatency:
        hedges, times_ms, hits = self.tier.hedged_reads.hedging.hedges, list[float](), 0
        for _ in range(reads):
            block = rng.choice(blocks)
            gets, start_s = block.gets([0]), time.perf_counter()
            outcomes = self.tier.read(gets)
            times_ms.append(1e3 * (time.perf_counter() - start_s))
            block.check(gets, outcomes)
            hits += outcomes == [Outcome.OK]
        hedged = self.tier.hedged_reads.hedging.hedges - hedges
        p99_ms = percentile_99(times_ms)
        return ReadLatency(p99_ms, hits / reads, hedged / reads)

    def close(self) -> None:
        self.tier.close()

    def _connect(self, member: Member) -> LateTarget:
        self.targets[member.id] = LateTarget(member.address)
        return self.targets[member.id]


class ReadLatency(NamedTuple):
    """Sequential reads: 99th percentile of the latency, share of hits, share of hedged reads."""

    p99_ms: float
    hit_share: float
    hedged_share: float


def trouble_rows(folder: Path) -> list[Row]:
    """Measure a join, a late target with and without hedged reads, and all targets mute."""
    with ExitStack() as stack:
        folders = [folder / f"trouble-{number}" for number in range(TARGETS)]
        targets = [stack.enter_context(TargetUnderTest(each)) for each in folders]
        addresses = [target.peer_address for target in targets]
        return [_join_row(addresses), _late_row(addresses), *_mute_rows(targets)]


def _join_row(addresses: Sequence[str]) -> Row:
    dips = {overlap_s: _miss_share(addresses, overlap_s) for overlap_s in (600.0, 0.0)}
    if not dips[0.0]:
        raise HoldfastError("a member joined and no block was missed: nothing was measured")
    goal, more = DIP_GOAL * dips[0.0], {"dip_without_two_epochs": dips[0.0]}
    return at_most("pool.join.dip", dips[600.0], "of hits", goal, **more, ideal_moved=1 / TARGETS)


def _miss_share(addresses: Sequence[str], overlap_s: float) -> float:
    """Return the share of blocks missed after another member has joined with its full share."""
    membership = MembershipOptions(overlap_s=overlap_s, ramp_s=0.0, transient_s=0.0, unseen_s=0.0)
    options = PoolTierOptions(stripe_targets=1, membership=membership, health=_NO_EJECTION)
    with closing(DegradedPool(addresses, options, TARGETS - 1)) as pool:
        blocks = _blocks(CHAINS)
        pool.save(blocks)
        pool.announce(TARGETS)
        return 1.0 - sum(map(pool.read, blocks)) / len(blocks)


def _late_row(addresses: Sequence[str]) -> Row:
    tries = [_late(addresses, HealthOptions(), hedge=True) for _ in range(TRIES)]
    _, unhedged = _late(addresses, _NO_EJECTION, hedge=False)
    ratios = [late.p99_ms / healthy.p99_ms for healthy, late in tries]
    more = {
        "healthy_ms": statistics.median(healthy.p99_ms for healthy, _ in tries),
        "with_ms": statistics.median(late.p99_ms for _, late in tries),
        "without_ms": unhedged.p99_ms,
        "hits_with": min(late.hit_share for _, late in tries),
        "hits_without": unhedged.hit_share,
        "hedged_share": max(late.hedged_share for _, late in tries),
        "tries": ratios,
        "standard_error": of_median(ratios),
    }
    return at_most("pool.late.p99", statistics.median(ratios), "x healthy", LATE_GOAL, **more)


def _late(
    addresses: Sequence[str], health: HealthOptions, *, hedge: bool
) -> tuple[ReadLatency, ReadLatency]:
    """Read hot segments from healthy targets, then with one late target, after `LATE_WARM_UP_S`.

    Hedged reads need second copies, so with `hedge` the segments are made hot and saved again.
    """
    reads = READS if hedge else LATE_READS
    with closing(
        DegradedPool(addresses, PoolTierOptions(stripe_targets=1, health=health), TARGETS)
    ) as pool:
        blocks, rng = _blocks(HOT_CHAINS), random.Random(SEED)  # noqa: S311  # an order, not a secret
        pool.save(blocks)
        if hedge:
            for block in blocks * 70:
                pool.read(block)
            pool.save(blocks)
        healthy = pool.measure_reads(blocks, rng, reads)
        pool.owner(blocks[0]).late_s = LATE_S
        end_s = time.monotonic() + LATE_WARM_UP_S
        while time.monotonic() < end_s:
            pool.read(rng.choice(blocks))
        return healthy, pool.measure_reads(blocks, rng, reads)


def _mute_rows(targets: Sequence[TargetUnderTest]) -> list[Row]:
    """Stop all targets; measure the time until their circuit breakers open, and lookups after that.

    A user's request waits only for the lookup: with all breakers open, nothing else is sent.
    """
    addresses = [target.peer_address for target in targets]
    with closing(DegradedPool(addresses, PoolTierOptions(stripe_targets=1), TARGETS)) as pool:
        blocks = _blocks(CHAINS)
        pool.save(blocks)
        asking = itertools.cycle(blocks)
        for target in targets:
            pause(target.process.pid)
        try:
            opened_s = _opened_s(pool, asking)
            asked_ms = []
            end_s = time.monotonic() + MUTE_S
            while time.monotonic() < end_s:
                time.sleep(0.01)
                asked_ms.append(pool.ask(next(asking)))
        finally:
            for target in targets:
                resume(target.process.pid)
    more = {"asked": len(asked_ms), "median_ms": statistics.median(asked_ms)}
    return [
        at_most("pool.mute.opens", opened_s, "s", OPENS_GOAL_S, askers=ASKERS),
        at_most("pool.mute.ask", max(asked_ms), "ms", MUTE_ASK_GOAL_MS, **more),
    ]


def _opened_s(pool: DegradedPool, asking: Iterator[ChainedBlocks]) -> float:
    """Query until the circuit breakers of all targets are open; return the seconds it took.

    Raises HoldfastError after `OPENS_S_MAX`.
    """
    begun_s = time.monotonic()
    with ThreadPoolExecutor(ASKERS) as askers:
        while trusted := [name for name in pool.targets if pool.tier.health.trusted(name)]:
            if time.monotonic() > begun_s + OPENS_S_MAX:
                raise HoldfastError(
                    f"requests still go to {', '.join(trusted)}, silent for {OPENS_S_MAX:.0f} s"
                )
            list(askers.map(pool.ask, itertools.islice(asking, ASKERS)))
    return time.monotonic() - begun_s


def _blocks(count: int) -> list[ChainedBlocks]:
    """Return chains, of which one block each is used: so many segments."""
    return [ChainedBlocks(64 * KIB) for _ in range(count)]
