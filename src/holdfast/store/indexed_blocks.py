"""Blocks that shared tiers list in their own memory: noted for other nodes, which ask a target.

Another node asks a target about parts of a chain, by key, and expects the answer at once. After a
restart, the index of the target has the blocks of its own media only. What it moved to a bucket or
a shared folder is in the index of that tier (`tiers.base.Indexed`), which sends no request.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.store.core import StoreParts
from holdfast.tiers.base import NOWHERE, TierGet, is_away, segment_place


def note(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> None:
    """Add to the index, as cached lookups, the blocks that it lacks and that shared tiers list.

    `keys` are in any order. A copy that failed here a moment ago is left out.
    """
    table = store.table
    for number, tier in store.indexed_tiers.items():
        with table.lock:
            held = table.index.held(namespace, keys)
            now_s, failed = table.clock.now(), table.failed_remote
            missing = [
                key
                for key, there in zip(keys, held, strict=True)
                if not there and failed.get((number, namespace, key), now_s) is None
            ]
        if not missing or is_away(tier):
            continue
        listed = tier.indexed(namespace, missing)
        with table.lock:
            for key, there in zip(reversed(missing), reversed(listed), strict=True):
                if there:  # its parent and its depth are not known
                    row = table.index.add(namespace, key, namespace.fingerprint, 0)
                    table.publish_below(row, number, segment_place(key[:SEGMENT_BYTES]))
                    table.remote_lookups.note(row)
        table.drop_oldest_lookups()


def delete(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> None:
    """Delete blocks from the shared tiers that list them; bounded in time by the tiers."""
    for tier in store.indexed_tiers.values():
        gets = [
            TierGet(NOWHERE, key, memoryview(b""), namespace)
            for key, there in zip(keys, tier.indexed(namespace, keys), strict=True)
            if there
        ]
        if gets:
            tier.delete(gets)
