"""Domains of a running store: list them, rotate, retire and erase their keys, follow their ring.

To erase a domain its data keys are destroyed, and everything that is known or held of it here is
forgotten. What lies on a disk, on a pool's targets or in a bucket stays there, and is noise.
Engines of the domain get misses, and leases that ended: what they copied under one does not count.
Slots go back to the kernel, which clears them. Until all is forgotten nothing of the domain is
sealed or published: the key that comes next must not seal what was erased.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import RefusedError
from holdfast.limits import RECLAIM_S, RING_STALE_S
from holdfast.store.core import Core
from holdfast.store.keyring import KeyRing
from holdfast.store.states import HOST, States
from holdfast.tiers.base import Get, Place, Shared

CONDEMN_S = 20.0
CONDEMNED_MAX = 1 << 17
"""Blocks that an erased domain's shared tiers are asked to forget; the rest is met by readers."""

_ROWS_AT_ONCE = 4_096
_CONDEMNED_AT_ONCE = 512
_log = logging.getLogger("holdfast.store")


def listing(store: Core) -> dict[str, Any]:
    """Return every domain: its id, whether it is sealed, its epochs; no key among them."""
    ring = store.states.sealing.ring
    on_ring = {entry["id"]: entry for entry in (ring.listing() if ring else [])}
    entries: list[dict[str, Any]] = []
    for name in store.domain_names():
        domain = store.domain(name)[1]
        known = on_ring.pop(domain.hex(), {"epochs": [], "erasures": 0, "derived": False})
        entry = {"domain": name, "id": domain.hex(), "configured": True}
        entries.append({**entry, "sealed": store.states.sealing.seals(domain), **known})
    entries += [{**entry, "sealed": False, "configured": False} for entry in on_ring.values()]
    return {"keyring": str(ring.path) if ring and ring.path else "", "domains": entries}


def rotate(store: Core, name: str) -> dict[str, Any]:
    """Begin another epoch of a domain's data key; what is sealed with older ones stays readable."""
    epoch = _ring(store, name).rotate(name)
    store.audit.record("rotate", domain=name, epoch=epoch)
    return {"domain": name, "epoch": epoch}


def retire(store: Core, name: str) -> dict[str, Any]:
    """Destroy all data keys of a domain but the newest: what they sealed can not be read again.

    Raises RefusedError, and destroys none, where one of them follows from the domain's secret.
    """
    retired = _ring(store, name).retire(name)
    store.audit.record("retire", domain=name, epochs=retired)
    return {"domain": name, "retired": retired}


def erase(store: Core, name: str) -> dict[str, Any]:
    """Erase a domain. Raises RefusedError if its keys can not be destroyed.

    What is saved while it runs may be lost with the rest; what is saved afterwards is kept.
    `everywhere` is False where a key follows from the domain's secret: it must be destroyed too.
    """
    ring = _ring(store, name)
    if ring.derives and ring.path is None:
        raise RefusedError(
            f"domain {name!r}: without a keyring file this node would not remember that it was "
            "erased; set keyring, the same on every node of the pool"
        )
    domain = store.domain(name)[1]
    elsewhere = _elsewhere(store, domain)
    with store.erasing:
        dropped = ring.erase(name)
        blocks = _forget_erased(store, ring, domain)
    store.audit.record("erase", domain=name, epochs=dropped.keys, blocks=blocks)
    _condemn(store, elsewhere)
    everywhere = not dropped.derived
    return {"domain": name, "epochs": dropped.keys, "blocks": blocks, "everywhere": everywhere}


def follow(store: Core) -> None:
    """Take note of what other nodes did to a ring that is shared; nothing opens if it stays away.

    A ring that could not be read for `RING_STALE_S`, or that hung so long, might have lost keys:
    its domains are served no longer, and leave memory, until it can be read again.
    """
    ring, watch = store.states.sealing.ring, store.states.sealing.watch
    if ring is None or watch is None or ring.path is None:
        return
    watch.glance()
    stale = store.clock.now() - watch.read_at >= RING_STALE_S
    if stale and not store.ring_lost:
        _go_without(store, ring, watch.why or "it was not read in time, the file system may hang")
    elif store.ring_lost and not stale and not ring.suspended:
        store.audit.record("ring", state="back")
        store.ring_lost, store.cold = False, True
    if ring.erased() and store.erasing.acquire(blocking=False):  # else somebody is at it
        try:
            for domain in ring.erased():
                blocks = _forget_erased(store, ring, domain)
                store.audit.record("erased elsewhere", domain=ring.name(domain), blocks=blocks)
        finally:
            store.erasing.release()


def forget_domain(store: Core, domain: bytes) -> int:
    """End a domain's leases and tickets and forget its blocks on all tiers; return how many."""
    states = store.states
    with states.lock:
        _end(store, domain)
        rows = iter(_rows(store, domain))
    blocks = 0
    while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        with states.lock:
            blocks += sum(_forget(states, row, domain) for row in some)
    return blocks


def _forget_erased(store: Core, ring: KeyRing, domain: bytes) -> int:
    """Forget an erased domain's blocks; only then may its new key seal. Return how many.

    What began meanwhile, from a block that was not forgotten yet, ends with it.
    """
    erasures = ring.erased().get(domain, 0)
    blocks = forget_domain(store, domain)
    with store.states.lock:
        _end(store, domain)
        ring.forgotten(domain, erasures)
    return blocks


def _end(store: Core, domain: bytes) -> None:
    """End a domain's leases, tickets and whatever else is under way of it; under the lock."""
    states = store.states
    states.erasures[domain] += 1
    for number, lease in list(states.leases.items()):
        if any(states.index.world(row).domain == domain for row in lease.rows):
            states.release(number)
    for number, ticket in list(states.tickets.items()):
        if ticket.world.domain == domain:
            del states.tickets[number]
            store.rest(ticket, store.clock.now() + RECLAIM_S)


def leave_memory(store: Core, domain: bytes) -> None:
    """Take a domain's blocks out of memory; below the host they stay known, and sealed."""
    states = store.states
    with states.lock:
        rows = iter(_rows(store, domain))
    while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        with states.lock:
            for row in some:
                if states.index.keys[row] is not None and states.index.world(row).domain == domain:
                    states.vacate(row, HOST)


def _elsewhere(store: Core, domain: bytes) -> dict[Shared, list[Get]]:
    """Return what shared tiers are known to have of a domain, up to a limit."""
    states = store.states
    found: dict[Shared, list[Get]] = {}
    with states.lock:
        rows = _rows(store, domain)
        for tier, column in zip(states.lower, states.index.places[1:], strict=True):
            if isinstance(tier, Shared):
                there = [row for row in rows if column[row] >= 0][:CONDEMNED_MAX]
                names = [(Place(column[row]), states.index.keys[row] or b"") for row in there]
                worlds = [states.index.world(row) for row in there]
                found[tier] = [
                    Get(*name, memoryview(b""), world)
                    for name, world in zip(names, worlds, strict=True)
                ]
    return found


def _condemn(store: Core, elsewhere: Mapping[Shared, Sequence[Get]]) -> None:
    """Have shared tiers forget what nobody can read, for a while: they would not take it anew."""
    until = store.clock.now() + CONDEMN_S
    for tier, batch in elsewhere.items():
        for at in range(0, len(batch), _CONDEMNED_AT_ONCE):
            if store.clock.now() < until:
                tier.condemn(batch[at : at + _CONDEMNED_AT_ONCE])


def _go_without(store: Core, ring: KeyRing, why: str) -> None:
    """Serve none of the ring's domains."""
    ring.suspend()
    _log.error("keyring %s: %s; its domains are not served until it can be read", ring.path, why)
    store.ring_lost = True
    store.audit.record("ring", state="lost", why=why)
    for name in store.domain_names():
        domain = store.domain(name)[1]
        if store.states.sealing.seals(domain):
            leave_memory(store, domain)


def _ring(store: Core, name: str) -> KeyRing:
    """Return the ring for a domain that seals; raise ConfigError or RefusedError for another."""
    _, domain = store.domain(name)
    ring = store.states.sealing.ring
    if ring is None or not store.states.sealing.seals(domain):
        raise RefusedError(
            f"domain {name!r} is not sealed, so it has no data keys: its blocks can be dropped "
            "(`holdfast inspect drop`); one with a key of its own and no `seal: false` is sealed"
        )
    return ring


def _forget(states: States, row: int, domain: bytes) -> bool:
    """Take a row off all tiers; False if it went, or is another domain's, meanwhile."""
    if states.index.keys[row] is None or states.index.world(row).domain != domain:
        return False
    for tier in range(1 + len(states.lower)):
        states.vacate(row, tier)
    return True


def _rows(store: Core, domain: bytes) -> list[int]:
    """Return the rows of a domain; call under the lock."""
    index = store.states.index
    ours = {number for number, world in enumerate(index.worlds) if world.domain == domain}
    return [row for row in index.rows() if index.world_number(row) in ours]
