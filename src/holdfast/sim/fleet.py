"""A fleet: workers with their own tiers, the tiers they share, and every link between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.plan.cost import TierEstimate
from holdfast.plan.planner import AT_ONCE
from holdfast.sim.hardware import Hardware, Rung
from holdfast.sim.link import Link, Writer
from holdfast.sim.memory import Entry, Memory, Rules, Shelf
from holdfast.sim.worker import Engine, Worker

NewRules = Callable[[Rung], Rules]
"""Makes the rules of one tier of one owner."""


class Covered(NamedTuple):
    """The leading blocks of a chain that a worker can get, from its own tiers and behind them.

    `tiers[i]` is the tier of the ladder that block `i` would come from; the rows are those that
    hold them, `own` in the worker's memory, `shared` behind it. `whole` of the chain's runs are
    held by the worker to their end.
    """

    own: list[int]
    shared: list[int]
    tiers: bytes
    whole: int

    @property
    def blocks(self) -> int:
        """How many leading blocks are held."""
        return len(self.tiers)


UNKNOWN = Covered([], [], b"", 0)
"""Nobody has looked yet."""


class Fleet:
    """`workers` workers on one ladder. `links[i]` is named by its number everywhere else."""

    def __init__(self, hardware: Hardware, workers: int, rules: NewRules) -> None:
        self.hardware = hardware
        self.links: list[Link] = []
        self.own = sum(not rung.model.shared for rung in hardware.rungs)
        """How many tiers each worker has of its own: the first ones of the ladder."""
        self.names = [rung.kind for rung in hardware.rungs]
        self._behind = bytes((tier + self.own) % 256 for tier in range(256))
        """What number each shared tier has on the ladder."""
        self._rules = rules
        self._block_bytes = hardware.world.record_bytes
        common = [self._link(rung) for rung in hardware.rungs[self.own :]]
        shelves = self._shelves(hardware.rungs[self.own :])
        self.shared = Memory(hardware.world, shelves) if shelves else None
        self.workers = [self._worker(common) for _ in range(workers)]

    def cover(self, worker: Worker, keys: list[bytes]) -> Covered:
        """Return what of a chain of runs the worker's own tiers hold, and behind it the shared."""
        own = worker.memory.cover(keys)
        if self.shared is None or own.whole == len(keys):
            return Covered(own.rows, [], own.tiers, own.whole)
        common = self.shared.cover(keys[own.whole :] if own.whole else keys)
        behind = common.tiers[own.part :].translate(self._behind)
        return Covered(own.rows, common.rows, own.tiers + behind, own.whole)

    def estimates(self, worker: Worker, tiers: Sequence[int], now_s: float) -> list[TierEstimate]:
        """Return what the tiers named would need now, by the slowest link on the way of each."""
        return [
            self._estimate(rung.latency_s, worker.links[tier], now_s) if tier in tiers else AT_ONCE
            for tier, rung in enumerate(self.hardware.rungs)
        ]

    def shelves(self, tier: int) -> list[Shelf]:
        """Return the shelves of one tier of the ladder: one a worker, or the one of all."""
        if tier >= self.own and self.shared:
            return [self.shared.shelves[tier - self.own]]
        return [worker.memory.shelves[tier] for worker in self.workers]

    def expect_at_most(self, blocks: int) -> None:
        """Note how many different blocks there are: a tier with room for all gives none up."""
        memories = [worker.memory for worker in self.workers]
        for memory in [*memories, self.shared] if self.shared else memories:
            for shelf in memory.shelves:
                shelf.roomy = shelf.capacity >= blocks

    def make_all(
        self, keys: Sequence[bytes], fronts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Make the rows of all runs in those memories that every request comes to, if they are new.

        The others make the rows of what they are asked for: many workers would need much memory.
        """
        memories = [self.workers[0].memory] if len(self.workers) == 1 else []
        for memory in [*memories, self.shared] if self.shared else memories:
            if not len(memory.index):
                memory.make_all(keys, fronts, lengths)

    def _estimate(self, latency_s: float, links: Sequence[int], now_s: float) -> TierEstimate:
        slowest = None
        block = self._block_bytes
        for number in links:
            link = self.links[number]
            speed = min(link.bytes_per_s, link.each_bytes_per_s)
            each = TierEstimate(latency_s, speed, link.queued_bytes(now_s))
            if slowest is None or each.seconds(block) > slowest.seconds(block):
                slowest = each
        return slowest or TierEstimate(latency_s, math.inf)

    def _worker(self, common: Sequence[Sequence[int]]) -> Worker:
        rungs = self.hardware.rungs
        memory = Memory(self.hardware.world, self._shelves(rungs[: self.own]), self.shared)
        links = [self._link(rung) for rung in rungs[: self.own]]
        for rung, shared in zip(rungs[self.own :], common, strict=True):
            links.append([*shared, *self._add(Link(rung.model.worker_bytes_per_s))])
        hosts = [number for number, rung in enumerate(rungs) if rung.kind == "host"]
        if hosts:  # what comes from further down passes through host memory
            for number in range(hosts[0] + 1, len(links)):
                links[number] = [*links[number], *links[hosts[0]]]
        return Worker(memory, Engine(self.hardware.engine), links)

    def _shelves(self, rungs: Sequence[Rung]) -> list[Shelf]:
        shelves = []
        for number, rung in enumerate(rungs):
            above = {other.kind for other in rungs[:number]}
            entry = Entry.BEHIND
            if rung.kind == "device":
                entry = Entry.ENGINE
            elif rung.model.write == "on_eviction":
                entry = Entry.ON_EVICTION
            elif not rung.model.shared and above <= {"device"}:
                entry = Entry.STORE
            elif rung.kind == "cxl":
                entry = Entry.RISING
            writer = Writer(rung.write_bytes_per_s, rung.model.write_wait_s)
            shelves.append(Shelf(rung.blocks, entry, self._rules(rung), writer))
        return shelves

    def _link(self, rung: Rung) -> list[int]:
        return self._add(Link(rung.read_bytes_per_s, rung.model.request_bytes_per_s))

    def _add(self, link: Link) -> list[int]:
        """Number a link; a link without limits needs none."""
        if link.bytes_per_s == link.each_bytes_per_s == math.inf:
            return []
        self.links.append(link)
        return [len(self.links) - 1]
