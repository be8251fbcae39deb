"""Page locks of the arenas: what engines may lock, grants, and the end of locks.

An engine locks memory for the copies of its GPU, only on grant of this store. What is reserved for
other domains never waits for an unlock: only memory beyond all reservations, and a domain's own,
can be locked.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.status import EngineLockStatus, PageLockStatus
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.tiers.chunk_locks import LockHolder

SPARE_RUNS = 2
"""Runs that stay unlocked if several domains share memory, so that each can grow at once."""


def chunk_bytes(store: StoreParts) -> int:
    """Return the bytes of a chunk, the unit of locking."""
    return store.budget.chunk_bytes


def lockable_bytes(store: StoreParts, namespace: Namespace) -> int:
    """Return how many bytes engines of a domain may lock now, with what they have locked."""
    table, usage, size = store.table, store.table.usage, store.budget.chunk_bytes
    capacity, limit = store.host_bytes, store.options.lock_bytes
    limit = capacity if limit is None else limit
    if len(table.all_hosts()) == 1:
        return min(capacity, limit) // size * size
    own, host = namespace.domain, table.host(namespace)
    reserved = {domain: usage.quota(HOST, domain).reserved_bytes for domain in table.hosts}
    free = capacity - sum(reserved.values())
    free -= SPARE_RUNS * host.run_chunks(namespace.slot_bytes) * size
    for domain, other in table.hosts.items():
        if domain != own and other.has_locks:
            free -= max(0, other.lock_usage().bound * size - reserved[domain])
    return max(0, min(reserved.get(own, 0) + free, limit)) // size * size


def is_requested(store: StoreParts) -> bool:
    """Return whether the configuration has a size of memory to lock, and not `auto` or `off`."""
    return bool(store.options.lock_bytes)


def lock(
    store: StoreParts, namespace: Namespace, chunks: Sequence[int], holder: LockHolder, most: int
) -> list[int]:
    """Count locks of chunks for a holder; return those granted.

    Without `chunks`, chooses up to `most`, those with the most bytes in use first. Populate the
    chunks before the engine locks them.
    """
    table, size = store.table, store.budget.chunk_bytes
    host = table.hosts[namespace.domain]
    table.recalls.holders[holder] = namespace.domain
    if not chunks:
        chunks = host.unlocked_in_use(holder, most)
    with table.lock:
        limit = lockable_bytes(store, namespace) // size
        return host.lock(chunks, holder, limit, table.clock.now())


def populate(store: StoreParts, namespace: Namespace, chunks: Sequence[int]) -> None:
    """Fault in chunks, on huge pages if possible; takes tens of milliseconds for each."""
    store.table.hosts[namespace.domain].populate(chunks)


def unlock(
    store: StoreParts, namespace: Namespace, chunks: Sequence[int], holder: LockHolder
) -> int:
    """End a holder's locks of chunks; return how many it had."""
    return store.table.hosts[namespace.domain].unlock(chunks, holder, store.table.clock.now())


def leave(store: StoreParts, namespace: Namespace, holder: LockHolder) -> None:
    """End all locks of a holder, whose session is over."""
    unlock(store, namespace, locked_by(store, namespace, holder), holder)
    store.table.recalls.holders.pop(holder, None)


def status(store: StoreParts) -> PageLockStatus:
    """Return what each engine has locked, and how recalls ended."""
    table, names = store.table, {domain: name for name, domain in store.domain_ids.items()}
    locked = {domain: host.lock_holders() for domain, host in table.hosts.items()}
    engines = [
        EngineLockStatus(
            holder.engine,
            names.get(domain, domain.hex()),
            locked[domain].get(holder, 0) * store.budget.chunk_bytes,
            holder.failure,
        )
        for holder, domain in list(table.recalls.holders.items())
    ]
    return PageLockStatus(engines, dict(table.recalls.outcomes))


def locked_by(store: StoreParts, namespace: Namespace, holder: LockHolder) -> list[int]:
    """Return the chunks that a holder has locked."""
    return store.table.hosts[namespace.domain].locked_by(holder)
