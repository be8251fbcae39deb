"""Count and forget copies below the host whose data key was, or is about to be, destroyed.

Such a copy can never be read. If the index listed it, plans would include it and miss. The copy of
a block in host memory is plain, so it stays, and the block is written again below, sealed with the
newest key.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from holdfast.blocks.namespace import Namespace
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.copy_epochs import UNKNOWN
from holdfast.store.core import StoreParts
from holdfast.tiers.base import Place, SharedTier, TierGet

DELETES_MAX = 1 << 17
"""Most blocks that a shared tier is asked to delete; what is left there is a miss when read."""

ROWS_AT_ONCE = 4_096
"""Rows for which the store's lock is held at a time: a millisecond or two."""


class UnreadableCount:
    """Counts blocks, and by tier their copies and the bytes of these."""

    def __init__(self) -> None:
        self.blocks = 0
        self._copies = Counter[int]()
        self._bytes = Counter[int]()

    def add(self, record_bytes: int, tiers: Collection[int]) -> None:
        """Count one block of which these tiers have copies."""
        self.blocks += 1
        for tier in tiers:
            self._copies[tier] += 1
            self._bytes[tier] += record_bytes

    def tiers(self, table: BlockTable) -> dict[str, dict[str, int]]:
        """Return copies and bytes by the name of the tier, fastest first."""
        return {
            table.tier_name(tier): {"blocks": self._copies[tier], "bytes": self._bytes[tier]}
            for tier in sorted(self._copies)
        }


def uncounted(table: BlockTable) -> list[str]:
    """Return the shared tiers: what other nodes wrote there with these keys is unknown here."""
    return [tier.name for tier in table.lower if isinstance(tier, SharedTier)]


def rows_of_domain(store: StoreParts, domain: bytes) -> list[int]:
    """Return the rows of a domain; call under the lock."""
    index = store.table.index
    ours = {
        number for number, namespace in enumerate(index.namespaces) if namespace.domain == domain
    }
    return [row for row in index.rows() if index.namespace_number(row) in ours]


def held_elsewhere(store: StoreParts, domain: bytes) -> dict[SharedTier, list[TierGet]]:
    """Return what shared tiers are known to hold of a domain, up to a limit."""
    table = store.table
    with table.lock:
        rows = rows_of_domain(store, domain)
        return {
            tier: [
                _named(table, row, number) for row in rows if table.index.places[number][row] >= 0
            ][:DELETES_MAX]
            for number, tier in enumerate(table.lower, start=1)
            if isinstance(tier, SharedTier)
        }


def count_domain(store: StoreParts, domain: bytes) -> UnreadableCount:
    """Count every block of a domain that the index holds, and its copies."""
    result, table = UnreadableCount(), store.table
    for row in _each(store, domain):
        places = enumerate(table.index.places)
        held = [tier for tier, column in places if column[row] >= 0]
        if held:
            result.add(table.index.namespace(row).record_bytes, held)
    return result


def count_sealed(store: StoreParts, domain: bytes, epochs: Collection[int]) -> dict[str, Any]:
    """Count the blocks that would lose copies with the data keys of these epochs.

    `lost`: those without another copy on this node. Copies on shared tiers are not counted.
    """
    result, lost, table = UnreadableCount(), 0, store.table
    for row in _each(store, domain):
        gone = _sealed_with(table, row, epochs.__contains__)
        if gone:
            result.add(table.index.namespace(row).record_bytes, gone)
            lost += not _has_other(table, row, gone)
    return {"blocks": result.blocks, "lost": lost, "tiers": result.tiers(table)}


class UnreadableSweep:
    """Removes copies that cannot be opened any more from the index, and frees their places."""

    def __init__(self, store: StoreParts, domain: bytes) -> None:
        self._store = store
        self._domain = domain
        self._again: list[tuple[Namespace, bytes, list[int]]] = []
        self._result = UnreadableCount()
        self._lost = 0
        self.elsewhere: dict[SharedTier, list[TierGet]] = {}
        """What shared tiers have of it, if this node wrote it: they can delete that."""

    def forget(self) -> None:
        """Forget the copies. What other nodes wrote to a shared tier is looked up again."""
        table = self._store.table
        retired = lambda epoch: table.sealing.is_retired(self._domain, epoch)  # noqa: E731
        for row in _each(self._store, self._domain):
            local = _sealed_with(table, row, retired)
            shared = _shared_copies(table, row, retired)
            if not local and not shared:
                continue
            if local:
                self._result.add(table.index.namespace(row).record_bytes, local)
                self._lost += not _has_other(table, row, local)
            self._forget_row(row, [*local, *shared])

    def write_again(self) -> None:
        """Queue the blocks in memory for the tiers that lost their copies."""
        table = self._store.table
        for at in range(0, len(self._again), ROWS_AT_ONCE):
            with table.lock:
                for namespace, key, tiers in self._again[at : at + ROWS_AT_ONCE]:
                    row = table.index.find(namespace, key)
                    if row >= 0 and table.is_on(row, HOST):
                        table.queues.enqueue(row, tiers)
        if self._again:
            self._store.ladder.wake()

    def report(self) -> dict[str, Any]:
        """Return what was forgotten, in the shape of `count_sealed`."""
        tiers = self._result.tiers(self._store.table)
        return {"blocks": self._result.blocks, "lost": self._lost, "tiers": tiers}

    def _forget_row(self, row: int, tiers: list[int]) -> None:
        table = self._store.table
        key = table.index.keys[row] or b""
        if table.is_on(row, HOST):
            self._again.append((table.index.namespace(row), key, tiers))
        for number in tiers:
            tier = table.lower[number - 1]
            if isinstance(tier, SharedTier) and table.epochs.of(row, number) != UNKNOWN:
                names = self.elsewhere.setdefault(tier, [])
                if len(names) < DELETES_MAX:
                    names.append(_named(table, row, number))
        if not table.shared.isdisjoint(tiers):
            table.remote_lookups.forget(row)
        for number in tiers:
            table.remove_copy(row, number)


def _each(store: StoreParts, domain: bytes) -> Iterator[int]:
    """Yield the rows of a domain under the lock, which is released now and then."""
    table = store.table
    with table.lock:
        rows = iter(rows_of_domain(store, domain))
    while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
        with table.lock:
            for row in some:
                if (
                    table.index.keys[row] is not None
                    and table.index.namespace(row).domain == domain
                ):
                    yield row


def _sealed_with(table: BlockTable, row: int, gone: Callable[[int], bool]) -> list[int]:
    """Return this store's own tiers whose copy of a row is sealed with one of certain epochs."""
    return [
        tier
        for tier in range(1, len(table.index.places))
        if tier not in table.shared and table.is_on(row, tier) and gone(table.epochs.of(row, tier))
    ]


def _shared_copies(table: BlockTable, row: int, gone: Callable[[int], bool]) -> list[int]:
    """Return the shared tiers whose copy of a row has such an epoch, or an unknown one."""
    return [
        tier
        for tier in sorted(table.shared)
        if table.is_on(row, tier)
        and ((epoch := table.epochs.of(row, tier)) == UNKNOWN or gone(epoch))
    ]


def _has_other(table: BlockTable, row: int, without: Collection[int]) -> bool:
    """Return whether this node has a copy of a row on another of its own tiers, or in memory."""
    return any(
        table.is_on(row, tier)
        for tier in range(len(table.index.places))
        if tier not in without and tier not in table.shared
    )


def _named(table: BlockTable, row: int, tier: int) -> TierGet:
    """Return the delete requests for a shared tier."""
    place, key = Place(table.index.places[tier][row]), table.index.keys[row] or b""
    return TierGet(place, key, memoryview(b""), table.index.namespace(row))
