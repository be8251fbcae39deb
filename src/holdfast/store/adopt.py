"""Records that come whole from another node: a place first, then bytes, a check, then the index.

The sender packed them, perhaps sealed, in a domain whose key this node does not have. So nothing is
packed or hashed here: `berth` hands out slots for announced headers, the caller receives into them,
and `adopt` publishes those that begin with the header announced. Their payloads are unproven until
somebody reads them: every reader verifies, and has a record that fails forgotten. Slots that were
not filled are abandoned. docs/decisions says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress, groupby, takewhile
from operator import attrgetter
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, SEAL_NONE, Header
from holdfast.blocks.world import World
from holdfast.codec.pack import is_announced
from holdfast.errors import Outcome
from holdfast.store.core import Core
from holdfast.store.room import make_rooms, slots
from holdfast.store.states import HOST, States
from holdfast.tiers.base import NOWHERE, Place

_WORLD_OF = attrgetter("fingerprint", "domain", "payload_bytes", "tokens")


class Berth(NamedTuple):
    """Where one announced record may be received: a slot, or None; `held` if it is here already."""

    header: Header
    world: World
    place: Place
    era: int
    slot: memoryview | None
    held: bool


def berth(store: Core, headers: Sequence[Header]) -> list[Berth]:
    """Hand out a slot for each record that is not held and fits; state only.

    There is none for a record of the public domain that is not sealed.

    The slots are the caller's until it adopts or abandons them; it must do one or the other.
    """
    of_world: dict[World, list[int]] = {}
    for named, group in groupby(range(len(headers)), lambda i: _WORLD_OF(headers[i])):
        of_world.setdefault(World(*named), []).extend(group)
    berths: dict[int, Berth] = {}
    with store.states.lock:
        for world in of_world:
            store.states.host(world)  # refused before anything is handed out
        for world, numbers in of_world.items():
            found = _berths(store.states, world, [headers[i] for i in numbers])
            berths.update(zip(numbers, found, strict=True))
    if any(each.slot is None and not each.held for each in berths.values()):
        store.ladder.wake()  # to make what is saved below ready to go
    return [berths[i] for i in range(len(headers))]


def adopt(store: Core, berths: Sequence[Berth], announced: bytes = b"") -> list[Outcome]:
    """Publish slots filled to the last byte: OK (held now), FULL (there was no slot), or CORRUPT.

    CORRUPT is what does not begin with the header announced, or bears another world's name. A
    record of a domain that this node seals is opened, and CORRUPT if that fails. `announced`: the
    headers of all, as they came; what begins with just these bytes needs no closer look.
    """
    states, index = store.states, store.states.index
    begun = b"".join(each.slot[:HEADER_BYTES] for each in berths if each.slot is not None)
    as_said = begun == announced
    outcomes = [_outcome(states, each, as_said=as_said) for each in berths]
    taken: dict[World, dict[int, Place]] = {}
    with states.lock:
        eras = {domain: states.era(domain) for domain in {each.world.domain for each in berths}}
        for i, each in enumerate(berths):
            if each.slot is None:
                continue
            header, world = each.header, each.world
            row, here = index.find(header.key), taken.setdefault(world, {})
            # Since the slot was handed out, the domain may have been erased, the name taken.
            if eras[world.domain] != each.era or _named_otherwise(states, row, world):
                outcomes[i] = Outcome.CORRUPT
            if outcomes[i] is not Outcome.OK or row in here or _here(states, row):
                states.give_back(world, [each.place])
            else:
                row = index.add(world, header.key, header.parent, header.depth)
                here[row] = each.place
                if not states.sealing.checks(header):
                    states.unproven.add(row)
        for world, here in taken.items():
            states.publish_here(world, here)
        entered = [row for here in taken.values() for row in here]
        states.enter_new(entered)
        if store.write_behind and states.lower:
            for row in entered:
                states.line_up(row)
    if entered and states.lower:
        store.ladder.wake()
    return outcomes


def abandon(store: Core, berths: Sequence[Berth]) -> None:
    """Give slots back that will not be adopted; nobody writes to them any more."""
    with store.states.lock:
        for each in berths:
            if each.place != NOWHERE:
                store.states.give_back(each.world, [each.place])


def lease(store: Core, world: World, keys: Sequence[bytes], ttl_s: float) -> int:
    """Keep the leading run that lies in memory there for a while; return its length."""
    with store.states.lock:
        return hold(store.states, world, keys, store.clock.now() + ttl_s)[1]


def hold(states: States, world: World, keys: Sequence[bytes], until_s: float) -> tuple[int, int]:
    """Lease what lies in memory of a leading run, under the lock; return the lease, the length."""
    rows = list(takewhile(partial(states.lies, tier=HOST), states.index.cover(world, keys).rows))
    if not rows:
        return 0, 0
    states.touch(rows)
    return states.lease(rows, until_s), len(rows)


def _named_otherwise(states: States, row: int, world: World) -> bool:
    """Whether a record's name is another world's: it could never lie here."""
    return row >= 0 and states.index.world(row) != world


def _is_vouched_for(states: States, header: Header) -> bool:
    """Whether a record may come from just anybody: one that all domains read must be sealed."""
    return header.domain != states.public or header.seal != SEAL_NONE


def _here(states: States, row: int) -> bool:
    """Whether the row lies in memory, or is about to."""
    return row >= 0 and (states.index.places[HOST][row] >= 0 or row in states.loading)


def _berths(states: States, world: World, headers: Sequence[Header]) -> list[Berth]:
    """Find a berth for each of a world's records; under the lock."""
    find = states.index.find
    rows = [find(header.key) for header in headers]
    held = [row >= 0 and states.holds(row, world) for row in rows]
    for row in compress(rows, held):
        states.touch([row])  # of any chain
    possible = slots(states, world) > 0
    wanted = [
        possible
        and not is_held
        and not _named_otherwise(states, row, world)
        and _is_vouched_for(states, header)
        for row, is_held, header in zip(rows, held, headers, strict=True)
    ]
    places = make_rooms(states, world, wanted.count(True))
    room, era, size = iter(places), states.era(world.domain), world.record_bytes
    view, berths = states.host(world).view, list[Berth]()
    for header, is_held, wants in zip(headers, held, wanted, strict=True):
        place = next(room, NOWHERE) if wants else NOWHERE
        slot = None if place == NOWHERE else view(place, size)
        berths.append(Berth(header, world, place, era, slot, is_held))
    return berths


def _outcome(states: States, each: Berth, *, as_said: bool) -> Outcome:
    if each.slot is not None:
        if not (as_said or is_announced(each.slot, each.header)):
            return Outcome.CORRUPT
        if not states.sealing.checks(each.header):
            return Outcome.OK
        landed = states.sealing.land(each.slot, each.header.key, each.world)
        return Outcome.OK if landed is Outcome.OK else Outcome.CORRUPT
    return Outcome.OK if each.held else Outcome.FULL
