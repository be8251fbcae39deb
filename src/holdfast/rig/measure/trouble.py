"""Measure a pool in trouble: what a join costs, one target that is late, and all that are mute.

Real targets over loopback; the host's pool tier is in this process. A late target is one whose
answers this host gets 100 ms after they were asked for; a mute one is stopped: its connections
stay, and nothing is ever answered.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from holdfast.blocks.envelope import Header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import pack, verify
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import KIB
from holdfast.pause import pause, resume
from holdfast.rig.doubt import of_median
from holdfast.rig.measure.pool import TargetProcess
from holdfast.rig.report import Row, at_most, with_more
from holdfast.tiers.base import Get, Place, Put, segment_place
from holdfast.tiers.pool.health import HealthOptions
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.membership import MembershipOptions
from holdfast.tiers.pool.part import segment_of
from holdfast.tiers.pool.tier import PoolOptions, PoolTier
from holdfast.wire.target import Got, Held, Target

TARGETS = 4
WORLD = World(b"holdfast-bench-t", b"holdfast-bench-d", 64 * KIB, 128)
CHAINS = 240
HOT_CHAINS = 12
LATE_S = 0.1
SETTLE_S = 5.0
READS = 2_000
LATE_READS = 400
"""Each that a late target answers takes a tenth of a second."""

TRIES = 5
LATE_GOAL = 1.3
DIP_GOAL = 0.5
ASKERS = 4
MUTE_S = 10.0
OPENS_GOAL_S = 2.0
MUTE_ASK_GOAL_MS = 50.0
"""5 % of one second of computing a prompt."""

_NUMBERS = itertools.count()
_UNJUDGED = HealthOptions(slow_factor=1e9, failure_share_max=1.0)
_SEED = 20_26


class Known:
    """A membership source that says what it is told to say."""

    def __init__(self) -> None:
        self.told: Callable[[Sequence[Member]], None] = lambda _: None

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        """Remember whom to tell."""
        self.told = told

    def trouble(self) -> str:
        """Nothing is ever wrong."""
        return ""

    def close(self) -> None:
        """Nothing runs."""


class LateTarget(Target):
    """A target whose answers take `late_s` longer."""

    late_s = 0.0

    def get(
        self,
        world: World,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,
        heard: Callable[[int], None] | None = None,
    ) -> Got:
        """Get, late."""
        time.sleep(self.late_s)
        return super().get(world, keys, into, deadline_s, heard)

    def exist(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Held:
        """Ask, late."""
        time.sleep(self.late_s)
        return super().exist(world, keys, deadline_s)


class Scene:
    """A pool tier over targets; their names are their numbers."""

    def __init__(self, addresses: Sequence[str], options: PoolOptions, listed: int) -> None:
        self._members = [
            Member(id=f"t{number}", address=address) for number, address in enumerate(addresses)
        ]
        self._source = Known()
        self.targets: dict[str, LateTarget] = {}
        self.tier = PoolTier(self._source, self._reach, options)
        self.list(listed)

    def list(self, count: int) -> None:
        """Announce the first members."""
        self._source.told(self._members[:count])

    def save(self, keys: Sequence[bytes]) -> None:
        """Write blocks of a segment each; raise HoldfastError if one is not taken."""
        outcomes = self.tier.write([Put(_place(key), _record(key)) for key in keys])
        if set(outcomes) != {Outcome.OK}:
            raise HoldfastError(f"a pool did not take {len(keys)} records: {set(outcomes)}")

    def read(self, key: bytes) -> bool:
        """Read a block and verify it; return whether it came."""
        into = aligned_buffer(WORLD.record_bytes)
        if self.tier.read([Get(_place(key), key, into, WORLD)]) != [Outcome.OK]:
            return False
        if verify(into, key, WORLD.fingerprint, WORLD.payload_bytes) is not Outcome.OK:
            raise HoldfastError("a record that was read is wrong")
        return True

    def ask(self, key: bytes) -> float:
        """Ask what the pool holds of a block; return how many milliseconds that took."""
        start_s = time.perf_counter()
        self.tier.held(WORLD, [key], 0)
        return 1e3 * (time.perf_counter() - start_s)

    def owner(self, key: bytes) -> LateTarget:
        """Return the target that a block belongs to; it has been asked before."""
        return self.targets[self.tier.lookup.route(segment_of(_place(key))).write[0].id]

    def _reach(self, member: Member) -> LateTarget:
        self.targets[member.id] = LateTarget(member.address)
        return self.targets[member.id]


class Paced(NamedTuple):
    """Reads one after the other: their 99th percentile, how many came, how many were hedged."""

    p99_ms: float
    share: float
    hedged: float


def trouble_rows(folder: Path) -> list[Row]:
    """Measure a join, a late target with and without care, and all targets mute."""
    with ExitStack() as stack:
        targets = []
        for number in range(TARGETS):
            place = folder / f"trouble-{number}"
            place.mkdir()
            targets.append(stack.enter_context(TargetProcess(place)))
        addresses = [target.address for target in targets]
        return [_join_row(addresses), _late_row(addresses), *_mute_rows(targets)]


def _join_row(addresses: Sequence[str]) -> Row:
    dips = {overlap_s: _dip(addresses, overlap_s) for overlap_s in (600.0, 0.0)}
    row = at_most("pool.join.dip", dips[600.0], "of hits", DIP_GOAL * dips[0.0])
    return with_more(row, {"dip_without_two_epochs": dips[0.0], "ideal_moved": 1 / TARGETS})


def _dip(addresses: Sequence[str], overlap_s: float) -> float:
    """Return the share of blocks that are missed once a member more has its whole share."""
    membership = MembershipOptions(overlap_s=overlap_s, ramp_s=0.0, fleeting_s=0.0)
    with _scene(
        addresses, PoolOptions(membership=membership, health=_UNJUDGED), TARGETS - 1
    ) as scene:
        keys = _keys(CHAINS)
        scene.save(keys)
        scene.list(TARGETS)
        return 1.0 - sum(map(scene.read, keys)) / len(keys)


def _late_row(addresses: Sequence[str]) -> Row:
    tries = [_late(addresses, HealthOptions(), hedge=True) for _ in range(TRIES)]
    _, careless = _late(addresses, _UNJUDGED, hedge=False)
    ratios = [careful.p99_ms / healthy.p99_ms for healthy, careful in tries]
    row = at_most("pool.late.p99", statistics.median(ratios), "x healthy", LATE_GOAL)
    more: dict[str, object] = {
        "healthy_ms": statistics.median(healthy.p99_ms for healthy, _ in tries),
        "with_ms": statistics.median(careful.p99_ms for _, careful in tries),
        "without_ms": careless.p99_ms,
        "hits_with": min(careful.share for _, careful in tries),
        "hits_without": careless.share,
        "hedged_share": max(careful.hedged for _, careful in tries),
        "tries": ratios,
        "doubt": of_median(ratios),
    }
    return with_more(row, more)


def _late(addresses: Sequence[str], health: HealthOptions, *, hedge: bool) -> tuple[Paced, Paced]:
    """Read hot heads from healthy targets, then with one of them late, after five seconds of it."""
    reads = READS if hedge else LATE_READS
    with _scene(addresses, PoolOptions(health=health), TARGETS) as scene:
        keys, dice = _keys(HOT_CHAINS), random.Random(_SEED)  # noqa: S311  # an order, not a secret
        scene.save(keys)
        if hedge:
            for key in keys * 70:
                scene.read(key)
            scene.save(keys)
        healthy = _paced(scene, keys, dice, reads)
        scene.owner(keys[0]).late_s = LATE_S
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            scene.read(dice.choice(keys))
        return healthy, _paced(scene, keys, dice, reads)


def _mute_rows(targets: Sequence[TargetProcess]) -> list[Row]:
    """Stop every target under way; say how long a host takes to leave them alone, and asks then.

    What a user's request waits for is the question what the pool holds: all else is skipped.
    """
    with _scene([target.address for target in targets], PoolOptions(), TARGETS) as scene:
        keys = _keys(CHAINS)
        scene.save(keys)
        asking = itertools.cycle(keys)
        for target in targets:
            pause(target.process.pid)
        try:
            begun_s = time.monotonic()
            with ThreadPoolExecutor(ASKERS) as askers:
                while any(map(scene.tier.health.trusted, scene.targets)):
                    list(askers.map(scene.ask, itertools.islice(asking, ASKERS)))
            opened_s = time.monotonic() - begun_s
            asked_ms = [scene.ask(next(asking)) for _ in _until(MUTE_S)]
        finally:
            for target in targets:
                resume(target.process.pid)
    row = at_most("pool.mute.ask", max(asked_ms), "ms", MUTE_ASK_GOAL_MS)
    return [
        with_more(at_most("pool.mute.opens", opened_s, "s", OPENS_GOAL_S), {"askers": ASKERS}),
        with_more(row, {"asked": len(asked_ms), "median_ms": statistics.median(asked_ms)}),
    ]


def _until(seconds: float) -> Iterator[None]:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.01)
        yield


def _paced(scene: Scene, keys: Sequence[bytes], dice: random.Random, reads: int) -> Paced:
    hedges, times_ms, came = scene.tier.races.hedging.hedges, list[float](), 0
    for _ in range(reads):
        key, start_s = dice.choice(keys), time.perf_counter()
        came += scene.read(key)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    hedged = scene.tier.races.hedging.hedges - hedges
    return Paced(statistics.quantiles(times_ms, n=100)[-1], came / reads, hedged / reads)


@contextmanager
def _scene(addresses: Sequence[str], options: PoolOptions, listed: int) -> Iterator[Scene]:
    scene = Scene(addresses, options, listed)
    try:
        yield scene
    finally:
        scene.tier.close()


def _keys(count: int) -> list[bytes]:
    return [next(_NUMBERS).to_bytes(SEGMENT_BYTES, "little") * 2 for _ in range(count)]


def _place(key: bytes) -> Place:
    return segment_place(key[:SEGMENT_BYTES])


def _record(key: bytes) -> memoryview:
    record = aligned_buffer(WORLD.record_bytes)
    size = WORLD.payload_bytes
    header = Header(
        *(key, WORLD.fingerprint, WORLD.fingerprint, WORLD.domain, 0),
        *(WORLD.block_tokens, size, size),
        segment=key[:SEGMENT_BYTES],
    )
    pack(record, header)
    return record
