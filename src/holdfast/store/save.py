"""The save street: slots first, then bytes, then a seal, then the index; the read street backwards.

Two phases, so that nobody ever sees half a block: `reserve` hands out slots that no key points to;
the engine fills them in place; `commit` packs each record (header, tag) and only then publishes it.
Whoever commits a key first wins; a second copy's slot is simply freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import Header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.codec.pack import pack
from holdfast.errors import Outcome
from holdfast.failpoints import reach
from holdfast.policy.base import NEVER
from holdfast.policy.retention import Retention
from holdfast.store.core import Core
from holdfast.store.promises import Ticket
from holdfast.store.room import make_rooms
from holdfast.store.states import HOST, States
from holdfast.tiers.base import NOWHERE, Place

FILLING_SHARE = 0.5
"""Of the memory that nobody reserved, one of several domains may have so much in slots to fill."""


class Reserved(NamedTuple):
    """Slots to fill: one place per key, -1 for a block that is held already or has no room.

    Nor is there room for one whose key another world's block bears.
    """

    ticket: int
    places: list[int]
    outcome: Outcome


def reserve(
    store: Core, world: World, keys: Sequence[bytes], parent: bytes, depth: int, segment: bytes
) -> Reserved:
    """Hand out slots for consecutive blocks, the first at `depth` behind `parent`; state only."""
    states = store.states
    with states.lock:
        rows = [states.index.find(key) for key in keys]
        there = [
            row >= 0 and (states.holds(row, world) or _named_otherwise(states, row, world))
            for row in rows
        ]
        held = list(itertools.compress(rows, there))
        states.pin(held)  # they must not go to make room for what builds upon them
        room = iter(make_rooms(states, world, min(there.count(False), _fillable(store, world))))
        states.unpin(held)
        places = [NOWHERE if is_there else next(room, NOWHERE) for is_there in there]
        full = places.count(NOWHERE) > len(held)
        states.fill.hand_out(world.domain, (len(keys) - places.count(NOWHERE)) * world.record_bytes)
        outcome = Outcome.FULL if full else Outcome.OK
        ticket = states.number()
        states.tickets[ticket] = Ticket(
            world, list(keys), parent, depth, segment, places, states.era(world.domain)
        )
    if full:
        store.ladder.wake()
    return Reserved(ticket, [int(place) for place in places], outcome)


def commit(store: Core, number: int, retention: Retention = Retention.SESSION) -> int:
    """Pack and publish the filled slots of a ticket; return how many blocks are new.

    What is held already is only kept for longer, if `retention` says so.

    An unknown ticket publishes nothing: its slots were given back, so nobody may believe them.
    """
    states = store.states
    with states.lock:
        ticket = states.tickets.pop(number, None)
    if ticket is None:
        return 0
    world = ticket.world
    host = states.host(world)
    parents = [ticket.parent, *ticket.keys[:-1]]
    for i, (key, place) in enumerate(zip(ticket.keys, ticket.places, strict=True)):
        if place != NOWHERE:
            header = Header(
                key=key,
                parent=parents[i],
                fingerprint=world.fingerprint,
                domain=world.domain,
                depth=ticket.depth + i,
                tokens=world.block_tokens,
                payload_bytes=world.payload_bytes,
                raw_bytes=world.payload_bytes,
                segment=_segment(ticket, i, states.segment_blocks),
            )
            pack(host.view(place, world.record_bytes), header)
    reach("commit_packed")
    published = _publish(store, ticket, parents, retention)
    reach("commit_published")
    if states.lower and (published or retention is Retention.DURABLE):
        store.ladder.wake()
    return published


def abort(store: Core, number: int, *, rest_s: float = 0.0) -> None:
    """Give a ticket's slots back after `rest_s` seconds, in which a writer may still scribble."""
    with store.states.lock:
        ticket = store.states.tickets.pop(number, None)
        if ticket is not None:
            store.rest(ticket, store.clock.now() + rest_s)


def _fillable(store: Core, world: World) -> int:
    """Return how many blocks of a world may be handed out now; a lone domain is in nobody's way."""
    share = FILLING_SHARE if len(store.states.hosts) > 1 else 1.0
    fill, size = store.states.fill, world.record_bytes
    return fill.fillable(world.domain, size, store.host_bytes, share)


def _publish(store: Core, ticket: Ticket, parents: Sequence[bytes], retention: Retention) -> int:
    states, world = store.states, ticket.world
    taken: dict[int, Place] = {}
    with states.lock:
        states.fill.handed_back(world.domain, ticket.nbytes)
        if states.era(world.domain) != ticket.era or states.sealing.is_away(world.domain):
            states.give_back(world, [place for place in ticket.places if place != NOWHERE])
            return 0
        for i, (key, place) in enumerate(zip(ticket.keys, ticket.places, strict=True)):
            if place == NOWHERE:
                continue
            row = states.index.add(world, key, parents[i], ticket.depth + i)
            here = row in taken or states.index.places[HOST][row] >= 0
            if here or row in states.loading or _named_otherwise(states, row, world):
                states.give_back(world, [place])
            else:
                taken[row] = place
        states.publish_here(world, taken)
        entered = list(taken)
        held = _held_before(states, ticket)
        states.touch(held)
        states.enter_new(entered)
        match retention:
            case Retention.EPHEMERAL:
                states.unwanted.update(entered)
                states.eviction.expect(entered, NEVER)
            case Retention.DURABLE:
                states.write_through([*held, *entered])
            case Retention.SESSION if store.write_behind:
                for row in entered:
                    states.line_up(row)
    return len(entered)


def _held_before(states: States, ticket: Ticket) -> list[int]:
    """Return the rows of a ticket's blocks that needed no slot."""
    pairs = zip(ticket.keys, ticket.places, strict=True)
    rows = [states.index.find(key) for key, place in pairs if place == NOWHERE]
    return [row for row in rows if row >= 0 and states.holds(row, ticket.world)]


def _named_otherwise(states: States, row: int, world: World) -> bool:
    """Whether a row is a block of another world: who gave it this key lied, then or now."""
    return states.index.world(row) != world


def _segment(ticket: Ticket, index: int, segment_blocks: int) -> bytes:
    """Return the segment of the ticket's block `index`: its head may be among the ticket's keys."""
    head = index - (ticket.depth + index) % segment_blocks
    known = ticket.keys[head] if head >= 0 else ticket.segment
    return known[:SEGMENT_BYTES].ljust(SEGMENT_BYTES, b"\0")
