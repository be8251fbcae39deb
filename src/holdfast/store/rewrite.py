"""Rewrite blocks that a tier lost, or that a shared tier holds where lookups will not find them.

A block counts as saved while the index has a place for it below the host. So the place is removed
from the index and the block is queued for the tier like a new one; until it is written, its copy
in memory is not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.store.block_table import HOST, BlockTable
from holdfast.tiers.base import NOWHERE, LosesRecords, Place, Rebalancing, takes_writes


def rewrite_misplaced(
    table: BlockTable, number: int, namespace: Namespace, keys: Sequence[bytes]
) -> bool:
    """Queue those of these blocks, just read into memory, that tier `number` calls misplaced."""
    tier = table.lower[number - 1]
    misplaced = tier.misplaced(namespace, keys) if isinstance(tier, Rebalancing) else set()
    if misplaced:
        with table.lock:
            for key in misplaced:
                _unsave(table, table.index.find(namespace, key), number)
    return bool(misplaced)


def rewrite_lost(table: BlockTable) -> list[int]:
    """Queue blocks that tiers lost and that are in memory; forget the places of the rest.

    Returns the numbers of these tiers.
    """
    found = list[int]()
    for number, tier in enumerate(table.lower, start=1):
        lost = tier.lost() if isinstance(tier, LosesRecords) else None
        if lost is not None:
            found.append(number)
            _forget_lost(table, number, lost)
    return found


def forget_copies(
    table: BlockTable, number: int, namespace: Namespace, keys: Sequence[bytes]
) -> None:
    """Forget copies that a tier has deleted, and queue for it what is in memory."""
    with table.lock:
        for row in table.index.find_all(namespace, keys):
            if row >= 0 and table.is_on(row, number):
                table.note_evicted(row, number)
                _unsave(table, row, number)


def defer_queued(table: BlockTable, number: int) -> None:
    """Defer the queued blocks of a tier that takes no writes now, as far as they are held."""
    with table.lock:
        for move in table.queues.clear(number):
            if table.index.fastest(move.row) >= 0:
                table.queues.defer(move)


def defer_stopped(table: BlockTable) -> None:
    """Defer what is queued for tiers that take no writes, whose writer may hang in a call.

    Otherwise the blocks could not be evicted from memory.
    """
    for number, tier in enumerate(table.lower, start=1):
        if table.queues.length(number) and not takes_writes(tier):
            defer_queued(table, number)


def resume(table: BlockTable) -> bool:
    """Queue deferred blocks of tiers that take writes again; return whether there were any."""
    found = False
    for number, tier in enumerate(table.lower, start=1):
        if table.queues.deferred(number) and takes_writes(tier):
            found = True
            with table.lock:
                table.queues.resume(number)
    return found


def _forget_lost(table: BlockTable, number: int, lost: Callable[[Place], bool]) -> None:
    """Forget the copies at lost places. The tier's test runs without the lock: it may be slow."""
    column, places = table.copies.places(number), set[int]()
    table.for_each_row(lambda _: True, lambda row: places.add(column[row]))
    with table.lock:
        unlisted = table.unlisted.places(number)
    for place in filter(lost, unlisted):
        with table.lock:
            table.unlisted.remove(number, place)
    gone = {place for place in places if place != NOWHERE and lost(Place(place))}

    def forget(row: int) -> None:
        if column[row] in gone:
            is_alone = number == table.durable_tier and table.index.tiers(row) == [number]
            table.durable_evicted += is_alone and table.is_durable(row)
            _unsave(table, row, number)

    if gone:
        table.for_each_row(lambda _: True, forget)


def _unsave(table: BlockTable, row: int, number: int) -> None:
    if row < 0:
        return
    in_memory = table.is_on(row, HOST)
    table.remove_copy(row, number)
    if in_memory:
        table.queues.rewrite(row, number)
    else:
        table.restore_durable(row, number)
