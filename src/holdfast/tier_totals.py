"""Sums over the tiers of one name in a status: usage, counters and capacities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from holdfast.status import NodeStatus, TierStatus


def tier_totals(tiers: Iterable[TierStatus]) -> dict[str, TierStatus]:
    """Return the usage of each tier, by name; the host tiers of all domains share one memory."""
    totals: dict[str, TierStatus] = {}
    for one in tiers:
        before = totals.get(one.tier)
        if before is None:
            totals[one.tier] = one
            continue
        totals[one.tier] = TierStatus(
            tier=one.tier,
            capacity_bytes=max(before.capacity_bytes, one.capacity_bytes),
            used_bytes=before.used_bytes + one.used_bytes,
            records=before.records + one.records,
            read_bytes=before.read_bytes + one.read_bytes,
            written_bytes=before.written_bytes + one.written_bytes,
            failures=before.failures + one.failures,
            writes_stopped=before.writes_stopped or one.writes_stopped,
            rebuilt=before.rebuilt + one.rebuilt,
            parity_bytes=before.parity_bytes + one.parity_bytes,
            away=before.away or one.away,
            replaced=before.replaced or one.replaced,
            losses=before.losses + one.losses,
            requests=dict(Counter(before.requests) + Counter(one.requests)),
            request_dollars=before.request_dollars + one.request_dollars,
            unlisted_records=before.unlisted_records + one.unlisted_records,
            unlisted_bytes=before.unlisted_bytes + one.unlisted_bytes,
            trouble=before.trouble or one.trouble,
        )
    return totals


def capacities(status: NodeStatus) -> dict[str, int]:
    """Return the capacity of each tier that has one, in bytes."""
    totals = tier_totals(status.tiers)
    return {tier: one.capacity_bytes for tier, one in totals.items() if one.capacity_bytes}
