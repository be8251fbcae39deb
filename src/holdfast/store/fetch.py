"""Read path: promote what a deadline allows into the host arena, then verify and lease it.

A fetch returns a lease on the longest leading run of verified blocks in the host arena, and the
reason why the run ends there. The caller copies the payloads to its pages, then releases the lease.
If the release says that the lease had expired, the caller must discard the copies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import wait
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.fairness.fair_queue import Priority
from holdfast.index.residency import Coverage
from holdfast.plan.planner import blocks_within
from holdfast.session import RECOVERING, nothing_held
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.store.evict import slots
from holdfast.store.lookup import bytes_being_read, sources, without_queued
from holdfast.store.pending_hints import PendingPrestage
from holdfast.store.promote import TierRead
from holdfast.store.record_reader import RecordForm
from holdfast.store.verify import verify_in_memory
from holdfast.tiers.base import NOWHERE, Place
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


class FetchKind(NamedTuple):
    """What a fetch is for: its priority, the form of the records, and whether it verifies them.

    `prestage`: the prestage that it is for, with which it ends; None for other fetches.
    """

    priority: Priority = Priority.DEMAND
    form: RecordForm = RecordForm.RAW
    verifies: bool = False
    prestage: PendingPrestage | None = None


DEMAND = FetchKind()


def fetch(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], deadline_s: float
) -> FetchResult:
    """Promote the leading run of `keys` that the deadline allows; verify it and lease it.

    Returns within about `deadline_s`. Blocks still being read at the deadline are not returned;
    their reads complete and serve the next fetch. Reads that have not started are cancelled, unless
    another fetch waits for them. A prestage of the chain has served its purpose: its memory is free
    for others.
    """
    began_s = store.clock.now()
    kind = FetchKind(verifies=True)
    fetched = _fetch(store, namespace, keys, deadline_s, kind)
    with store.table.lock:
        for prestage in store.pending_hints.take_staged(namespace, keys):
            store.table.leases.release(prestage)
    took_s = store.clock.now() - began_s
    store.activity.call("fetch", fetched.outcome, took_s, len(fetched.places))
    return fetched


def fetch_unverified(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline_s: float,
    kind: FetchKind = DEMAND,
) -> FetchResult:
    """Fetch like `fetch`, without verifying blocks that are already in the arena.

    The reader of the records verifies them and reports corrupt ones. The lease does not expire,
    because a peer may read slowly: the caller must release it. A prefetch does not count as a use.
    Records in memory stay in the form that they have there, which may be encoded.
    """
    table, began_s = store.table, store.clock.now()
    fetched: FetchResult | None = None
    with table.lock:
        _, rows, tiers = table.index.cover(namespace, keys)
        if not any(tiers) and len(rows) in (0, len(keys)):
            # All or none of it is in memory: there is nothing to plan.
            column = table.copies.places(HOST)
            places = [column[row] for row in rows]
            lease = table.leases.lease(rows, math.inf)
            if kind.priority is Priority.DEMAND:
                table.touch(rows)
            reason = nothing_held(recovering=store.recovery.is_running)
            fetched = FetchResult(lease, places, {}, Outcome.MISS, reason)
            if rows:
                at_hand = {HostTier.name: len(rows)}
                fetched = FetchResult(lease, places, at_hand, Outcome.OK, "all is at hand")
    if fetched is None:
        fetched = _fetch(store, namespace, keys, deadline_s, kind)
        with table.lock:
            if not table.leases.extend(fetched.lease, math.inf):
                fetched = fetched._replace(places=[], outcome=Outcome.LATE)
    took_s = store.clock.now() - began_s
    store.activity.call("send", fetched.outcome, took_s, len(fetched.places))
    return fetched


def _fetch(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline_s: float,
    kind: FetchKind,
) -> FetchResult:
    table, mover, column = store.table, store.mover, store.table.copies.places(HOST)
    late_at, estimates = store.clock.now() + deadline_s, store.estimates.estimates(namespace.domain)
    with table.lock:
        coverage = table.index.cover(namespace, keys)
        estimates = without_queued(estimates, bytes_being_read(table, coverage))
        # The caller has already decided that fetching is cheaper than recomputing.
        planned = blocks_within(coverage.tiers, namespace.slot_bytes, estimates, deadline_s)
        rows = coverage.rows[: min(planned, slots(table, namespace))]
        lease = table.leases.lease(rows, late_at + store.options.lease_s)
        if kind.priority is Priority.DEMAND:
            table.touch(rows)
            mover.raise_priority(rows)
        fillings = table.copies.fillings(HOST)
        loading = [fillings[row] for row in rows if row in fillings]
        for each in loading:
            each.waiting += 1
        promotions = mover.reserve(namespace, rows)
    read_batches = mover.start_reads(namespace, promotions, kind.priority, kind.form, kind.prestage)
    # Blocks that are read now are verified by the thread that reads them.
    if kind.verifies:
        started = store.clock.now()
        in_memory = [row for row, tier in zip(rows, coverage.tiers, strict=False) if tier == HOST]
        trusted = {row: verify_in_memory(table, row) for row in in_memory}
        good = sum(place != NOWHERE for place in trusted.values())
        store.estimates.verified(good * namespace.slot_bytes, store.clock.now() - started)
    else:
        trusted = {row: Place(column[row]) for row in rows}
    readings = [read_batch.reading for read_batch in read_batches]
    done, late = wait(readings, timeout=max(0.0, late_at - store.clock.now()))
    if late:
        mover.cancel(read_batches)
    reads: list[TierRead] = []
    for reading in done:
        if reading.cancelled():
            continue
        if (error := reading.exception()) is not None:
            _log.error("reading blocks failed; the engine recomputes them", exc_info=error)
        else:
            reads.append(reading.result())
    for each in loading:
        each.over.wait(max(0.0, late_at - store.clock.now()))
    if kind.verifies and table.encoded:  # read for another node, while this fetch waited
        late_rows = [row for row in rows if row in table.encoded]
        trusted |= {row: verify_in_memory(table, row) for row in late_rows}
    places: list[int] = []
    with table.lock:
        for each in loading:
            each.waiting -= 1
        for row, tier in zip(rows, coverage.tiers, strict=False):
            # This node packed or verified what arrived after the coverage was taken, unless a peer
            # sent it. Only the block at the trusted place counts, not one that replaced it.
            to_verify = tier == HOST or row in table.unverified
            to_verify |= kind.verifies and row in table.encoded
            if column[row] < 0 or (to_verify and trusted.get(row) != column[row]):
                break
            places.append(column[row])
        outcome = _outcome(store, coverage, planned, len(places), late_at)
        # To a peer, LATE is a failure of this target, so what would be late for it is a miss.
        if kind.verifies and coverage.blocks and outcome is Outcome.MISS:
            outcome = Outcome.LATE
        table.leases.shorten(lease, len(places))
    reason = f"fetch all {planned} blocks held"
    if planned < coverage.blocks:
        reason = (
            f"fetch {planned} of {coverage.blocks} blocks held; the rest would pass the deadline "
            f"of {deadline_s:.3g} s"
        )
    if len(places) < planned:
        reason += f"; {len(places)} arrived"
    if coverage.blocks < len(keys) and store.recovery.is_running:
        reason += f"; {RECOVERING}"
    taken = sources(table, coverage, len(places))
    return FetchResult(lease, places, taken, outcome, reason, tuple(reads))


def _outcome(
    store: StoreParts, coverage: Coverage, planned: int, landed: int, late_at: float
) -> Outcome:
    if landed == planned:
        return Outcome.OK if landed else Outcome.MISS
    if coverage.rows[landed] in store.table.copies.fillings(HOST) or store.clock.now() >= late_at:
        return Outcome.LATE
    key = store.table.index.keys[coverage.rows[landed]]
    for fault in reversed(store.table.faults):
        if fault.key == key and fault.namespace == coverage.namespace:
            return fault.outcome
    dropped = store.table.index.fastest(coverage.rows[landed]) < 0  # while it was read
    return Outcome.GONE if dropped else Outcome.FULL
