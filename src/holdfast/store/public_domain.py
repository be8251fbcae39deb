"""The public domain: contexts that every domain may read and only a publisher writes.

For system prompts, tool descriptions and documents that all tenants share. Its blocks are never
evicted from memory, and after a restart a background thread reads them back into it, whether a
request needs them or not. So whether a block is a hit does not depend on other users and reveals
nothing about them. A reader gets a copy under its own domain's keys: the public arena is never
mapped by readers, and never holds what users save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.codec.pack import payload
from holdfast.limits import PUBLIC_BLOCKS_MAX
from holdfast.policy.retention import Retention
from holdfast.store import save
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.store.fetch import fetch, fetch_unverified
from holdfast.tiers.base import NOWHERE

_FETCH_S = 5.0
_WARM_S = 60.0


def has_public_copies(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], common: Sequence[bytes]
) -> bool:
    """Return whether the public domain holds more of a chain in memory than the reader's."""
    index, public = store.table.index, _public(store, namespace)
    with store.table.lock:
        own = index.cover(namespace, keys).blocks
        if own >= min(len(common), PUBLIC_BLOCKS_MAX):
            return False
        theirs = index.cover(public, common[: own + 1])
    return theirs.blocks > own and theirs.tiers[own] == HOST


def copy_public(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], common: Sequence[bytes]
) -> int:
    """Copy the public domain's blocks of a chain that the reader's lacks; return how many.

    `keys` names the chain in the reader's domain, `common` the same blocks in the public one.
    """
    with store.table.lock:
        generation = store.table.generation(namespace)
        own = store.table.index.cover(namespace, keys).blocks
    fetched = fetch(store, _public(store, namespace), common[:PUBLIC_BLOCKS_MAX], _FETCH_S)
    try:
        theirs = fetched.places[own : len(keys)]
        reservation = _copy(store, namespace, keys[: own + len(theirs)], theirs) if theirs else None
    finally:
        whole = store.release(fetched.lease)
    if reservation is None:
        return 0
    with store.table.lock:
        stale = generation != store.table.generation(namespace)  # dropped while it was copied
    if stale or not whole:
        save.abort(store, reservation)
        return 0
    # The public domain has it for good, so this copy need never be written anywhere.
    return save.commit(store, reservation, Retention.EPHEMERAL)


def _copy(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], theirs: Sequence[int]
) -> int:
    """Copy public slots to new ones for the last of `keys`; return the reservation to commit."""
    public, own = _public(store, namespace), len(keys) - len(theirs)
    parent = keys[own - 1] if own else namespace.fingerprint
    head = keys[own - own % store.table.segment_blocks][:SEGMENT_BYTES]
    run = save.ChainRun(keys[own:], parent, own, head)
    reserved = save.reserve(store, namespace, run)
    try:
        for place, source in zip(reserved.places, theirs, strict=True):
            if place != NOWHERE:
                record = payload(store.record(public, source), namespace.raw_bytes)
                payload(store.record(namespace, place), namespace.raw_bytes)[:] = record
    except BaseException:
        save.abort(store, reserved.ticket)
        raise
    return reserved.ticket


def warm(store: StoreParts) -> int:
    """Read the public domain's blocks into memory, after a restart or when its keys are back.

    Return how many are in memory.
    """
    if not (store.table.public and store.table.lower):
        return 0
    index = store.table.index
    namespaces: dict[Namespace, list[tuple[int, bytes]]] = defaultdict(list)

    def note(row: int) -> None:
        namespaces[index.namespace(row)].append((index.depths[row], index.keys[row] or b""))

    store.table.for_each_row(lambda namespace: namespace.domain == store.table.public, note)
    blocks = 0
    for namespace, named in namespaces.items():
        leased = fetch_unverified(store, namespace, [key for _, key in sorted(named)], _WARM_S)
        blocks += len(leased.places)
        store.release(leased.lease)
    return blocks


def _public(store: StoreParts, namespace: Namespace) -> Namespace:
    return namespace._replace(domain=store.table.public)
