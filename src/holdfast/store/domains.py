"""Domains of a running store: list them; rotate, retire and erase their keys.

Erasing a domain destroys its data keys and forgets its blocks here. What lies on a disk, on a
pool's targets or in a bucket stays there and cannot be read. Engines of the domain get misses, and
their leases end: what they copied under one does not count. Slots go back to the kernel, which
clears them. Until all is forgotten nothing of the domain is sealed or published: the next key must
not seal what was erased.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast.errors import RefusedError
from holdfast.keys.keyring import KeyRing
from holdfast.limits import RECLAIM_S
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.store.unreadable import (
    UnreadableCount,
    count_copies,
    delete_elsewhere,
    held_elsewhere,
    sealed_with,
    sweep_retired,
    visit_domain,
)

_log = logging.getLogger("holdfast.store")


def listing(store: StoreParts) -> dict[str, Any]:
    """Return every domain: its id, whether it is sealed, its epochs; no key among them."""
    ring = store.table.sealing.ring
    on_ring = {entry["id"]: entry for entry in ring.listing()}
    entries: list[dict[str, Any]] = []
    for name, domain in store.domain_ids.items():
        known = on_ring.pop(domain.hex(), {"epochs": [], "erasures": 0, "derived": False})
        entry = {"domain": name, "id": domain.hex(), "configured": True}
        entries.append({**entry, "sealed": store.table.sealing.seals(domain), **known})
    entries += [{**entry, "sealed": False, "configured": False} for entry in on_ring.values()]
    return {"keyring": str(ring.path) if ring.path else "", "domains": entries}


def rotate(store: StoreParts, name: str) -> dict[str, Any]:
    """Begin another epoch of a domain's data key; records of older epochs stay readable."""
    ring, _ = _ring(store, name)
    epoch = ring.rotate(name)
    store.audit.record("rotate", domain=name, epoch=epoch)
    return {"domain": name, "epoch": epoch}


def would_retire(store: StoreParts, name: str) -> dict[str, Any]:
    """Return what `retire` would destroy; raises RefusedError if it would.

    `blocks` are those held here that would lose copies on `tiers`; `lost` of them have no other.
    `uncounted` names the tiers whose copies cannot be counted. `complete` is False while recovery
    is running.
    """
    ring, domain = _ring(store, name)
    store.table.sealing.watch.look_briefly()  # another node may have rotated
    ring.check_retirable(name)
    old = ring.epochs(name)[:-1]
    complete = store.recovery.wait(0)
    found = count_copies(
        store, domain, partial(sealed_with, store.table, old.__contains__)
    ).as_data()
    return {
        "domain": name,
        "retired": len(old),
        **found,
        "uncounted": store.shared_tiers if old else [],
        "complete": complete,
    }


def retire(store: StoreParts, name: str, *, allow_loss: bool = False) -> dict[str, Any]:
    """Destroy all data keys of a domain but the newest: what they sealed cannot be read again.

    Copies sealed with those keys leave the index at once, and their places are freed. Raises
    RefusedError, and destroys none, if a key follows from the domain's secret; and, unless
    `allow_loss`, if copies sealed with one are held here, or may be.
    """
    ring, domain = _ring(store, name)
    newest = None
    if not allow_loss:
        store.table.sealing.watch.look_briefly()  # another node may have rotated
        newest = (ring.epochs(name) or [0])[-1]
        _check_loses_nothing(would_retire(store, name))
    with store.erasing:
        retired = ring.retire(name, newest)
        result = sweep_retired(store, ring, domain)
    found = {"retired": retired, **result.as_data(), "uncounted": store.shared_tiers}
    log_unreadable(f"domain {name!r}: data keys were retired", found)
    store.audit.record("retire", domain=name, epochs=retired, blocks=found["blocks"])
    return {"domain": name, **found}


def would_erase(store: StoreParts, name: str) -> dict[str, Any]:
    """Return what `erase` would destroy; raises RefusedError if it would."""
    ring, domain = _erasable(store, name)
    result = count_copies(store, domain, store.table.index.tiers)
    return {
        "domain": name,
        "epochs": len(ring.epochs(name)),
        "blocks": result.blocks,
        "tiers": result.tiers(),
        "uncounted": store.shared_tiers,
        "complete": store.recovery.wait(0),
    }


def erase(store: StoreParts, name: str) -> dict[str, Any]:
    """Erase a domain. Raises RefusedError if its keys cannot be destroyed.

    A save that runs at the same time may be lost; a later save is kept. `everywhere` is False if a
    key follows from the domain's secret: that must be destroyed too.
    """
    ring, domain = _erasable(store, name)
    elsewhere = held_elsewhere(store, domain)
    with store.erasing:
        dropped = ring.erase(name)
        result = forget_erased(store, ring, domain)
    store.audit.record("erase", domain=name, epochs=dropped.keys, blocks=result.blocks)
    delete_elsewhere(store, elsewhere)
    return {
        "domain": name,
        "epochs": dropped.keys,
        "blocks": result.blocks,
        "tiers": result.tiers(),
        "uncounted": store.shared_tiers,
        "everywhere": not dropped.derived,
    }


def forget_domain(store: StoreParts, domain: bytes) -> UnreadableCount:
    """End a domain's leases and reservations, forget its blocks on all tiers; return the count."""
    table, result = store.table, UnreadableCount(store.table)

    def forget(row: int) -> None:
        result.add(row, table.index.tiers(row))
        table.remove_copies(row)

    with table.lock:
        _end(store, domain)
        table.free_unlisted(lambda namespace, _: namespace.domain == domain)
    visit_domain(store, domain, forget)
    if domain in table.hosts:
        table.hosts[domain].erase()  # memory that engines have locked does not go to the kernel
    return result


def forget_erased(store: StoreParts, ring: KeyRing, domain: bytes) -> UnreadableCount:
    """Forget an erased domain's blocks, after which its new key may seal; return the count.

    Work that began before, from a block that was not forgotten yet, ends with it.
    """
    erasures = ring.erasures.pending().get(domain, 0)
    retirements = ring.retirements.pending().get(domain, 0)
    result = forget_domain(store, domain)
    with store.table.lock:
        _end(store, domain)
        ring.erasures.done(domain, erasures)
        ring.retirements.done(domain, retirements)
    return result


def leave_memory(store: StoreParts, domain: bytes) -> None:
    """Remove a domain's blocks from memory; below the host they stay indexed, and sealed."""
    visit_domain(store, domain, partial(store.table.remove_copy, tier=HOST))


def log_unreadable(what: str, found: Mapping[str, Any]) -> None:
    """Warn about copies that left the index because nothing can open them, if there were any."""
    if found["blocks"]:
        tiers = " ".join(f"{name}_blocks={tier['blocks']}" for name, tier in found["tiers"].items())
        _log.warning(
            "%s: copies that cannot be opened left the index blocks=%d %s; %d of the blocks have "
            "no other copy here",
            *(what, found["blocks"], tiers, found["lost"]),
        )


def _check_loses_nothing(found: Mapping[str, Any]) -> None:
    """Raise RefusedError if retiring would destroy keys that copies are sealed with, or may be."""
    name = found["domain"]
    if not found["retired"]:
        return
    if found["blocks"]:
        where = ", ".join(
            f"{tier} {held['blocks']} blocks, {held['bytes']} bytes"
            for tier, held in found["tiers"].items()
        )
        why = f"{found['blocks']} blocks held here are sealed with them ({where})"
    elif found["uncounted"]:
        why = f"what {', '.join(found['uncounted'])} has sealed with them cannot be counted"
    elif not found["complete"]:
        why = "this node still looks for the blocks that an earlier process left on its tiers"
    else:
        return
    raise RefusedError(
        f"domain {name!r}: {found['retired']} data keys would be destroyed, and {why}; nothing was "
        f"changed; `holdfast domain retire {name} --yes` does it all the same"
    )


def _end(store: StoreParts, domain: bytes) -> None:
    """End a domain's leases, reservations, hints and other work in progress; under the lock."""
    table = store.table
    table.erasures[domain] += 1
    store.pending_hints.forget_domain(domain)
    table.durable_marks.remove_all(lambda namespace: namespace.domain == domain)
    rests_until = store.clock.now() + RECLAIM_S
    for reservation in table.leases.end_domain(
        domain, lambda row: table.index.namespace(row).domain
    ):
        store.rest(reservation, rests_until)
    store.partial_blocks.end_domain(domain, rests_until)


def _ring(store: StoreParts, name: str) -> tuple[KeyRing, bytes]:
    """Return the ring and the id of a domain that seals; raise ConfigError or RefusedError."""
    _, domain = store.domain(name)
    if not store.table.sealing.seals(domain):
        raise RefusedError(
            f"domain {name!r} is not sealed, so it has no data keys: its blocks can be dropped "
            "(`holdfast inspect drop`); one with a key of its own and no `seal: false` is sealed"
        )
    return store.table.sealing.ring, domain


def _erasable(store: StoreParts, name: str) -> tuple[KeyRing, bytes]:
    """Like `_ring`, for a domain that can be erased; raise RefusedError for another."""
    ring, domain = _ring(store, name)
    if ring.derives and ring.path is None:
        raise RefusedError(
            f"domain {name!r}: without a keyring file this node would not remember that it was "
            "erased; set keyring, the same on every node of the pool"
        )
    return ring, domain
