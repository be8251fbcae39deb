"""Look into a store: what is held, how full it is; and drop it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.blocks.world import World
from holdfast.store.core import Core
from holdfast.store.states import HOST
from holdfast.tiers.base import Shared

EVERYTHING = "*"

_ROWS_AT_ONCE = 4_096
"""Rows looked at in one go: the lock that serving needs is held for a millisecond or two."""


def status(store: Core) -> dict[str, Any]:
    """Return fill, speed, counters and recovery as plain data."""
    states = store.states
    with states.lock:
        tiers = [("host", host) for host in states.all_hosts()]
        usages = [
            (name, tier.usage()) for name, tier in [*tiers, *((t.name, t) for t in states.lower)]
        ]
        return {
            "incarnation": store.incarnation,
            "blocks": len(states.index),
            "tiers": [{"tier": name, **msgspec.to_builtins(usage)} for name, usage in usages],
            "admission": [
                {"tier": states.tier_name(tier), **figures}
                for tier, rule in enumerate(states.rules.of, start=1)
                if (figures := rule.figures())
            ],
            "domains": _domains(store),
            "leases": len(states.leases),
            "tickets": len(states.tickets),
            "waiting_to_write": states.unwritten(),
            "hints": store.wishes.status(store.clock.now()),
            "recovered_blocks": store.recovery.blocks,
            "recovery_s": store.recovery.seconds,
            "faults": [
                {"key": fault.key.hex(), "tier": fault.tier, "outcome": str(fault.outcome)}
                for fault in states.faults
            ],
        }


def _domains(store: Core) -> list[dict[str, Any]]:
    """Return what each domain holds on each tier, and may hold; call under the lock."""
    fill, names = store.states.fill, {store.domain(name)[1]: name for name in store.domain_names()}
    seen = [domain for used in fill.used for domain in used]
    return [
        {
            "domain": names.get(domain, domain.hex()),
            "share": fill.share(domain),
            "reserved_bytes": fill.quota(HOST, domain).reserved_bytes,
            "used_bytes": {
                store.states.tier_name(tier): used[domain] for tier, used in enumerate(fill.used)
            },
            "quota_bytes": store.quotas(domain),
        }
        for domain in dict.fromkeys([*names, *seen])
    ]


def listing(store: Core) -> list[dict[str, Any]]:
    """Return one entry per world, with blocks and bytes per tier; serving goes on meanwhile."""
    states = store.states
    blocks: Counter[World] = Counter()
    copies: defaultdict[World, Counter[int]] = defaultdict(Counter)
    rows = iter(rows_of(store, EVERYTHING))
    while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        with states.lock:
            for row in some:
                if states.index.keys[row] is not None:
                    world = states.index.world(row)
                    blocks[world] += 1
                    copies[world].update(
                        tier for tier, column in enumerate(states.index.places) if column[row] >= 0
                    )
    names = {store.domain(name)[1]: name for name in store.domain_names()}
    return [
        {
            "fingerprint": world.fingerprint.hex(),
            "domain": names.get(world.domain, world.domain.hex()),
            "payload_bytes": world.payload_bytes,
            "block_tokens": world.block_tokens,
            "blocks": count,
            "tiers": {
                states.tier_name(tier): {"blocks": held, "bytes": held * world.record_bytes}
                for tier, held in sorted(copies[world].items())
            },
        }
        for world, count in blocks.items()
    ]


def shared(store: Core) -> dict[str, Any]:
    """Return what each shared tier says of its far side; asks over the network, bounded."""
    tiers = [tier for tier in store.states.lower if isinstance(tier, Shared)]
    return {"shared": [tier.describe() for tier in tiers]}


def drop(store: Core, fingerprint: str) -> dict[str, Any]:
    """Forget blocks; copies somebody reads go with their last reader."""
    dropped, index = 0, store.states.index
    for row in rows_of(store, fingerprint):
        with store.states.lock:
            wanted = ("", EVERYTHING, index.world(row).fingerprint.hex())
            if index.keys[row] is None or fingerprint not in wanted:  # another block's by now
                continue
            dropped += 1
            for tier in range(1 + len(store.states.lower)):
                store.states.vacate(row, tier)
    return {"dropped": dropped}


def forget(store: Core, world: World, keys: Sequence[bytes]) -> int:
    """Forget blocks by name; return how many were held."""
    states, forgotten = store.states, 0
    with states.lock:
        for key in keys:
            row = states.index.find(key)
            if row >= 0 and states.holds(row, world):
                forgotten += 1
                for tier in range(1 + len(states.lower)):
                    states.vacate(row, tier)
    return forgotten


def rows_of(store: Core, fingerprint: str) -> list[int]:
    """Return the rows of one fingerprint (hex), or all for `*` or none given; locks for moments."""
    states = store.states
    with states.lock:
        rows = list(states.index.rows())
        wanted = {
            number
            for number, world in enumerate(states.index.worlds)
            if fingerprint in ("", EVERYTHING, world.fingerprint.hex())
        }
    return [row for row in rows if states.index.world_number(row) in wanted]
