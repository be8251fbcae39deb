"""The save path: reserve slots, fill them, pack the records, publish them in the index.

Two phases, so that no reader sees half a block. `reserve` returns slots that no key points to; the
engine fills them in place; `commit` packs each record (header, tag) and only then publishes it. If
two sessions of a namespace save the same key, the first to commit wins and the other's slot is
freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import Header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import WHOLE
from holdfast.codec.pack import pack, payload
from holdfast.errors import Outcome
from holdfast.failpoints import reach
from holdfast.policy.base import NEVER
from holdfast.policy.retention import Retention
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.evict import reserve_slots
from holdfast.store.leases import Reservation
from holdfast.store.partial_blocks import JoinedBlock
from holdfast.tiers.base import NOWHERE, Place

FILLING_SHARE = 0.5
"""Maximum share of the unreserved memory for one of several domains' uncommitted slots."""


PARTIAL_SHARE = 0.5
"""Maximum share of memory for blocks that wait for parts.

They cannot be evicted, so without a limit an engine of which one rank does not save could fill the
memory of a node.
"""


class SaveSlots(NamedTuple):
    """Slots to fill: one place per key, -1 for a block that is held already or gets no slot.

    Only blocks of the same namespace count as held, so the answer reveals no other namespace.
    """

    ticket: int
    places: list[int]
    outcome: Outcome


class ChainRun(NamedTuple):
    """Consecutive blocks of a chain, the first at `depth` behind `parent`.

    `segment` names the segment of the first block, for placement in a pool. `alone`: readers look
    up each block by itself, so on other tiers each is the first of a chain of its own. Its place in
    this run only orders eviction.
    """

    keys: Sequence[bytes]
    parent: bytes
    depth: int
    segment: bytes = b""
    alone: bool = False


def reserve(
    store: StoreParts, namespace: Namespace, run: ChainRun, part: bytes = WHOLE
) -> SaveSlots:
    """Reserve slots for consecutive blocks; state only.

    `part`: the ranges of each payload that this writer fills, if others fill the rest. It gets the
    slots that they got, and no slot for a block of which another writer fills the same bytes.
    """
    table, began_s = store.table, store.clock.now()
    keys = run.keys
    with table.lock:
        rows = table.index.find_all(namespace, keys)
        there = [row >= 0 and _is_readable(table, row) for row in rows]
        held = list(itertools.compress(rows, there))
        table.pin(held)  # they must not be evicted for the blocks that follow them
        generation = table.generation(namespace)
        joined = store.partial_blocks.join(namespace, keys, part, generation) if part else []
        new = _new(there, joined)
        size, share = namespace.slot_bytes, FILLING_SHARE if len(table.hosts) > 1 else 1.0
        fillable = table.usage.fillable(namespace.domain, size, store.host_bytes, share)
        if part:
            room = int(PARTIAL_SHARE * store.host_bytes) - store.partial_blocks.nbytes
            fillable = min(fillable, max(room, 0) // size)
        slots = reserve_slots(table, namespace, min(sum(new), fillable))
        table.unpin(held)
        unused = iter(slots)
        places = [next(unused, NOWHERE) if is_new else NOWHERE for is_new in new]
        for i, (block, wanted) in enumerate(joined):
            if block is not None and wanted and not there[i]:
                places[i] = block.place
        reservation = Reservation(
            *(namespace, list(keys), run.parent, run.depth, run.segment, places, generation),
            part=part,
            alone=run.alone,
        )
        table.usage.add_reserved(namespace.domain, len(slots) * size)
        number = table.leases.reserve(reservation)
        if part:
            store.partial_blocks.open(number, reservation, joined, began_s)
    full = len(slots) < sum(new)
    outcome = Outcome.FULL if full else Outcome.OK
    if full:
        store.mover.wake()
    store.activity.call("reserve", outcome, store.clock.now() - began_s, len(keys))
    return SaveSlots(number, [int(place) for place in places], outcome)


def _is_readable(table: BlockTable, row: int) -> bool:
    """Return whether a tier holds a copy of a row that it did not fail to read a moment ago."""
    failed, place = table.failed_reads, table.copies.place
    if not failed:
        return table.index.fastest(row) >= 0
    return any((tier, place(row, tier)) not in failed for tier in table.index.tiers(row))


def _new(there: Sequence[bool], joined: Sequence[JoinedBlock]) -> list[bool]:
    """Return for each block whether it needs a slot: it is not held, and nobody fills it."""
    if not joined:
        return [not is_there for is_there in there]
    return [
        found.block is None and found.wanted and not is_there
        for is_there, found in zip(there, joined, strict=True)
    ]


def commit(store: StoreParts, number: int, retention: Retention = Retention.SESSION) -> int:
    """Pack and publish the filled slots of a reservation; return how many blocks are new.

    Of a reservation with a part, the blocks are published whose last part this is.

    Blocks held already get the longer of both retentions. An unknown reservation publishes nothing,
    because its slots were freed. Neither does one whose domain was erased, or whose fingerprint was
    dropped, since it was made.
    """
    table, began_s = store.table, store.clock.now()
    with table.lock:
        reservation = table.leases.take_reservation(number)
        if reservation is not None and reservation.part:
            reservation = store.partial_blocks.commit(number, reservation)
    if reservation is None:
        store.activity.call("save", Outcome.GONE, 0.0, 0)
        return 0
    namespace = reservation.namespace
    host = table.host(namespace)
    parents = [reservation.parent, *reservation.keys[:-1]]
    named = list(zip(reservation.keys, reservation.places, strict=True))
    for i, (key, place) in enumerate(named):
        if place != NOWHERE:
            if reservation.alone:
                parent, depth, segment = namespace.fingerprint, 0, key
            else:
                parent, depth = parents[i], reservation.depth + i
                # The first block of the segment may be in the same reservation.
                head = i - depth % table.segment_blocks
                segment = reservation.keys[head] if head >= 0 else reservation.segment
            header = Header(
                key=key,
                parent=parent,
                fingerprint=namespace.fingerprint,
                domain=namespace.domain,
                depth=depth,
                tokens=namespace.block_tokens,
                payload_bytes=namespace.raw_bytes,
                raw_bytes=namespace.raw_bytes,
                segment=segment[:SEGMENT_BYTES].ljust(SEGMENT_BYTES, b"\0"),
            )
            _pack(store, host.view(place, namespace.slot_bytes), namespace, header)
    reach("commit_packed")
    taken: dict[int, Place] = {}
    with table.lock:
        table.usage.subtract_reserved(namespace.domain, reservation.nbytes)
        if table.is_stale(namespace, reservation.generation):
            table.give_back(namespace, reservation.slots)
        else:
            for i, (key, place) in enumerate(named):
                if place == NOWHERE:
                    continue
                row = table.index.add(namespace, key, parents[i], reservation.depth + i)
                here = row in taken or table.copies.place(row, HOST) >= 0
                if here or table.is_arriving(row):
                    table.give_back(namespace, [place])
                else:
                    taken[row] = place
            table.publish_here(namespace, taken)
            entered = list(taken)
            rows = table.index.find_all(namespace, reservation.keys)  # some by another saver
            rows = [row for row in rows if row >= 0 and row not in taken]
            held = [row for row in rows if table.index.fastest(row) >= 0]
            table.touch(held)
            table.enter_new(entered)
            _queue_for_lower_tiers(store, namespace, held, entered, retention)
    published = len(taken)
    reach("commit_published")
    if table.lower and (published or retention is not Retention.EPHEMERAL):
        store.mover.wake()
    store.activity.call("save", Outcome.OK, store.clock.now() - began_s, published)
    return published


def _queue_for_lower_tiers(
    store: StoreParts,
    namespace: Namespace,
    held: Sequence[int],
    entered: Sequence[int],
    retention: Retention,
) -> None:
    """Queue saved rows, of which `entered` are new, as their retention says; under the lock."""
    table = store.table
    in_memory = [row for row in held if table.is_on(row, HOST)]
    if retention is Retention.DURABLE:
        store.durable_blocks.mark(namespace, [*held, *entered], store.clock.now())
    if namespace.domain == table.public:
        again = in_memory if retention is Retention.DURABLE else []
        table.write_public([*again, *entered])
    elif retention is Retention.EPHEMERAL:
        table.queues.keep_in_memory_only(entered)
        table.eviction.expect(entered, NEVER)
    elif retention is Retention.DURABLE:
        table.write_durable([*held, *entered])
    else:
        admitted = [*table.queues.admit_ephemeral(in_memory), *entered]
        for row in admitted if store.options.writes_behind else []:
            table.queues.save(row)


def _pack(store: StoreParts, record: memoryview, namespace: Namespace, header: Header) -> None:
    """Quantise the payload in a slot, if its namespace has a lossy codec, and pack it."""
    store.quantise.apply(namespace, payload(record, namespace.raw_bytes))
    pack(record, header)


def abort(store: StoreParts, number: int, *, rest_s: float = 0.0) -> None:
    """Free a reservation's slots after `rest_s` seconds, in which its writer may still write."""
    with store.table.lock:
        reservation = store.table.leases.take_reservation(number)
        if reservation is None:
            return
        until = store.clock.now() + rest_s
        if reservation.part:
            store.partial_blocks.abort(number, until)
        else:
            store.rest(reservation, until)
