"""Movement of a simulated ladder: which tiers get what is saved, evicted or fetched.

The rules of tiers below memory are those of the store (`holdfast.policy.movement`). The engine and
host memory are simulated beside them: both get every block that is computed or fetched.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.policy.movement import (
    REUSED,
    Intake,
    counts_uses,
    demotion_targets,
    promotion_targets,
    takes,
    takes_fetched,
)


class SimulatedRole(enum.Enum):
    """What a tier is to its worker."""

    ENGINE = "engine"
    """The engine's own memory."""
    HOST = "host"
    """The store's first tier."""
    LOWER = "lower"
    """A tier below memory."""


class SimulatedEntry(NamedTuple):
    """How blocks get to a tier; `intake` and `is_volatile` are of tiers below memory."""

    role: SimulatedRole
    intake: Intake = Intake()
    is_volatile: bool = False


class SimulatedMovement:
    """The moves of one ladder, whose tiers have these entries, fastest first."""

    def __init__(self, entries: Sequence[SimulatedEntry]) -> None:
        numbers = range(len(entries))
        roles = [entry.role for entry in entries]
        self._lower = lower = [n for n in numbers if roles[n] is SimulatedRole.LOWER]
        self._intakes = intakes = {n: entries[n].intake for n in lower}
        self._volatile = frozenset(n for n in lower if entries[n].is_volatile)
        self.counts_uses = counts_uses(intakes)
        """Whether some rule asks how often a block was used."""
        self.gets_saves = [n not in intakes or intakes[n].saves for n in numbers]
        """For each tier, whether it gets blocks that are computed."""
        promoted_from = [
            set() if n in intakes else set[int](numbers[n + 1 :]) for n in numbers
        ]  # memory gets all that is fetched from below it
        for source in lower:
            for target in promotion_targets(source, intakes, self._volatile):
                promoted_from[target].add(source)
        self.promoted_from = [self._sources(n, promoted_from[n], uses=0) for n in numbers]
        """For each tier, the tiers whose fetched blocks are all written to it."""
        self.reused_from = [self._sources(n, promoted_from[n], uses=REUSED) for n in numbers]
        """For each tier, the tiers whose fetched blocks are written to it if they are reused."""
        self.demotion_targets = [self._targets(n, roles[n]) for n in numbers]
        """For each tier, the tiers that are offered its evicted blocks, nearest first."""
        self.demoted_uses = [
            min((n for n in (0, REUSED) if self._any_takes(source, n)), default=math.inf)
            for source in numbers
        ]
        """For each tier, the uses from which any tier takes a block that it evicts."""

    def is_below_memory(self, tier: int) -> bool:
        """Return whether only one tier gets what a tier evicts; memory offers it to all."""
        return tier in self._intakes

    def takes_evicted(self, tier: int, source: int, uses: int) -> bool:
        """Return whether a tier takes a block that tier `source` evicts."""
        if source not in self._intakes:
            return True
        return takes(self._intakes[tier].evicted, uses)

    def _any_takes(self, source: int, uses: int) -> bool:
        """Return whether any tier takes a block that tier `source` evicts."""
        return any(self.takes_evicted(n, source, uses) for n in self.demotion_targets[source])

    def _sources(self, tier: int, sources: Iterable[int], *, uses: int) -> frozenset[int]:
        """Return those of `sources` from which a tier takes blocks that were used so often."""
        intake = self._intakes.get(tier)
        return frozenset(
            source
            for source in sources
            if intake is None
            or takes_fetched(
                intake, uses, is_volatile=not self._volatile.isdisjoint((tier, source))
            )
        )

    def _targets(self, source: int, role: SimulatedRole) -> tuple[int, ...]:
        """Return the tiers that are offered what a tier evicts.

        Host memory offers blocks that no lower tier holds to all of them. The engine offers its
        blocks only to a tier right below it that does not get them at their save.
        """
        if role is SimulatedRole.LOWER:
            return demotion_targets(source, self._intakes)
        if role is SimulatedRole.HOST:
            return tuple(self._lower)
        return tuple(n for n in self._lower if n == source + 1 and not self._intakes[n].saves)
