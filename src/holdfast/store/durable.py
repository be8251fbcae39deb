"""Durable contexts: wait until blocks are on the durable tier and its medium has flushed them.

A save returns when its blocks are in memory; tiers below get them later. What must not be lost is
saved as `Retention.DURABLE` and then waited for with `sync`, as a file is written and then flushed
with `fsync`. A block that `sync` counted survives a crash of the process, of the machine, and a
loss of power, until the tier evicts it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from itertools import compress
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError, Outcome
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.session import SECONDS_MAX, check_seconds
from holdfast.store.awaited_copies import AwaitedCopies
from holdfast.store.block_table import ROWS_AT_ONCE
from holdfast.store.core import StoreParts
from holdfast.store.durable_marks import MarkedBlocks
from holdfast.store.inspect import finish_drops
from holdfast.store.lookup import ask_in_time
from holdfast.store.rewrite import forget_copies
from holdfast.tiers.base import (
    NOWHERE,
    AnsweringTier,
    Expiring,
    Flushable,
    KeepsDurable,
    LocalTier,
    SharedTier,
    VerifiesRecovered,
)

_log = logging.getLogger("holdfast.store")

_LOOK_AGAIN_S = 0.25
"""Longest time in seconds between two looks at the blocks that a `sync` waits for."""

_QUEUE_AGAIN_S = 1.0
"""Interval in seconds at which a block is queued again during a `sync`: its write or flush has
failed, or the tier has evicted it before it was flushed."""

_FLUSH_AFTER_S = 1.0
"""Time in seconds for which a flush is awaited after the deadline, so that a `sync` with a short
deadline gets its answer from a drive that works."""


def sync(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline_s: float,
    *,
    saving: bool = False,
) -> int:
    """Write what is held of a chain to the durable tier; return how many leading blocks it keeps.

    Blocks that the tier lacks are copied to it from whichever tier holds them, whatever its
    admission rule says; the domain's write budget still applies. Shared tiers are asked about
    blocks that are not held here. `saving`: instead, blocks that are not held are waited for,
    because an engine is saving the chain as durable, and those that were held before are durable
    from now on. Returns when all are written and flushed, or at the deadline; then a flush under
    way is awaited for `_FLUSH_AFTER_S` more, and none of its blocks counts if it has not returned.
    Blocks that the tier evicts during the flush are written again, and the next flush is awaited;
    so are those that are not safe after a flush that failed, see `tiers.base.Flushable`. Blocks of
    an earlier process that the tier must read first, and had no time for, do not count. When the
    store is closed, what is queued for the tier is still awaited.

    Raises BlockError if the store has no tier that can flush.
    """
    check_seconds("sync: deadline_s", deadline_s, SECONDS_MAX)
    began_s, table = store.clock.now(), store.table
    if not table.durable_tier:
        raise BlockError("sync: no tier of this store can flush its records; add a disk tier")
    until_s = began_s + deadline_s
    with table.lock:
        store.durable_blocks.begin_sync(until_s)
    try:
        kept = _sync(store, namespace, keys, until_s, saving=saving)
    finally:
        with table.lock:
            store.durable_blocks.end_sync(until_s)
    if not kept and _may_be_dropped(store, namespace):
        _log.warning(
            "sync: no block of fingerprint %s is acknowledged as durable: a drop of its blocks is "
            "not recorded by every tier yet, so a restart would repeat it; see `holdfast inspect` "
            "for a tier that is away, and this log for a recovery that failed",
            namespace.fingerprint.hex(),
        )
    outcome = Outcome.OK if kept == len(keys) else Outcome.LATE
    store.activity.call("sync", outcome, store.clock.now() - began_s, kept)
    return kept


def _sync(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], until_s: float, *, saving: bool
) -> int:
    """Return how many leading blocks the durable tier keeps, once all are there or time is over."""
    table = store.table
    if not saving:
        left_s = max(0.0, until_s - store.clock.now())
        ask_in_time(store, namespace, keys, left_s, Priority.PREFETCH)
    while True:
        flushed = _flush_copies(store, namespace, keys, until_s, saving=saving)
        may_come = saving or store.recovery.is_running
        with table.lock:  # the tier may have evicted some during the flush
            found = _leading(store, namespace, keys)
        expected = len(keys) if may_come else len(found.held)
        kept = min(flushed, found.kept)
        left_s = until_s - store.clock.now()
        if kept == expected or left_s <= 0 or store.gone:
            return kept
        time.sleep(min(left_s, _QUEUE_AGAIN_S))


def _flush_copies(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], until_s: float, *, saving: bool
) -> int:
    """Wait for copies on the durable tier and flush them; return how many leading ones are safe."""
    table = store.table
    tier = table.lower[table.durable_tier - 1]
    kept = _await_copies(store, namespace, keys, until_s, saving=saving)
    if saving:
        with table.lock:
            held = _leading(store, namespace, keys).held
            store.durable_blocks.mark(namespace, held, store.clock.now())
    left_s = max(0.0, until_s - store.clock.now())
    if kept and isinstance(tier, Expiring) and not tier.refresh(namespace, keys[:kept], left_s):
        return 0
    if (
        kept
        and isinstance(tier, AnsweringTier)
        and _forget_lost(store, tier, namespace, keys[:kept])
    ):
        kept = _await_copies(store, namespace, keys, until_s, saving=saving)
    if kept and isinstance(tier, KeepsDurable):
        kept = _keep_marked(store, tier, namespace, keys[:kept], until_s)
    flush = partial(_flush, store, namespace, keys[:kept], until_s)
    kept = _in_time(store, namespace, flush, until_s)
    if kept and isinstance(tier, SharedTier):  # another node may have deleted some
        kept = tier.held(namespace, keys[:kept], 0, max(0.0, until_s - store.clock.now()))
    return kept


def _keep_marked(
    store: StoreParts, tier: KeepsDurable, namespace: Namespace, keys: Sequence[bytes], by_s: float
) -> int:
    """Have the durable tier keep marked blocks when it makes room.

    Returns how many leading blocks it keeps, or are not marked. Queues those that it can keep only
    after another write. `by_s`: when the tier must have answered.
    """
    table = store.table
    with table.lock:
        marked = [key for key in keys if table.durable_marks.holds(namespace, key)]
        until_s = table.durable_marks.until_s(namespace, marked)
    if not marked:
        return len(keys)
    kept = tier.keep_durable(namespace, marked, until_s, max(0.0, by_s - store.clock.now()))
    if kept is None:
        return 0
    again = {key for key, is_kept in zip(marked, kept, strict=True) if not is_kept}
    if again:
        with table.lock:
            rows = table.index.find_all(namespace, [*again])
            store.durable_blocks.renew(row for row in rows if row >= 0)
        store.mover.hurry()
    return next((at for at, key in enumerate(keys) if key in again), len(keys))


def _in_time(
    store: StoreParts, namespace: Namespace, flush: Callable[[], int], until_s: float
) -> int:
    """Return what a flush returns, 0 if it does not return in time: a drive may hang.

    It runs on a thread of its own, and ends there.
    """
    domain = namespace.domain
    try:
        flushing = store.flushes.submit(WorkItem(domain, share=store.share(domain)), flush)
    except RuntimeError:  # no thread can be started, as at exit
        return flush()
    try:
        return flushing.result(max(0.0, until_s - store.clock.now()) + _FLUSH_AFTER_S)
    except (TimeoutError, CancelledError):
        flushing.cancel()
        return 0


def _flush(store: StoreParts, namespace: Namespace, keys: Sequence[bytes], until_s: float) -> int:
    """Flush blocks of the durable tier, and save marks; return how many leading ones are safe."""
    table, kept = store.table, len(keys)
    tier = table.lower[table.durable_tier - 1]
    if kept and isinstance(tier, Flushable):
        with table.lock:
            rows = table.index.find_all(namespace, keys)
            places = [
                table.copies.place(row, table.durable_tier) if row >= 0 else NOWHERE for row in rows
            ]
        if isinstance(tier, VerifiesRecovered):
            kept = tier.verify_recovered(places, max(0.0, until_s - store.clock.now()))
            rows, places = rows[:kept], places[:kept]
        safe = tier.flush(places) if kept else []
        with table.lock:
            rows = table.index.find_all(namespace, keys[:kept])
            kept = store.durable_blocks.note_flushed(rows, places, safe, store.clock.now())
    if kept and _may_be_dropped(store, namespace):
        finish_drops(store)
        kept = 0 if _may_be_dropped(store, namespace) else kept
    save_marks(store)
    return kept


def _may_be_dropped(store: StoreParts, namespace: Namespace) -> bool:
    """Return whether a restart now would drop blocks of a namespace from the durable tier.

    A drop leaves the copies on shared tiers.
    """
    tier = store.table.lower[store.table.durable_tier - 1]
    return isinstance(tier, LocalTier) and store.drops_file.names(namespace)


def load_marks(store: StoreParts) -> None:
    """Add the marks of an earlier process to those of this one."""
    runs = store.marks_file.load()
    with store.table.lock:
        store.table.durable_marks.restore(runs)


def await_marked(store: StoreParts) -> None:
    """Have marked blocks that the durable tier lacks, but another tier holds, copied to it.

    After a restart, and each time when the list of waiting blocks, which was full, has room again.
    Takes the lock for a limited number of blocks at a time.
    """
    table = store.table
    with table.lock:
        if not store.durable_blocks.has_room_again():
            return
        names = table.durable_marks.names()
    for at in range(0, len(names), ROWS_AT_ONCE):
        with table.lock:
            rows = (table.index.find(*name) for name in names[at : at + ROWS_AT_ONCE])
            held = [row for row in rows if row >= 0 and table.index.fastest(row) >= 0]
            if not store.durable_blocks.wait(held, store.clock.now()):
                return


def save_marks(store: StoreParts) -> None:
    """Write the marks that have changed to their file. A failure is logged, and tried again."""
    marks, lock = store.table.durable_marks, store.table.lock

    def all_marks() -> list[MarkedBlocks]:
        with lock:
            marks.expire()
            return marks.all()

    with lock:
        marks.expire_if_due()
        is_clock_set, changes = marks.take_clock_change(), marks.take_unsaved()
    if is_clock_set:
        store.marks_file.rewrite()
    store.marks_file.save(changes, all_marks)


def _await_copies(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], until_s: float, *, saving: bool
) -> int:
    """Have blocks copied to the durable tier until this time; return how many leading ones it has.

    Ends sooner if it has all that may come. Blocks that are old there are written again.
    """
    again_s = store.clock.now() + _QUEUE_AGAIN_S
    with AwaitedCopies(store, namespace, keys, _aged(store, namespace, keys)) as copies:
        if not store.gone:
            copies.queue_all()
        while True:
            now_s = store.clock.now()
            may_come = saving or store.recovery.is_running
            if copies.look():
                may_come = True
                store.mover.hurry()
            if now_s >= again_s and not store.gone:
                copies.queue_some()
                again_s = now_s + _QUEUE_AGAIN_S
            left_s = until_s - now_s
            is_over = bool(store.gone) and not store.table.unwritten()
            if copies.kept == len(keys) or not may_come or left_s <= 0 or is_over:
                return copies.kept
            has_changed = copies.changed.wait(min(left_s, _LOOK_AGAIN_S))
            copies.changed.clear()
            if copies.aged and not has_changed:
                copies.aged = _aged(store, namespace, keys)


def _aged(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
    """Return the keys of the blocks that the durable tier deletes by age before new ones."""
    tier = store.table.lower[store.table.durable_tier - 1]
    if not isinstance(tier, Expiring):
        return set()
    return set(compress(keys, tier.aged(namespace, keys)))


def _forget_lost(
    store: StoreParts, tier: AnsweringTier, namespace: Namespace, keys: Sequence[bytes]
) -> bool:
    """Forget copies that the durable tier no longer has; return whether there were any.

    They are copied to it again from wherever they are held.
    """
    answer = tier.ask(namespace, keys, 0)
    if answer.outcome is not Outcome.OK or answer.blocks == len(keys):
        return False
    forget_copies(store.table, store.table.durable_tier, namespace, keys[answer.blocks :])
    return True


class _Leading(NamedTuple):
    """Leading blocks of a chain that a tier holds, and how many of them the durable tier keeps."""

    held: list[int]
    kept: int


def _leading(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> _Leading:
    """Return the state of a chain's leading blocks. Call under the lock."""
    table, held, kept = store.table, list[int](), 0
    for row in table.index.find_all(namespace, keys):
        if row < 0 or table.index.fastest(row) < 0:
            break
        if kept == len(held) and table.copies.is_on(row, table.durable_tier):
            kept += not store.durable_blocks.is_unsafe(row)
        held.append(row)
    return _Leading(held, kept)
