"""Inspect a store: what it holds and how full it is; drop blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError
from holdfast.status import (
    AdmissionStatus,
    DomainStatus,
    FailedChecks,
    FaultStatus,
    NodeStatus,
)
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.tiers.reported import description, shared_status, tier_status

EVERYTHING = "*"


def status(store: StoreParts) -> NodeStatus:
    """Return usage, counters and the state of recovery."""
    table = store.table
    with table.lock:
        tiers = [*map(tier_status, table.all_hosts()), *map(tier_status, table.lower)]
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
                quota_bytes=store.quotas(domain),
            )
            for domain in dict.fromkeys([*names, *seen])
        ]
        return NodeStatus(
            incarnation=store.incarnation,
            blocks=len(table.index),
            tiers=tiers,
            admission=[
                AdmissionStatus(table.tier_name(tier), figures)
                for tier, rule in enumerate(table.rules.of, start=1)
                if (figures := rule.figures())
            ],
            domains=domains,
            evictions={table.tier_name(tier): n for tier, n in table.evictions.items()},
            failed_checks=[
                FailedChecks(table.tier_name(tier), str(outcome), n)
                for (tier, outcome), n in table.failed_checks.items()
            ],
            activity=store.activity.status(),
            uptime_s=store.clock.now() - store.opened_at_s,
            leases=len(table.leases),
            tickets=table.leases.reservations,
            waiting_to_write=table.unwritten(),
            hints=store.pending_hints.status(store.clock.now()),
            recovered_blocks=store.recovery.blocks,
            recovery_s=store.recovery.seconds,
            recovered=store.recovery.wait(0),
            audit=store.audit.counts(),
            shared={tier.name: shared_status(tier) for tier in table.shared.values()},
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


def listing(store: StoreParts) -> list[dict[str, Any]]:
    """Return one entry per namespace, with blocks and bytes per tier; requests go on."""
    table = store.table
    blocks: Counter[Namespace] = Counter()
    copies: defaultdict[Namespace, Counter[int]] = defaultdict(Counter)

    def count(row: int) -> None:
        namespace = table.index.namespace(row)
        blocks[namespace] += 1
        copies[namespace].update(table.index.tiers(row))

    table.for_each_row(lambda _: True, count)
    names = {domain: name for name, domain in store.domain_ids.items()}
    return [
        {
            "fingerprint": namespace.fingerprint.hex(),
            "domain": names.get(namespace.domain, namespace.domain.hex()),
            "payload_bytes": namespace.payload_bytes,
            "block_tokens": namespace.block_tokens,
            "blocks": count,
            "tiers": {
                table.tier_name(tier): {"blocks": held, "bytes": held * namespace.record_bytes}
                for tier, held in sorted(copies[namespace].items())
            },
        }
        for namespace, count in blocks.items()
    ]


def shared(store: StoreParts) -> dict[str, Any]:
    """Return what each shared tier reports of its remote side; asks over the network, bounded."""
    return {"shared": [description(tier) for tier in store.table.shared.values()]}


def would_drop(store: StoreParts, fingerprint: str) -> dict[str, Any]:
    """Return the blocks that `drop` would forget, and the tiers whose copies would stay."""
    wanted = [
        entry for entry in listing(store) if fingerprint in (EVERYTHING, entry["fingerprint"])
    ]
    return {"blocks": wanted, "uncounted": store.shared_tiers}


def drop(store: StoreParts, fingerprint: str) -> dict[str, Any]:
    """Forget the blocks of one fingerprint (hex), or all with `*`, on this node's own tiers.

    A leased copy goes with its last reader. Shared tiers keep theirs: a later lookup finds them
    again. Raise BlockError for an empty fingerprint.
    """
    if not fingerprint:
        raise BlockError(
            "drop: the fingerprint is empty; name one as `listing` does (32 hex digits), or drop "
            f"everything with {EVERYTHING!r}"
        )

    dropped = 0

    def forget_row(row: int) -> None:
        nonlocal dropped
        dropped += 1
        store.table.remove_copies(row)

    store.table.for_each_row(
        lambda namespace: fingerprint in (EVERYTHING, namespace.fingerprint.hex()), forget_row
    )
    return {"dropped": dropped}


def forget(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> int:
    """Forget blocks by name; return how many were held."""
    table, forgotten = store.table, 0
    with table.lock:
        for key in keys:
            row = table.index.find(namespace, key)
            if row >= 0 and table.index.fastest(row) >= 0:
                forgotten += 1
                table.remove_copies(row)
    return forgotten
