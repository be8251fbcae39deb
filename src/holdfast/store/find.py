"""Find blocks that are independent of each other: which of them the index or a shared tier holds.

`store/lookup.py` finds the leading run of a chain instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.fairness.fair_queue import WorkItem
from holdfast.named_blocks import FoundBlocks
from holdfast.session import LOOK_S
from holdfast.store import lookup
from holdfast.store.core import LOOKUP_THREADS, StoreParts


def find(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], within_s: float
) -> FoundBlocks:
    """Return which blocks are held, asking shared tiers about those that the index does not know.

    Shared tiers are asked on threads of the store, for at most `within_s` and `LOOK_S`. A lookup
    that outlasts the limit continues, and its answer serves later callers.
    """
    began_s, table = store.clock.now(), store.table
    with table.lock:
        held = table.index.held(namespace, keys)
    unanswered = dict[str, Outcome]()
    missing = [key for key, there in zip(keys, held, strict=True) if not there]
    if missing and table.shared:
        unanswered = _ask(store, namespace, missing, min(within_s, LOOK_S))
        with table.lock:
            held = table.index.held(namespace, keys)
    found = sum(held)
    outcome = Outcome.OK if found else Outcome.MISS
    store.activity.call("lookup", outcome, store.clock.now() - began_s, found)
    return FoundBlocks(held, unanswered if found < len(keys) else {})


def _ask(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], within_s: float
) -> dict[str, Outcome]:
    """Ask shared tiers about each block; return the tiers that did not answer about all of them."""
    late = dict.fromkeys(store.shared_tiers, Outcome.LATE)
    if within_s <= 0:
        return late
    until_s, share = time.monotonic() + within_s, store.table.usage.share(namespace.domain)
    size = -(-len(keys) // LOOKUP_THREADS)
    item = WorkItem(namespace.domain, size * namespace.slot_bytes, share)
    asking = []
    try:
        for first in range(0, len(keys), size):
            look = partial(_look_each, store, namespace, keys[first : first + size], until_s)
            asking.append(store.lookups.submit(item, look))
    except RuntimeError:  # the store is closed
        return dict.fromkeys(late, Outcome.GONE)
    wait(asking, timeout=within_s)
    unanswered = dict[str, Outcome]()
    for each in asking:
        unanswered |= late if each.cancel() or not each.done() else each.result()
    return unanswered


def _look_each(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], until_s: float
) -> dict[str, Outcome]:
    unanswered = dict[str, Outcome]()
    for key in keys:
        left_s = max(0.0, until_s - time.monotonic())
        unanswered |= lookup.look(store, namespace, [key], left_s).unanswered
    return unanswered
