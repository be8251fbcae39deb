"""Read path: promote what a deadline allows into the host arena, then verify and lease it.

A fetch returns a lease on the longest leading run of verified blocks in the host arena, and the
reason why the run ends there. The caller copies the payloads to its pages, then releases the lease.
If the lease has expired by then, the caller must discard the copies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import NamedTuple, TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.fairness.work_slots import Priority
from holdfast.index.residency import Coverage
from holdfast.plan.planner import blocks_within
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.evict import slots
from holdfast.store.lookup import sources
from holdfast.store.promote import ReadBatch, TierRead
from holdfast.store.verify import verify_in_memory
from holdfast.tiers.host import HostTier

_log = logging.getLogger("holdfast.store")


class FetchResult(NamedTuple):
    """Fetched blocks: their lease, the arena place of each, and block counts by source tier.

    `reads`: the reads from lower tiers that this fetch started and that ended in time.
    """

    lease: int
    places: list[int]
    sources: dict[str, int]
    outcome: Outcome
    reason: str
    reads: tuple[TierRead, ...] = ()


Check: TypeAlias = Callable[[StoreParts, Coverage, int], Mapping[int, int]]
"""Returns, by row, the arena places of the trusted blocks among the first N of a coverage.

Only the block at the returned place is trusted, not one that replaces it later.
"""


def fetch(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], deadline_s: float
) -> FetchResult:
    """Bring the leading run of `keys` that the deadline allows into the arena, verified and leased.

    Returns within about `deadline_s`. Blocks still being read at the deadline are not returned;
    their reads complete and serve the next fetch. Reads that have not started are cancelled, unless
    another fetch waits for them.
    """
    began_s = store.clock.now()
    fetched = _fetch(store, namespace, keys, deadline_s, Priority.DEMAND, _verify_held)
    took_s = store.clock.now() - began_s
    store.activity.call("fetch", fetched.outcome, took_s, len(fetched.places))
    return fetched


def fetch_unverified(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline_s: float,
    priority: Priority = Priority.DEMAND,
) -> FetchResult:
    """Fetch like `fetch`, without verifying blocks that are already in the arena.

    The reader of the records verifies them and reports corrupt ones. The lease does not expire,
    because a peer may read slowly: the caller must release it.
    """
    began_s = store.clock.now()
    fetched = _lease_if_in_memory(store, namespace, keys)
    if fetched is None:
        fetched = _fetch(store, namespace, keys, deadline_s, priority, _trust_held)
        with store.table.lock:
            if not store.table.leases.extend(fetched.lease, math.inf):
                fetched = fetched._replace(places=[], outcome=Outcome.LATE)
    took_s = store.clock.now() - began_s
    store.activity.call("send", fetched.outcome, took_s, len(fetched.places))
    return fetched


def _lease_if_in_memory(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes]
) -> FetchResult | None:
    """Lease a chain if all or none of it is in memory; return None if it needs a plan."""
    table = store.table
    with table.lock:
        _, rows, tiers = table.index.cover(namespace, keys)
        if any(tiers) or 0 < len(rows) < len(keys):
            return None
        column = table.index.places[HOST]
        places = [column[row] for row in rows]
        lease = table.leases.lease(rows, math.inf)
        table.touch(rows)
    if not rows:
        return FetchResult(lease, places, {}, Outcome.MISS, "nothing is held")
    return FetchResult(lease, places, {HostTier.name: len(rows)}, Outcome.OK, "all is at hand")


def _fetch(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline_s: float,
    priority: Priority,
    check: Check,
) -> FetchResult:
    table, ladder = store.table, store.ladder
    late_at = store.clock.now() + deadline_s
    estimates = store.estimates.estimates(namespace.domain)
    with table.lock:
        coverage = table.index.cover(namespace, keys)
        # The caller has already decided that fetching is cheaper than recomputing.
        planned = blocks_within(coverage.tiers, namespace.record_bytes, estimates, deadline_s)
        rows = coverage.rows[: min(planned, slots(table, namespace))]
        lease = table.leases.lease(rows, late_at + store.options.lease_s)
        table.touch(rows)
        if priority is Priority.DEMAND:
            ladder.raise_priority(rows)
        loading = [table.reads[row] for row in rows if row in table.reads]
        for each in loading:
            each.waiting += 1
        promotions = ladder.reserve(namespace, rows)
    read_batches = ladder.start_reads(namespace, promotions, priority)
    verified = check(store, coverage, len(rows))
    reads = _await(store, read_batches, late_at)
    for each in loading:
        each.over.wait(max(0.0, late_at - store.clock.now()))
    with table.lock:
        for each in loading:
            each.waiting -= 1
        places = _landed(table, coverage, rows, verified)
        outcome = _outcome(store, coverage, planned, len(places), late_at)
        table.leases.shorten(lease, len(places))
    reason = f"fetch all {planned} blocks held"
    if planned < coverage.blocks:
        reason = (
            f"fetch {planned} of {coverage.blocks} blocks held; the rest would pass the deadline "
            f"of {deadline_s:.3g} s"
        )
    return FetchResult(lease, places, sources(table, coverage, len(places)), outcome, reason, reads)


def _verify_held(store: StoreParts, coverage: Coverage, blocks: int) -> Mapping[int, int]:
    """Verify the leased blocks that already lie in the arena; quarantine those that fail."""
    started = store.clock.now()
    in_memory = (
        row
        for row, tier in zip(coverage.rows[:blocks], coverage.tiers, strict=False)
        if tier == HOST
    )
    checked = {row: verify_in_memory(store.table, row) for row in in_memory}
    good = {row: copy.place for row, copy in checked.items() if copy.outcome is Outcome.OK}
    nbytes = len(good) * coverage.namespace.record_bytes
    store.estimates.verified(nbytes, store.clock.now() - started)
    return good


def _trust_held(store: StoreParts, coverage: Coverage, blocks: int) -> Mapping[int, int]:
    """Return the places of all leased blocks in the arena, unverified."""
    column = store.table.index.places[HOST]
    return {row: column[row] for row in coverage.rows[:blocks]}


def _await(
    store: StoreParts, read_batches: Sequence[ReadBatch], late_at: float
) -> tuple[TierRead, ...]:
    """Wait for the read batches until `late_at`, then cancel those that have not started.

    Returns the reads that have ended.
    """
    if not read_batches:
        return ()
    readings = [read_batch.reading for read_batch in read_batches]
    done, late = wait(readings, timeout=max(0.0, late_at - store.clock.now()))
    if late:
        store.ladder.cancel(read_batches)
    reads: list[TierRead] = []
    for reading in done:
        if reading.cancelled():
            continue
        if (error := reading.exception()) is not None:
            _log.error("reading blocks failed; the engine recomputes them", exc_info=error)
        else:
            reads.append(reading.result())
    return tuple(reads)


def _landed(
    table: BlockTable, coverage: Coverage, rows: Sequence[int], verified: Mapping[int, int]
) -> list[int]:
    """Return the places of the leading rows in the arena.

    Blocks that arrived after the coverage was taken were packed or verified by this node, unless a
    peer sent them: `table.unverified` has those.
    """
    places: list[int] = []
    for row, tier in zip(rows, coverage.tiers, strict=False):
        place = table.index.places[HOST][row]
        to_verify = tier == HOST or row in table.unverified
        if place < 0 or (to_verify and verified.get(row) != place):
            break
        places.append(place)
    return places


def _outcome(
    store: StoreParts, coverage: Coverage, planned: int, landed: int, late_at: float
) -> Outcome:
    if landed == planned:
        return Outcome.OK if landed else Outcome.MISS
    if coverage.rows[landed] in store.table.reads or store.clock.now() >= late_at:
        return Outcome.LATE
    key = store.table.index.keys[coverage.rows[landed]]
    for fault in reversed(store.table.faults):
        if fault.key == key and fault.namespace == coverage.namespace:
            return fault.outcome
    return Outcome.FULL
