"""Movement: which moves between tiers the rules of a store make, and counts of what moved.

The rules are pure (`holdfast.policy.movement`); this module asks them about rows, and queues what
they answer. State only: call under the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from holdfast.policy.movement import (
    Intake,
    demotion_targets,
    promotion_targets,
    takes,
    takes_fetched,
)
from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.copies import CopyTable
from holdfast.store.copy_events import CopyState
from holdfast.store.move_queues import MoveQueues, MoveReason


class MovementRules(NamedTuple):
    """What the movement of a store depends on beside its copies.

    `intakes`: what each tier below memory takes, by number. `volatile`: the tiers whose contents
    are lost with the process. `is_durable`: whether a row is of a durable block.
    """

    intakes: Mapping[int, Intake]
    volatile: Collection[int]
    is_durable: Callable[[int], bool]


class Movement:
    """The moves of one store between its tiers."""

    def __init__(
        self,
        copies: CopyTable,
        rules: AdmissionRules,
        queues: MoveQueues,
        by: MovementRules,
    ) -> None:
        self._copies = copies
        self._rules = rules
        self._queues = queues
        self._intakes = intakes = by.intakes
        self._volatile = frozenset(by.volatile)
        self._is_durable = by.is_durable
        tiers = range(copies.tiers)
        self._promotion_targets = [promotion_targets(t, intakes, self._volatile) for t in tiers]
        self._demotion_targets = [demotion_targets(t, intakes) for t in tiers]
        self.moved = Counter[tuple[int, int, MoveReason]]()
        """Copies made, by source, target and reason, since the start."""
        self.moved_bytes = Counter[tuple[int, int, MoveReason]]()
        """Stored bytes of these copies that were written to the target."""
        self.dropped_unmoved = Counter[int]()
        """Copies that each tier evicted before they were moved, though a tier takes them."""

    def count(self, move: tuple[int, int, MoveReason], nbytes: int) -> None:
        """Count a copy that was made: source, target and reason, and its bytes on the target."""
        self.moved[move] += 1
        self.moved_bytes[move] += nbytes

    def promoted(self, row: int, source: int) -> bool:
        """Offer a block that was read from tier `source` to other tiers; return if one takes it."""
        uses, is_durable = self._rules.uses(row), self._is_durable(row)
        missing = [
            number
            for number in self._promotion_targets[source]
            if not self._copies.is_on(row, number)
            and takes_fetched(
                self._intakes[number],
                uses,
                is_volatile=not self._volatile.isdisjoint((number, source)),
                is_durable=is_durable,
            )
        ]
        return bool(missing) and self._queues.enqueue(row, missing, MoveReason.PROMOTION)

    def demotes(self, source: int) -> bool:
        """Return whether any tier is offered what a lower tier evicts."""
        return bool(self._demotion_targets[source])

    def demote(self, row: int, source: int) -> bool:
        """Queue a block that tier `source` will evict for the next tier that takes it.

        Returns False if a slower tier has it, or none takes it.
        """
        return any(self._queues.demote(row, target) for target in self._takers(row, source))

    def evicted(self, row: int, source: int) -> None:
        """Count a copy that its tier evicts, if it was to be moved first; call it before."""
        takers = self._takers(row, source)
        if any(self._queues.is_queued_for(row, taker) for taker in takers) or (
            takers and self._copies.state(row, source) is CopyState.HELD
        ):
            self.dropped_unmoved[source] += 1

    def forget(self, row: int) -> None:
        """Note that a row names no block any more."""
        self._queues.forget(row)

    def _takers(self, row: int, source: int) -> list[int]:
        """Return the tiers that take a block which tier `source` evicts, if no slower one has it.

        Their admission rules are not asked.
        """
        copies, below = self._copies, range(source + 1, self._copies.tiers)
        if not self._demotion_targets[source] or any(
            copies.is_on(row, tier) or row in copies.fillings(tier) for tier in below
        ):
            return []
        uses, is_durable = self._rules.uses(row), self._is_durable(row)
        return [
            tier
            for tier in self._demotion_targets[source]
            if takes(self._intakes[tier].evicted, uses, is_durable=is_durable)
        ]
