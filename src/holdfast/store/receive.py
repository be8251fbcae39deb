"""Receive packed records from other nodes into host slots and publish them.

`receive_slots` reserves a slot for each announced header, the caller receives the bytes into it,
and `publish_received` publishes the records that begin with the announced header. This node may
lack the domain's key, so it does not hash payloads: they are unverified until read. Every reader
verifies, and reports a corrupt record. An encoded record stays encoded, in a slot of the decoded
size, until an engine of this node reads it. `discard_received` frees slots that were not filled.
docs/decisions gives the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, groupby
from typing import NamedTuple

from holdfast.blocks.envelope import (
    CODEC_NONE,
    HEADER_BYTES,
    SEAL_NONE,
    Header,
    header_of_record,
)
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.errors import Outcome
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.evict import reserve_slots, slots
from holdfast.store.leases import Generation
from holdfast.tiers.base import NOWHERE, Place


class ReceiveSlot(NamedTuple):
    """The slot for one announced record, or None; `held` if this node already has the record."""

    header: Header
    namespace: Namespace
    place: Place
    generation: Generation
    slot: memoryview | None
    held: bool

    @property
    def record(self) -> memoryview | None:
        """The part of the slot for the record: an encoded one is shorter than its slot."""
        return None if self.slot is None else self.slot[: self.header.stored_bytes]


def receive_slots(store: StoreParts, headers: Sequence[Header]) -> list[ReceiveSlot]:
    """Reserve a slot for each announced record that is not held and fits; state only, no I/O.

    Unsealed records of the public domain get no slot. The caller owns the slots and must pass them
    to `publish_received` or `discard_received`.
    """
    of_namespace: dict[Namespace, list[int]] = {}
    for namespace, group in groupby(range(len(headers)), lambda i: namespace_of(headers[i])):
        of_namespace.setdefault(namespace, []).extend(group)
    table, receive_slots = store.table, dict[int, ReceiveSlot]()
    with table.lock:
        for namespace in of_namespace:
            table.host(namespace)  # raises before any slot is reserved
        for namespace, numbers in of_namespace.items():
            rows = table.index.find_all(namespace, [headers[i].key for i in numbers])
            held = [
                row >= 0
                and table.index.fastest(row) >= 0
                and not _replaces(table, namespace, headers[i], row)
                for row, i in zip(rows, numbers, strict=True)
            ]
            for row in compress(rows, held):
                table.touch([row])  # one by one, because the rows may be of different chains
            possible = slots(table, namespace) > 0
            wanted = [
                # A public record must be sealed, because any peer may send it.
                possible
                and not is_held
                and (namespace.domain != table.public or headers[i].seal != SEAL_NONE)
                for is_held, i in zip(held, numbers, strict=True)
            ]
            places = iter(reserve_slots(table, namespace, wanted.count(True)))
            size, view = namespace.slot_bytes, table.host(namespace).view
            generation = table.generation(namespace)
            for i, is_held, wants in zip(numbers, held, wanted, strict=True):
                place = next(places, NOWHERE) if wants else NOWHERE
                slot = None if place == NOWHERE else view(place, size)
                receive_slots[i] = ReceiveSlot(
                    headers[i], namespace, place, generation, slot, is_held
                )
    if any(each.slot is None and not each.held for each in receive_slots.values()):
        store.mover.wake()  # write blocks below, so that they become evictable
    return [receive_slots[i] for i in range(len(headers))]


def publish_received(
    store: StoreParts, receive_slots: Sequence[ReceiveSlot], announced: bytes = b""
) -> list[Outcome]:
    """Publish completely filled slots: OK (now held), FULL (it had no slot), or CORRUPT.

    A record is CORRUPT if it does not begin with its announced header, if this node seals its
    domain and cannot open it, or if its domain was erased since its slot was reserved. It is FULL
    if its fingerprint was dropped since. `announced` holds all headers as received; if the records
    begin with the same bytes, their headers are not compared one by one. A message that the receive
    budget turned away has no slots at all; its call counts as FULL.
    """
    table, index, began_s = store.table, store.table.index, store.clock.now()
    opens = [table.sealing.must_open(each.header) for each in receive_slots]
    outcomes = _check(table, receive_slots, opens, announced)
    taken: dict[Namespace, dict[int, Place]] = {}
    with table.lock:
        namespaces = {each.namespace for each in receive_slots}
        generations = {namespace: table.generation(namespace) for namespace in namespaces}
        dropping = {namespace for namespace in namespaces if table.drops.is_running(namespace)}
        for i, each in enumerate(receive_slots):
            if each.slot is None:
                continue
            header, namespace = each.header, each.namespace
            row, here = index.find(namespace, header.key), taken.setdefault(namespace, {})
            if generations[namespace] != each.generation or namespace in dropping:
                erased = generations[namespace].erasures != each.generation.erasures
                outcomes[i] = Outcome.CORRUPT if erased else Outcome.FULL
            if row >= 0 and outcomes[i] is Outcome.OK and _replaces(table, namespace, header, row):
                # This one replaces a doubted record on every tier.
                table.remove_copies(row)
                table.unverified_records.unmark(namespace, header.key)
                row = index.find(namespace, header.key)
            in_memory = row >= 0 and (table.is_on(row, HOST) or table.is_arriving(row))
            if outcomes[i] is not Outcome.OK or row in here or in_memory:
                table.give_back(namespace, [each.place])
            else:
                row = index.add(namespace, header.key, header.parent, header.depth)
                here[row] = each.place
                if header.codec != CODEC_NONE:
                    table.encoded.add(row)
                if not opens[i]:
                    table.unverified.add(row)
        for namespace, here in taken.items():
            table.publish_here(namespace, here)
        entered = [row for here in taken.values() for row in here]
        table.enter_new(entered)
        for namespace, here in taken.items() if table.lower else ():
            if namespace.domain == table.public:
                table.write_public(list(here))
            elif store.options.writes_behind:
                for row in here:
                    table.queues.save(row)
    if entered and table.lower:
        store.mover.wake()
    if_all_ok = Outcome.OK if receive_slots else Outcome.FULL
    worst = next((each for each in outcomes if each is not Outcome.OK), if_all_ok)
    store.activity.call("receive", worst, store.clock.now() - began_s, len(entered))
    return outcomes


def _check(
    table: BlockTable, receive_slots: Sequence[ReceiveSlot], opens: Sequence[bool], announced: bytes
) -> list[Outcome]:
    """Return the outcome of each filled slot, before it is published; open those of `opens`."""
    records = [each.record for each in receive_slots]
    begun = b"".join(record[:HEADER_BYTES] for record in records if record is not None)
    headers_match = begun == announced
    outcomes: list[Outcome] = []
    for each, record, is_opened in zip(receive_slots, records, opens, strict=True):
        if record is None:
            outcome = Outcome.OK if each.held else Outcome.FULL
        elif not (headers_match or header_of_record(record) == each.header):
            outcome = Outcome.CORRUPT
        elif is_opened:
            landed = table.sealing.check_and_open(record, each.header.key, each.namespace)
            outcome = Outcome.OK if landed is Outcome.OK else Outcome.CORRUPT
        else:
            outcome = Outcome.OK
        outcomes.append(outcome)
    return outcomes


def discard_received(store: StoreParts, receive_slots: Sequence[ReceiveSlot]) -> None:
    """Free slots that will not be published; the caller must have stopped writing to them."""
    with store.table.lock:
        for each in receive_slots:
            if each.place != NOWHERE:
                store.table.give_back(each.namespace, [each.place])


def _replaces(table: BlockTable, namespace: Namespace, header: Header, row: int) -> bool:
    """Return whether a new record replaces the doubted one of a row. Call under the lock."""
    return row not in table.copies.fillings(HOST) and table.unverified_records.is_replaced_by(
        namespace, header
    )
