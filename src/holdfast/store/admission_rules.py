"""Admission rules of a store: one per tier, told of every use, asked before every write.

State only: call under the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.policy.admit import USES_MAX, Admission, AdmissionCandidate, AlwaysAdmit

SECOND = 2

_RECORDS = 16
"""Records over which the stored size is averaged."""

_SIZES_MAX = 1_024


class AdmissionRules:
    """The admission rule and the domains' write budgets of each tier below the host.

    `budgets` holds, for each tier, write budgets by domain id; they also limit writes that no rule
    is asked about. Tiers are numbered from 1. `counts_uses`: count uses, though no rule asks.
    """

    def __init__(
        self,
        index: Residency,
        clock: Clock,
        rules: Sequence[Admission],
        budgets: Sequence[Mapping[bytes, Admission]],
        *,
        counts_uses: bool = False,
    ) -> None:
        self.of = rules
        self._budgets = budgets
        self.choosy = not all(isinstance(rule, AlwaysAdmit) for rule in rules)
        """Whether some tier has a rule that does not admit everything."""
        self.counts_uses = counts_uses or self.choosy
        """Whether uses are counted."""
        self._index = index
        self._clock = clock
        self._uses = bytearray()
        self._stored: OrderedDict[tuple[int, Namespace], float] = OrderedDict()
        """By tier and namespace, the mean size of the records written last, if a codec shortens
        them."""

    def note(self, rows: Sequence[int], at: Sequence[int]) -> Iterator[int]:
        """Record a use of each row, found on tier `at[i]`; yield those used twice now.

        A block that no tier had is NOT_HERE: saved for the first time, or computed again.
        """
        if not self.choosy:
            return
        uses, keys, now_s = self._uses, self._index.keys, self._clock.now()
        uses.extend(bytes(max(len(keys) - len(uses), 0)))
        told = [(n, rule) for n, rule in enumerate(self.of, 1) if not isinstance(rule, AlwaysAdmit)]
        for row, found in zip(rows, at, strict=True):
            uses[row] = min(uses[row] + 1, USES_MAX)
            for tier, rule in told:
                block = self._candidate(row, tier)
                rule.used(block, now_s, at_hand=NOT_HERE < found < tier)
            if uses[row] == SECOND:
                yield row

    def count(self, rows: Sequence[int]) -> None:
        """Count a use of each row, if uses are counted and no rule is told of them."""
        if self.choosy or not self.counts_uses:
            return
        uses = self._uses
        uses.extend(bytes(max(len(self._index.keys) - len(uses), 0)))
        for row in rows:
            if uses[row] < USES_MAX:
                uses[row] += 1

    def uses(self, row: int) -> int:
        """Return how often a block was used since it was saved or promoted, up to `USES_MAX`."""
        return self._uses[row] if row < len(self._uses) else 0

    def admits(self, row: int, tier: int) -> bool:
        """Return whether a tier admits a block; True counts as a write."""
        return self.of[tier - 1].admit(self._candidate(row, tier), self._clock.now())

    def affords(self, row: int, tier: int) -> bool:
        """Return whether the write budget of a block's domain permits a mandatory write."""
        block = self._candidate(row, tier)
        budget = self._budgets[tier - 1].get(block.domain)
        return budget is None or budget.admit(block, self._clock.now())

    def note_stored(self, tier: int, namespace: Namespace, nbytes: int) -> None:
        """Learn the size of a record that was written, so that budgets count what is stored."""
        name = tier, namespace
        mean = self._stored.get(name)
        if mean is None and nbytes >= namespace.slot_bytes:
            return
        self._stored[name] = nbytes if mean is None else mean + (nbytes - mean) / _RECORDS
        if len(self._stored) > _SIZES_MAX:
            self._stored.popitem(last=False)

    def expected_bytes(self, tier: int, namespace: Namespace) -> int:
        """Return the bytes that the next record of a namespace will take on a tier."""
        mean = self._stored.get((tier, namespace)) if self._stored else None
        return namespace.slot_bytes if mean is None else int(mean)

    def gave_up(self, row: int, tier: int) -> None:
        """Tell a tier's rule that the tier dropped a block to make room."""
        if self.choosy:
            self.of[tier - 1].gave_up(self._index.name(row), self._clock.now())

    def forget(self, row: int) -> None:
        """Record that a row names no block any more."""
        if row < len(self._uses):
            self._uses[row] = 0

    def _candidate(self, row: int, tier: int) -> AdmissionCandidate:
        index, namespace = self._index, self._index.namespace(row)
        uses = self.uses(row)
        group = (index.namespace_number(row), uses)
        nbytes = self.expected_bytes(tier, namespace)
        return AdmissionCandidate(index.name(row), group, nbytes, namespace.domain, uses)
