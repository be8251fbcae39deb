"""Inspect a store: what it holds and how full it is; drop blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError
from holdfast.limits import LIST_ROWS_MAX
from holdfast.session import KeyPage
from holdfast.status import (
    AdmissionStatus,
    DomainStatus,
    FailedChecks,
    FaultStatus,
    MoveStatus,
    NodeStatus,
    TierStatus,
)
from holdfast.store import indexed_blocks
from holdfast.store.block_table import HOST, ROWS_AT_ONCE, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.drops import EVERYTHING
from holdfast.store.usage import DomainUsage
from holdfast.tiers.base import RecordsFrees, medium_of
from holdfast.tiers.reported import description, shared_status, tier_status


def status(store: StoreParts) -> NodeStatus:
    """Return usage, counters and the state of recovery."""
    table = store.table
    lower = [tier_status(tier) for tier in table.lower]  # a tier of another package may be slow
    shared_tiers = {tier.name: shared_status(tier) for tier in table.shared.values()}
    with table.lock:
        tiers = [*map(tier_status, table.all_hosts()), *_with_unlisted(table, lower)]
        usage, names = table.usage, {domain: name for name, domain in store.domain_ids.items()}
        seen = [domain for used in usage.used for domain in used]
        domains = [
            DomainStatus(
                domain=names.get(domain, domain.hex()),
                configured=domain in names,
                unreadable=table.sealing.unreadable[domain],
                share=usage.share(domain),
                reserved_bytes=usage.quota(HOST, domain).reserved_bytes,
                used_bytes={
                    table.tier_name(tier): used[domain] for tier, used in enumerate(usage.used)
                },
                raw_bytes={
                    table.tier_name(tier): usage.raw_bytes(tier, domain)
                    for tier in range(len(usage.used))
                },
                quota_bytes=store.quotas(domain),
                **_locked(store, domain),
            )
            for domain in dict.fromkeys([*names, *seen])
        ]
        return NodeStatus(
            incarnation=store.incarnation,
            blocks=len(table.index),
            tiers=tiers,
            codecs=[
                codec.status(*_held(usage, tier))
                for tier, codec in enumerate(table.codecs, start=1)
            ],
            quantise=store.quantise.status(),
            durable=store.durable_blocks.status(store.clock.now()),
            admission=[
                AdmissionStatus(table.tier_name(tier), figures)
                for tier, rule in enumerate(table.rules.of, start=1)
                if (figures := rule.figures())
            ],
            domains=domains,
            evictions={table.tier_name(tier): n for tier, n in table.evictions.items()},
            moves=_moves(table),
            dropped_unmoved={
                table.tier_name(tier): n for tier, n in table.movement.dropped_unmoved.items()
            },
            failed_checks=[
                FailedChecks(table.tier_name(tier), str(outcome), n)
                for (tier, outcome), n in table.failed_checks.items()
            ],
            activity=store.activity.status(),
            uptime_s=store.clock.now() - store.opened_at_s,
            leases=len(table.leases),
            tickets=table.leases.reservations,
            partial_blocks=len(store.partial_blocks),
            abandoned_blocks=store.partial_blocks.abandoned,
            waiting_to_write=table.unwritten(),
            hints=store.pending_hints.status(store.clock.now()),
            recovered_blocks=store.recovery.blocks,
            recovery_s=store.recovery.seconds,
            recovered=store.recovery.wait(0),
            audit=store.audit.counts(),
            audit_lost=store.audit.lost(),
            shared=shared_tiers,
            faults=[
                FaultStatus(
                    key=fault.key.hex(),
                    fingerprint=fault.namespace.fingerprint.hex(),
                    domain=fault.namespace.domain.hex(),
                    tier=fault.tier,
                    outcome=str(fault.outcome),
                )
                for fault in table.faults
            ],
        )


def _with_unlisted(table: BlockTable, lower: Sequence[TierStatus]) -> list[TierStatus]:
    """Return the status of the lower tiers with the records that the index does not list."""
    counted = [table.unlisted.count(number) for number in range(1, len(lower) + 1)]
    return [
        msgspec.structs.replace(tier, unlisted_records=records, unlisted_bytes=nbytes)
        for tier, (records, nbytes) in zip(lower, counted, strict=True)
    ]


def _moves(table: BlockTable) -> list[MoveStatus]:
    """Return the copies made so far, by source, target and reason."""
    movement, name = table.movement, table.tier_name
    return [
        MoveStatus(name(source), name(target), reason.value, blocks, movement.moved_bytes[move])
        for move, blocks in movement.moved.items()
        for source, target, reason in [move]
    ]


def _locked(store: StoreParts, domain: bytes) -> dict[str, int]:
    """Return the bytes of a domain that engines have page-locked, and those of kept chunks."""
    host = store.table.hosts.get(domain)
    if host is None or not host.has_locks:
        return {}
    usage, size = host.lock_usage(), store.budget.chunk_bytes
    return {"locked_bytes": usage.locked * size, "kept_bytes": usage.kept * size}


def _held(usage: DomainUsage, tier: int) -> tuple[int, int]:
    """Return the raw and the stored bytes of all domains on a tier."""
    stored = usage.used[tier]
    return sum(usage.raw_bytes(tier, domain) for domain in stored), stored.total()


def listing(store: StoreParts) -> list[dict[str, Any]]:
    """Return one entry per namespace, with blocks and bytes per tier; requests go on.

    `bytes` are those that the copies take on the tier, `raw_bytes` those of the same blocks in
    memory.
    """
    table = store.table
    blocks: Counter[Namespace] = Counter()
    copies: defaultdict[Namespace, Counter[int]] = defaultdict(Counter)
    stored: defaultdict[Namespace, Counter[int]] = defaultdict(Counter)

    def count(row: int) -> None:
        namespace = table.index.namespace(row)
        blocks[namespace] += 1
        for tier in table.index.tiers(row):
            copies[namespace][tier] += 1
            stored[namespace][tier] += table.index.stored_bytes(row, tier)

    table.for_each_row(lambda _: True, count)
    names = {domain: name for name, domain in store.domain_ids.items()}
    return [
        {
            "fingerprint": namespace.fingerprint.hex(),
            "domain": names.get(namespace.domain, namespace.domain.hex()),
            "raw_bytes": namespace.raw_bytes,
            "block_tokens": namespace.block_tokens,
            "blocks": count,
            "tiers": {
                table.tier_name(tier): {
                    "blocks": held,
                    "bytes": stored[namespace][tier],
                    "raw_bytes": held * namespace.slot_bytes,
                }
                for tier, held in sorted(copies[namespace].items())
            },
        }
        for namespace, count in blocks.items()
    ]


def shared(store: StoreParts) -> dict[str, Any]:
    """Return what each shared tier reports of its remote side; asks over the network, bounded."""
    return {"shared": [description(tier) for tier in store.table.shared.values()]}


def would_drop(store: StoreParts, fingerprint: str) -> dict[str, Any]:
    """Return the blocks that `drop` would forget, and the tiers whose copies would stay.

    `complete` is False while recovery runs: it may find more blocks.
    """
    wanted = [
        entry for entry in listing(store) if fingerprint in (EVERYTHING, entry["fingerprint"])
    ]
    complete = store.recovery.wait(0)
    return {"blocks": wanted, "uncounted": store.shared_tiers, "complete": complete}


def drop(store: StoreParts, fingerprint: str) -> dict[str, Any]:
    """Forget the blocks of one fingerprint (hex), or all with `*`, on this node's own tiers.

    Reads and saves that began before are not published, pins end, and blocks that recovery finds
    later are freed. `dropped` counts the blocks that were held here; `complete` is False while
    recovery runs and may free more. Dropped blocks stay away after a restart, also after a crash:
    see `DropsFile`. A leased copy goes with its last reader. Shared tiers keep theirs: a later
    lookup finds them again. Raise BlockError for an empty fingerprint.
    """
    if not fingerprint:
        raise BlockError(
            "drop: the fingerprint is empty; name one as `listing` does (32 hex digits), or drop "
            f"everything with {EVERYTHING!r}"
        )

    def wanted(namespace: Namespace) -> bool:
        return fingerprint in (EVERYTHING, namespace.fingerprint.hex())

    table, dropped = store.table, 0

    def forget_row(row: int) -> None:
        nonlocal dropped
        dropped += not table.shared.keys() >= set(table.index.tiers(row))
        table.remove_copies(row)

    with table.lock:
        table.drops.begin(fingerprint)
        table.durable_marks.remove_all(wanted)
        for lease in store.pending_hints.unpin_all(wanted):
            table.leases.release(lease)
    try:
        store.drops_file.add(fingerprint)
        table.for_each_row(wanted, forget_row)
        with table.lock:
            table.free_unlisted(lambda namespace, _: wanted(namespace))
    finally:
        with table.lock:
            table.drops.end(fingerprint)
            store.drops_file.ended(store.mover.batches()[0])
    complete = store.recovery.wait(0)
    finish_drops(store)
    return {"dropped": dropped, "complete": complete}


def load_drops(store: StoreParts) -> None:
    """Apply the drops that the tiers had not recorded when the last process ended."""
    for fingerprint in store.drops_file.load():
        with store.table.lock:
            store.table.drops.begin(fingerprint)
            store.table.drops.end(fingerprint)


def finish_drops(store: StoreParts) -> None:
    """Have the tiers record which places drops freed, if nothing can bring a dropped block back."""
    if not len(store.drops_file) or not store.recovery.is_complete:
        return
    with store.table.lock:
        if store.table.drops.is_running():
            return
        last = store.table.drops.last
    tiers = [tier for tier in store.table.lower if isinstance(tier, RecordsFrees)]
    ended = store.mover.batches()[1]

    def record() -> bool:
        recorded = [_record_frees(store, tier, last) for tier in tiers]
        return all(recorded)

    store.drops_file.finish(ended, record)


def _record_frees(store: StoreParts, tier: RecordsFrees, last: int) -> bool:
    """Have a tier record the places freed by the drops up to number `last`; False if it fails."""
    before = medium_of(tier)
    is_recorded = tier.record_frees()
    if is_recorded and before and before == medium_of(tier):
        with store.table.lock:
            store.table.drops.note_recorded(before, last)
    return is_recorded


def list_keys(store: StoreParts, namespace: Namespace, start: int, limit: int) -> KeyPage:
    """Return a page of the keys of a namespace; see `holdfast.session.Session.list_keys`.

    `start` is a row of the index. Requests go on meanwhile.
    """
    table, keys = store.table, store.table.index.keys
    found, at = list[bytes](), start
    while at < start + LIST_ROWS_MAX:
        with table.lock:
            end = max(at, min(at + ROWS_AT_ONCE, len(keys)))
            for row in range(at, end):
                if (key := keys[row]) is None or not _lists(store, namespace, row):
                    continue
                found.append(key)
                if len(found) == limit:
                    return KeyPage(found, row + 1)
            if end >= len(keys):
                return KeyPage(found, 0)
        at = end
    return KeyPage(found, at)


def _lists(store: StoreParts, namespace: Namespace, row: int) -> bool:
    """Return whether a row is of a namespace, and on a tier of this node alone."""
    table = store.table
    if table.index.namespace(row) != namespace:
        return False
    return not table.shared.keys() >= set(table.index.tiers(row))


def forget(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> int:
    """Forget blocks by name; return how many were held.

    Shared tiers with an index in memory delete them, because they list them to other nodes.
    """
    table, forgotten = store.table, 0
    indexed_blocks.note(store, namespace, keys)
    with table.lock:
        table.durable_marks.remove(namespace, keys)
        for key in keys:
            row = table.index.find(namespace, key)
            if row >= 0 and table.index.fastest(row) >= 0:
                forgotten += 1
                table.remove_copies(row)
        named = frozenset(keys)
        table.free_unlisted(lambda of, key: of == namespace and key in named)
    indexed_blocks.delete(store, namespace, keys)
    return forgotten
