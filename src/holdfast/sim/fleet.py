"""A simulated fleet: workers with their own tiers, shared tiers, and all links."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from holdfast.plan.cost import TierEstimate
from holdfast.plan.planner import AT_ONCE
from holdfast.policy.movement import Intake
from holdfast.sim.hardware import SimulatedHardware, TierSpec
from holdfast.sim.ladder import EngineModel, TierModel
from holdfast.sim.link import SharedLink, Writer
from holdfast.sim.memory import SimulatedMemory, SimulatedRules, SimulatedTier
from holdfast.sim.movement import SimulatedEntry, SimulatedRole


class SimulatedEngine:
    """A FIFO queue of prefills; `prefills_at_once` run concurrently."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.busy_s = 0.0
        self.backlog_s = 0.0
        """Seconds of prefill that are expected, queued or running."""
        self._free = model.prefills_at_once
        self._waiting: deque[tuple[int, float]] = deque()

    @property
    def queue_s(self) -> float:
        """Estimated seconds until all queued and running prefills are done."""
        return self.backlog_s / self.model.prefills_at_once

    def expect(self, seconds: float) -> None:
        """Add seconds of prefill to the backlog, before the prefill is queued."""
        self.backlog_s += seconds

    def arrive(self, request: int, seconds: float) -> list[tuple[int, float]]:
        """Queue a prefill; return the (request, seconds) that start now."""
        self._waiting.append((request, seconds))
        return self._start()

    def leave(self, seconds: float) -> list[tuple[int, float]]:
        """End a prefill of `seconds`; return the (request, seconds) that start now."""
        self._free += 1
        self.backlog_s -= seconds
        return self._start()

    def _start(self) -> list[tuple[int, float]]:
        started = []
        while self._free and self._waiting:
            self._free -= 1
            started.append(self._waiting.popleft())
            self.busy_s += started[-1][1]
        return started


@dataclass
class SimulatedWorker:
    """The memory, engine, links (by number) and queue of one worker."""

    memory: SimulatedMemory
    engine: SimulatedEngine
    links: list[list[int]]
    """For each tier of the ladder, the links that its blocks move over."""
    queue: deque[int] = field(default_factory=deque)
    """Requests that wait for their lookup."""
    ahead: int = 0
    """Number of requests that were looked up and whose prefill has not started."""
    requests: int = 0
    """Number of requests between arrival and first token."""


NewRules = Callable[[TierSpec], SimulatedRules]
"""Creates the eviction and admission rules of one tier of one owner."""


class FleetCoverage(NamedTuple):
    """The leading blocks of a chain that a worker can read from its own or shared tiers.

    `tiers[i]` is the number on the ladder of the tier that block `i` is read from. The worker's own
    tiers hold the first `whole` runs completely. `own` and `shared` are the rows that hold the
    blocks, in the worker's memory and in the shared memory: first those of the leading runs, and of
    the runs behind them. If own and shared tiers hold a chain in turns, `later_own` and
    `later_shared` are the rows of the runs behind those.
    """

    own: list[int]
    shared: list[int]
    tiers: bytes
    whole: int
    later_own: Sequence[int] = ()
    later_shared: Sequence[int] = ()


NOT_LOOKED_UP = FleetCoverage([], [], b"", 0)
"""The coverage of a request before its lookup."""


class Fleet:
    """`workers` workers on one ladder. Other modules refer to `links[i]` by its number `i`."""

    def __init__(self, hardware: SimulatedHardware, workers: int, rules: NewRules) -> None:
        self.hardware = hardware
        self.links: list[SharedLink] = []
        self.own = sum(not tier_spec.model.shared for tier_spec in hardware.tier_specs)
        """Number of tiers that each worker has of its own: the first ones of the ladder."""
        self.names = [tier_spec.kind for tier_spec in hardware.tier_specs]
        self._ladder_numbers = bytes((tier + self.own) % 256 for tier in range(256))
        """Translation table: number among the shared tiers to number on the ladder."""
        self._rules = rules
        common = [self._link(tier_spec) for tier_spec in hardware.tier_specs[self.own :]]
        tier_states = self._tier_states(hardware.tier_specs[self.own :])
        self.shared = SimulatedMemory(hardware.namespace, tier_states) if tier_states else None
        hosts = [number for number, name in enumerate(self.names) if name == "host"]
        self.workers: list[SimulatedWorker] = []
        for _ in range(workers):
            memory = SimulatedMemory(
                hardware.namespace, self._tier_states(hardware.tier_specs[: self.own]), self.shared
            )
            links = [self._link(tier_spec) for tier_spec in hardware.tier_specs[: self.own]]
            for tier_spec, shared in zip(hardware.tier_specs[self.own :], common, strict=True):
                links.append([*shared, *self._add(SharedLink(tier_spec.model.worker_bytes_per_s))])
            if hosts:  # blocks from lower tiers pass through host memory
                for number in range(hosts[0] + 1, len(links)):
                    links[number] = [*links[number], *links[hosts[0]]]
            self.workers.append(SimulatedWorker(memory, SimulatedEngine(hardware.engine), links))

    def cover(self, worker: SimulatedWorker, keys: list[bytes]) -> FleetCoverage:
        """Look a chain of runs up in the worker's own tiers and in shared tiers, in turns."""
        own, shared = worker.memory.cover(keys), self.shared
        if shared is None or own.whole == len(keys):
            return FleetCoverage(own.rows, [], own.tiers, own.whole)
        common = shared.cover(keys[own.whole :] if own.whole else keys)
        tiers = own.tiers + common.tiers[own.part :].translate(self._ladder_numbers)
        at, part = own.whole + common.whole, common.part
        if len(common.tiers) <= own.part or at == len(keys):
            return FleetCoverage(own.rows, common.rows, tiers, own.whole)
        later_own, later_shared = list[int](), list[int]()
        own_side = worker.memory, None, later_own
        for memory, numbers, later in cycle(
            (own_side, (shared, self._ladder_numbers, later_shared))
        ):
            held = memory.cover(keys[at:])
            if len(held.tiers) <= part:
                break
            later.extend(held.rows)
            tiers += held.tiers[part:].translate(numbers)
            at, part = at + held.whole, held.part
        return FleetCoverage(own.rows, common.rows, tiers, own.whole, later_own, later_shared)

    def pin(self, worker: SimulatedWorker, covered: FleetCoverage) -> None:
        """Protect what a worker is to read from eviction until `unpin`."""
        worker.memory.pin(covered.own)
        worker.memory.pin(covered.later_own)
        if self.shared:
            self.shared.pin(covered.shared)
            self.shared.pin(covered.later_shared)

    def unpin(self, worker: SimulatedWorker, covered: FleetCoverage) -> None:
        """Undo `pin`."""
        worker.memory.unpin(covered.own)
        worker.memory.unpin(covered.later_own)
        if self.shared:
            self.shared.unpin(covered.shared)
            self.shared.unpin(covered.later_shared)

    def estimates(
        self, worker: SimulatedWorker, tiers: Sequence[int], now_s: float
    ) -> list[TierEstimate]:
        """Return the estimate of each tier in `tiers` now, by the slowest link on its path."""
        block = self.hardware.namespace.slot_bytes
        estimates = []
        for tier, tier_spec in enumerate(self.hardware.tier_specs):
            if tier not in tiers:
                estimates.append(AT_ONCE)
                continue
            slowest = None
            for number in worker.links[tier]:
                link = self.links[number]
                speed = min(link.bytes_per_s, link.each_bytes_per_s)
                each = TierEstimate(tier_spec.latency_s, speed, link.queued_bytes(now_s))
                if slowest is None or each.seconds(block) > slowest.seconds(block):
                    slowest = each
            estimates.append(slowest or TierEstimate(tier_spec.latency_s, math.inf))
        return estimates

    def tier_states(self, tier: int) -> list[SimulatedTier]:
        """Return the simulated tiers at `tier`: one per worker, or the one they share."""
        if tier >= self.own and self.shared:
            return [self.shared.tier_states[tier - self.own]]
        return [worker.memory.tier_states[tier] for worker in self.workers]

    def expect_at_most(self, blocks: int) -> None:
        """Tell each tier the number of distinct blocks: a tier that fits all never evicts."""
        memories = [worker.memory for worker in self.workers]
        for memory in [*memories, self.shared] if self.shared else memories:
            for tier_state in memory.tier_states:
                tier_state.never_full = tier_state.capacity >= blocks

    def create_rows(
        self, keys: Sequence[bytes], parent_runs: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Create the rows of all runs in each memory that serves every request.

        With several workers, each creates rows on demand, which needs less memory.
        """
        memories = [self.workers[0].memory] if len(self.workers) == 1 else []
        for memory in [*memories, self.shared] if self.shared else memories:
            memory.create_rows(keys, parent_runs, lengths)

    def _tier_states(self, tier_specs: Sequence[TierSpec]) -> list[SimulatedTier]:
        tier_states = []
        for number, tier_spec in enumerate(tier_specs):
            tier = tier_spec.model
            above = {other.kind for other in tier_specs[:number]}
            writer = Writer(tier_spec.write_bytes_per_s, tier.write_wait_s)
            mover = Writer(float(tier.move_limit), tier.write_wait_s) if tier.move_limit else None
            entry = _entry(tier, is_first=not tier.shared and above <= {"device"})
            tier_states.append(
                SimulatedTier(tier_spec.blocks, entry, self._rules(tier_spec), writer, mover)
            )
        return tier_states

    def _link(self, tier_spec: TierSpec) -> list[int]:
        return self._add(
            SharedLink(tier_spec.read_bytes_per_s, tier_spec.model.request_bytes_per_s)
        )

    def _add(self, link: SharedLink) -> list[int]:
        """Register a link and return its number; an unlimited link is not registered."""
        if link.bytes_per_s == link.each_bytes_per_s == math.inf:
            return []
        self.links.append(link)
        return [len(self.links) - 1]


def _entry(tier: TierModel, *, is_first: bool) -> SimulatedEntry:
    """Return how blocks get to a tier; `is_first`: it is a worker's first one below the engine."""
    if tier.kind == "device":
        return SimulatedEntry(SimulatedRole.ENGINE)
    if is_first and tier.write == "behind":
        return SimulatedEntry(SimulatedRole.HOST)
    intake = Intake(
        saves=tier.write == "behind",
        evicted=tier.admit_evicted or Intake().evicted,
        fetched=tier.admit_fetched or Intake().fetched,
    )
    return SimulatedEntry(SimulatedRole.LOWER, intake, is_volatile=tier.kind == "cxl")
