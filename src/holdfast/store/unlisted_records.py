"""Records that local tiers keep although the index does not list them.

A record that could not be read is not proof of damage: its drive may answer later. Neither is one
that no key at hand opens: the key ring may be restored. Such a record leaves the index, so that its
block is a miss and can be saved again, but its place is not freed. The next recovery of its medium
judges it again. The tier evicts it as it evicts any other record, and a drop frees it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.tiers.base import Place

CONFIRM_S = 10.0
"""Shortest time between two failed reads of a record that take it out of the index, in seconds."""

FAILED_READS_MAX = 65_536


class FailedReads:
    """Reads of local records that failed, to tell a bad record from a tier that fails for a moment.

    State only: call under the store's lock.
    """

    def __init__(self) -> None:
        self._since_s: OrderedDict[tuple[int, Place], float] = OrderedDict()
        """When each record failed first; at most `FAILED_READS_MAX`, the oldest leave first."""
        self._read_at_s: dict[int, float] = {}
        """When each tier returned a record last."""

    def __len__(self) -> int:
        return len(self._since_s)

    def __contains__(self, at: tuple[int, Place]) -> bool:
        return at in self._since_s

    def note_read(self, tier: int, places: Iterable[Place], now_s: float) -> None:
        """Record that a tier returned the records at these places."""
        self._read_at_s[tier] = now_s
        if self._since_s:
            for place in places:
                self._since_s.pop((tier, place), None)

    def is_confirmed(self, tier: int, place: Place, now_s: float) -> bool:
        """Record a failed read; return whether the record has failed for good.

        True if it failed at least `CONFIRM_S` ago, too, and its tier has returned another record
        then or since.
        """
        since_s = self._since_s.setdefault((tier, place), now_s)
        if len(self._since_s) > FAILED_READS_MAX:
            self._since_s.popitem(last=False)
        if now_s - since_s < CONFIRM_S or self._read_at_s.get(tier, -math.inf) < since_s:
            return False
        self._since_s.pop((tier, place), None)
        return True


class UnlistedRecord(NamedTuple):
    """The block of a record, and the record's stored bytes."""

    namespace: Namespace
    key: bytes
    nbytes: int


class UnlistedRecords:
    """The records that the index does not list, by tier and place.

    State only: call under the store's lock.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[int, Place], UnlistedRecord] = {}
        self._namespaces: dict[Namespace, Namespace] = {}
        """One object for each namespace: a tier may have many records of it."""
        self._count = Counter[int]()
        self._nbytes = Counter[int]()
        """Records and their bytes, by tier: a status must not look at each."""

    def __contains__(self, at: tuple[int, Place]) -> bool:
        return at in self._records

    def __len__(self) -> int:
        return len(self._records)

    def add(self, tier: int, place: Place, record: UnlistedRecord) -> None:
        """Add a record that keeps its place."""
        self.remove(tier, place)
        namespace = self._namespaces.setdefault(record.namespace, record.namespace)
        self._records[tier, place] = record._replace(namespace=namespace)
        self._count[tier] += 1
        self._nbytes[tier] += record.nbytes

    def remove(self, tier: int, place: Place) -> None:
        """Remove the record at a place that its tier has taken back, if there is one."""
        if (record := self._records.pop((tier, place), None)) is not None:
            self._count[tier] -= 1
            self._nbytes[tier] -= record.nbytes

    def take(self, wanted: Callable[[Namespace, bytes], bool]) -> list[tuple[int, Place]]:
        """Remove the records whose namespace and key are wanted; return their tiers and places."""
        if not self._records:
            return []
        taken = [at for at, each in self._records.items() if wanted(each.namespace, each.key)]
        for at in taken:
            self.remove(*at)
        return taken

    def places(self, tier: int) -> Sequence[Place]:
        """Return the places of the records of one tier."""
        return [place for number, place in self._records if number == tier]

    def count(self, tier: int) -> tuple[int, int]:
        """Return the number of records of one tier, and their bytes."""
        return self._count[tier], self._nbytes[tier]
