"""Count and forget copies below the host whose data key was, or is about to be, destroyed.

Such a copy can never be read. If the index listed it, plans would include it and miss. The copy of
a block in host memory is plain, so it stays, and the block is written again below, sealed with the
newest key.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.blocks.namespace import Namespace
from holdfast.keys.keyring import KeyRing
from holdfast.store.block_table import HOST, ROWS_AT_ONCE, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.sealing import UNKNOWN_EPOCH
from holdfast.tiers.base import SharedTier, TierGet

DELETES_MAX = 1 << 17
"""Most blocks that a shared tier is asked to delete; what is left there is a miss when read."""

DELETE_S = 20.0
"""Longest time for which shared tiers are asked to delete, in seconds."""

_DELETES_AT_ONCE = 512


class UnreadableCount:
    """Counts blocks, and by tier their copies and the bytes of these.

    `lost`: the blocks without another copy in memory or on a tier of this node alone.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self.blocks = self.lost = 0
        self._copies = Counter[int]()
        self._bytes = Counter[int]()

    def add(self, row: int, tiers: Collection[int]) -> None:
        """Count one block and its copies on these tiers; call under the lock."""
        table = self._table
        kept = set(table.index.tiers(row)) - set(tiers) - table.shared.keys()
        self.blocks += 1
        self.lost += not kept
        for tier in tiers:
            self._copies[tier] += 1
            self._bytes[tier] += table.index.stored_bytes(row, tier)

    def tiers(self) -> dict[str, dict[str, int]]:
        """Return copies and bytes by the name of the tier, fastest first."""
        return {
            self._table.tier_name(tier): {"blocks": self._copies[tier], "bytes": self._bytes[tier]}
            for tier in sorted(self._copies)
        }

    def as_data(self) -> dict[str, Any]:
        """Return all counts as plain data."""
        return {"blocks": self.blocks, "lost": self.lost, "tiers": self.tiers()}


def visit_domain(store: StoreParts, domain: bytes, visit: Callable[[int], None]) -> None:
    """Call `visit` under the lock, which is released now and then, with each row of a domain."""
    store.table.for_each_row(lambda namespace: namespace.domain == domain, visit)


def held_elsewhere(store: StoreParts, domain: bytes) -> dict[SharedTier, list[TierGet]]:
    """Return what shared tiers are known to hold of a domain, up to a limit."""
    table = store.table
    elsewhere: dict[SharedTier, list[TierGet]] = defaultdict(list)

    def note(row: int) -> None:
        for number, tier in table.shared.items():
            if table.is_on(row, number) and len(elsewhere[tier]) < DELETES_MAX:
                elsewhere[tier].append(_named(table, row, number))

    visit_domain(store, domain, note)
    return elsewhere


def count_copies(
    store: StoreParts, domain: bytes, tiers_of: Callable[[int], Collection[int]]
) -> UnreadableCount:
    """Count the blocks of a domain that have copies on the tiers which `tiers_of` names by row."""
    result = UnreadableCount(store.table)

    def count(row: int) -> None:
        if tiers := tiers_of(row):
            result.add(row, tiers)

    visit_domain(store, domain, count)
    return result


def sweep_retired(store: StoreParts, ring: KeyRing, domain: bytes) -> UnreadableCount:
    """Take copies whose data key was retired out of the index, and free their places.

    What is in memory is written again. Shared tiers delete before that what this node wrote to
    them: they would say that they hold the block already. What other nodes wrote is looked up
    again. Returns the count of this store's own copies.
    """
    table, result = store.table, UnreadableCount(store.table)
    again: list[tuple[Namespace, bytes, list[int]]] = []
    elsewhere: dict[SharedTier, list[TierGet]] = defaultdict(list)
    retired = partial(table.sealing.is_retired, domain)

    def forget(row: int) -> None:
        local = sealed_with(table, retired, row)
        if local:
            result.add(row, local)
        shared = [number for number in table.shared if table.is_on(row, number)]
        epochs = {number: table.epochs.of(row, number) for number in shared}
        tiers = [
            *local,
            *(n for n, epoch in epochs.items() if epoch == UNKNOWN_EPOCH or retired(epoch)),
        ]
        if tiers and table.is_on(row, HOST):
            again.append((table.index.namespace(row), table.index.keys[row] or b"", tiers))
        for number in tiers:
            if (tier := table.shared.get(number)) is not None:
                if epochs[number] != UNKNOWN_EPOCH and len(elsewhere[tier]) < DELETES_MAX:
                    elsewhere[tier].append(_named(table, row, number))
                table.remote_lookups.forget(row)
        for number in tiers:
            table.remove_copy(row, number)

    retirements = ring.retirements.pending().get(domain, 0)
    if not retirements:
        return result
    visit_domain(store, domain, forget)
    ring.retirements.done(domain, retirements)
    delete_elsewhere(store, elsewhere)
    for at in range(0, len(again), ROWS_AT_ONCE):
        with table.lock:
            for namespace, key, tiers in again[at : at + ROWS_AT_ONCE]:
                row = table.index.find(namespace, key)
                if row >= 0 and table.is_on(row, HOST):
                    table.queues.enqueue(row, tiers)
    if again:
        store.mover.wake()
    return result


def delete_elsewhere(store: StoreParts, elsewhere: Mapping[SharedTier, Sequence[TierGet]]) -> None:
    """Have shared tiers delete unreadable records, which they would keep; bounded in time."""
    until = store.clock.now() + DELETE_S
    for tier, batch in elsewhere.items():
        for at in range(0, len(batch), _DELETES_AT_ONCE):
            if store.clock.now() < until:
                tier.delete(batch[at : at + _DELETES_AT_ONCE])


def sealed_with(table: BlockTable, gone: Callable[[int], bool], row: int) -> list[int]:
    """Return this store's own tiers whose copy of a row is sealed with one of certain epochs."""
    return [
        tier
        for tier in range(1, table.copies.tiers)
        if tier not in table.shared and table.is_on(row, tier) and gone(table.epochs.of(row, tier))
    ]


def _named(table: BlockTable, row: int, tier: int) -> TierGet:
    """Return the delete requests for a shared tier."""
    place, key = table.copies.place(row, tier), table.index.keys[row] or b""
    return TierGet(place, key, memoryview(b""), table.index.namespace(row))
