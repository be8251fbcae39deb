"""Make a store do at a known time what it does by itself at other times, for tests.

Tiers are given by their number, as in `holdfast.testing.store_view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.store.block_table import HOST
from holdfast.store.store import Store
from holdfast.tiers.base import NOWHERE


def leave(store: Store, namespace: Namespace, keys: Sequence[bytes], *tiers: int) -> None:
    """Take blocks off tiers, by default off the host, as an eviction does, last block first.

    Copies that do not exist are left out.
    """
    table = store.table
    with table.lock:
        for row in reversed(table.index.find_all(namespace, keys)):
            if row >= 0:
                for tier in tiers or (HOST,):
                    table.remove_copy(row, tier)


def leave_all(store: Store, tier: int = HOST) -> None:
    """Take all blocks off a tier, by default off the host."""
    table = store.table
    with table.lock:
        for row in list(table.index.rows()):
            table.remove_copy(row, tier)


def write_through(store: Store, namespace: Namespace, keys: Sequence[bytes]) -> None:
    """Queue blocks for all lower tiers without them, and wake the writers."""
    table = store.table
    with table.lock:
        rows = table.index.find_all(namespace, keys)
        table.queues.write_through([row for row in rows if row >= 0])
    store.mover.wake()


def write_all_through(store: Store) -> None:
    """Queue all blocks in memory for all lower tiers without them, and wake the writers."""
    table = store.table
    with table.lock:
        rows = [row for row in table.index.rows() if table.is_on(row, HOST)]
        table.queues.write_through(rows)
    store.mover.wake()


def fail_check(store: Store, namespace: Namespace, key: bytes, tier: int, outcome: Outcome) -> None:
    """Report that a copy failed a check, as a reader that found it damaged does."""
    table = store.table
    with table.lock:
        row = table.index.find(namespace, key)
        if row >= 0 and table.index.places[tier][row] != NOWHERE:
            table.quarantine(row, tier, outcome)


def expire_leases(store: Store) -> None:
    """End every lease that has expired by the store's clock, as housekeeping does."""
    with store.table.lock:
        store.table.leases.expire(store.clock.now())


def end_leases(store: Store) -> None:
    """End every lease, expired or not."""
    with store.table.lock:
        store.table.leases.expire(float("inf"))


def release_reservations(store: Store) -> None:
    """Abort every open reservation."""
    with store.table.lock:
        numbers = store.table.leases.open_reservations()
    for number in numbers:
        store.abort(number)


@contextmanager
def pinned(store: Store, namespace: Namespace, keys: Sequence[bytes]) -> Iterator[None]:
    """Keep blocks in their slots, as a writer or scrubber that reads them does, without a lease."""
    table = store.table
    with table.lock:
        rows = [row for row in table.index.find_all(namespace, keys) if row >= 0]
        table.pin(rows)
    try:
        yield
    finally:
        with table.lock:
            table.unpin(rows)
