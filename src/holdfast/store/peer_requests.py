"""Requests of other nodes about blocks by name: which of them are held, and that they are in use.

A peer may name as many blocks as a chain has. The store's lock is held for a few of them at a time,
with a pause between, so that lookups and fetches do not wait for the whole message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.store import indexed_blocks
from holdfast.store.core import StoreParts

KEYS_AT_ONCE = 1_024
"""Keys of one message that are handled per acquisition of the store's lock."""

PAUSE_S = 0.0002
"""Pause between two acquisitions: without it, CPython gives the lock to the same thread again."""


def held(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
    """Return one byte per key, in any order: 1 if the block is held, on whatever tier.

    Of shared tiers only those with an index in memory are asked (`indexed_blocks.note`).
    """
    indexed_blocks.note(store, namespace, keys)
    found = list[bytes]()
    for some in _parts(keys):
        with store.table.lock:
            found.append(store.table.index.held(namespace, some))
    return b"".join(found)


def use(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> int:
    """Record one use of each of these blocks that is held; return how many there are."""
    table, used = store.table, 0
    for some in _parts(list(dict.fromkeys(keys))):
        with table.lock:
            rows = table.index.find_all(namespace, some)
            held_rows = [row for row in rows if row >= 0 and table.index.fastest(row) >= 0]
            for row in held_rows:  # one by one, because they are of different chains
                table.touch([row])
        used += len(held_rows)
    return used


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for at in range(0, len(keys), KEYS_AT_ONCE):
        if at:
            time.sleep(PAUSE_S)
        yield keys[at : at + KEYS_AT_ONCE]
