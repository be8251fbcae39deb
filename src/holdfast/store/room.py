"""Room: a slot in memory for one more block, and whose blocks leave for it.

Within a domain the eviction policy says what is worth least. Where memory is divided between
domains, `holdfast.policy.shares` says first who gives way. State only: call everything here under
the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice

from holdfast.blocks.world import World
from holdfast.policy.apart import Apart
from holdfast.store.states import HOST, PUBLIC_SHARE, States
from holdfast.tiers.base import NOWHERE, Place

ANYBODY = b""
"""Gives way where memory is not divided: whoever has what is worth least."""

_PATIENCE = 1_024
"""Blocks that nobody uses and that are looked at for one that may go."""

_LEASED_MAX = 2 * _PATIENCE
"""Blocks in use that are met meanwhile: they are put behind the others, so not all at once."""

_RUNS_LOOKED_AT = 8
"""Stretches of memory among which the one is chosen whose blocks go."""


def slots(states: States, world: World) -> int:
    """Return how many blocks of a world could lie in memory, were nothing else there."""
    most = states.fill.quota(HOST, world.domain).most_bytes
    return int(min(states.host(world).slots(world.record_bytes), most // world.record_bytes))


def make_rooms(states: States, world: World, count: int) -> list[Place]:
    """Reserve up to `count` host slots for blocks of a world, evicting what is least valuable.

    Where memory is not divided and all are of one size, victims are sought once for all of them.
    Whoever gets slots gives them back by `give_back`, or publishes them.
    """
    size, host, places = world.record_bytes, states.host(world), list[Place]()
    one_by_one = states.fill.divided or world.domain == states.public
    if not one_by_one and states.fill.fits(HOST, world.domain, count * size):
        places = [place for place in host.reserve([size] * count).places if place != NOWHERE]
        if missing := count - len(places):
            with closing(_like(states, world)) as rows:
                places += states.take_over(host, islice(rows, missing))
        states.fill.take(HOST, world.domain, len(places) * size)
    while len(places) < count and (place := _make_room(states, world)) != NOWHERE:
        places.append(place)
    return places


def _make_room(states: States, world: World) -> Place:
    """Reserve one host slot, evicting what is least valuable; NOWHERE if nothing may go.

    Where memory is divided, first it is found which domain has to give way.
    """
    domain, size, place = world.domain, world.record_bytes, NOWHERE
    if domain == states.public and _public_is_full(states, size):
        return NOWHERE
    if states.fill.fits(HOST, domain, size):
        place = states.host(world).reserve([size]).places[0]
    givers = states.fill.gives_way(HOST, domain, size) if states.fill.divided else [ANYBODY]
    for giver in givers:
        while place == NOWHERE and _evict(states, world, giver):
            if states.fill.fits(HOST, domain, size):
                place = states.host(world).reserve([size]).places[0]
    if place != NOWHERE:
        states.fill.take(HOST, domain, size)
    return place


def _like(states: States, world: World) -> Generator[int, None, None]:
    """Yield rows that may go and leave just the slots that a world needs, up to the first other."""
    host, size, like = states.host(world), world.record_bytes, world
    with closing(_may_go(states, ANYBODY)) as rows:
        for row in rows:
            other = states.index.world(row)
            if other is not like and (states.host(other) is not host or other.record_bytes != size):
                return
            like = other
            yield row


def make_room_below(states: States, world: World, tier: int, nbytes: int) -> bool:
    """Have a domain's oldest blocks on a lower tier leave it until `nbytes` are in its quota.

    False where they never are.
    """
    if nbytes > states.fill.quota(tier, world.domain).most_bytes:
        return False
    column = states.index.places[tier]
    for row, place in states.fill.oldest(tier, world.domain):
        if states.fill.fits(tier, world.domain, nbytes):
            states.fill.stays(tier, world.domain, row, place)
            break
        if column[row] == place:
            states.vacate(row, tier)
            if states.index.places[HOST][row] >= 0:
                states.unwanted.add(row)  # or it would take the place of others, and they of it
    return states.fill.fits(tier, world.domain, nbytes)


def _public_is_full(states: States, nbytes: int) -> bool:
    """Whether the public domain has its part of memory; it evicts nothing of its own."""
    host = states.hosts.get(states.public)
    if host is None:
        return False
    usage = host.usage()
    return usage.used_bytes + nbytes > PUBLIC_SHARE * usage.capacity_bytes


def _evict(states: States, world: World, giver: bytes) -> bool:
    """Evict for one block of a world what is worth least of a domain; False: nothing may go.

    One block, if that leaves a slot of the size in the right arena. If not, memory has to
    move, which it does in whole runs: then the emptiest run of those with the least valuable
    blocks. Evicting by value alone would go through most of a domain until some run is empty.
    """
    domain, size, host = world.domain, world.record_bytes, states.host(world)
    runs: list[list[int]] = []
    seen: set[int] = set()
    with closing(_may_go(states, giver)) as rows:
        for row in rows:
            other = states.index.world(row)
            if states.host(other) is host and other.record_bytes == size:
                if runs:
                    break
                if other.domain != domain and states.fill.to_spare(HOST, other.domain) < size:
                    continue
                states.vacate(row, HOST)
                return True
            if row in seen:
                continue
            run = states.host(other).beside(Place(states.index.places[HOST][row]))
            seen.update(run)
            if run and _all_may_go(states, run, domain):
                runs.append(run)
            if len(runs) == _RUNS_LOOKED_AT:
                break
    for row in min(runs, key=len, default=[]):
        states.vacate(row, HOST)
    return bool(runs)


def _may_go(states: States, giver: bytes) -> Generator[int, None, None]:
    """Yield rows of a domain that may be evicted, least valuable first, while patience lasts.

    What is leased is in use: it goes behind the others, so as not to be met first next time.
    """
    now_s, policy = states.clock.now(), states.eviction
    if giver != ANYBODY and isinstance(policy, Apart):
        victims = policy.victims_of(giver, now_s)
    else:
        victims = policy.victims(now_s)
    leases, leased, patience = states.index.leases, list[int](), _PATIENCE
    try:
        for row in victims:
            if leases[row]:
                leased.append(row)
                if len(leased) == _LEASED_MAX:
                    break
                continue
            if states.evictable(row):
                yield row
            patience -= 1
            if not patience:
                break
    finally:
        victims.close()
        for row in leased:
            policy.pass_by(row, now_s)


def _all_may_go(states: States, run: Sequence[int], asking: bytes) -> bool:
    """Whether all of these may be evicted for a domain: nobody else loses what it reserved."""
    lost: Counter[bytes] = Counter()
    for row in run:
        world = states.index.world(row)
        lost[world.domain] += world.record_bytes
    del lost[asking]
    if any(nbytes > states.fill.to_spare(HOST, whose) for whose, nbytes in lost.items()):
        return False
    staying = [row for row in run if not states.evictable(row)]  # all of them get saved below
    return not staying
