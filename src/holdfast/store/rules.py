"""The rules of admission of a store: told of every use, asked before every write.

State only: call everything here under the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.clock import Clock
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.policy.admit import USES_MAX, Admission, Always, Candidate

SECOND = 2


class Rules:
    """One rule for each of `tiers` tiers below the host, numbered from 1 on."""

    def __init__(self, index: Residency, clock: Clock, tiers: int) -> None:
        self.of: list[Admission] = [Always() for _ in range(tiers)]
        self.budgets: list[dict[bytes, Admission]] = [{} for _ in range(tiers)]
        """What of a domain's blocks is written to a tier even if nobody asks its rule."""
        self.choosy = False
        """Whether some tier has a rule that does not take everything."""
        self._index = index
        self._clock = clock
        self._uses = bytearray()

    def choose(self, tier: int, rule: Admission) -> None:
        """Have a rule asked before blocks are written to a tier; 1 is the first below the host."""
        self.of[tier - 1] = rule
        self.choosy = True

    def note(self, rows: Sequence[int], at: Sequence[int]) -> Iterator[int]:
        """Tell the rules of a use of each row, found on tier `at[i]`; yield those used twice now.

        What no tier had is NOT_HERE: saved for the first time, or computed again.
        """
        if not self.choosy:
            return
        uses, keys, now_s = self._uses, self._index.keys, self._clock.now()
        uses.extend(bytes(max(len(keys) - len(uses), 0)))
        told = [(n, rule) for n, rule in enumerate(self.of, 1) if not isinstance(rule, Always)]
        for row, found in zip(rows, at, strict=True):
            uses[row] = min(uses[row] + 1, USES_MAX)
            block = self._candidate(row)
            if block is None:
                continue
            for tier, rule in told:
                rule.used(block, now_s, at_hand=NOT_HERE < found < tier)
            if uses[row] == SECOND:
                yield row

    def admits(self, row: int, tier: int) -> bool:
        """Return whether a tier wants a block; True is taken for a write."""
        block = self._candidate(row)
        return block is not None and self.of[tier - 1].admit(block, self._clock.now())

    def affords(self, row: int, tier: int) -> bool:
        """Return whether the write budget of a block's domain allows a write that has to be."""
        block = self._candidate(row)
        if block is None:
            return False
        budget = self.budgets[tier - 1].get(block.domain)
        return budget is None or budget.admit(block, self._clock.now())

    def gave_up(self, key: bytes, tier: int) -> None:
        """Tell a tier's rule that the tier gave a block up to make room."""
        self.of[tier - 1].gave_up(key, self._clock.now())

    def forget(self, row: int) -> None:
        """Note that a row names no block any more."""
        if row < len(self._uses):
            self._uses[row] = 0

    def _candidate(self, row: int) -> Candidate | None:
        key, world = self._index.keys[row], self._index.world(row)
        if key is None:
            return None
        uses = self._uses[row] if row < len(self._uses) else 0
        group = (self._index.world_number(row), uses)
        return Candidate(key, group, world.record_bytes, world.domain, uses)
