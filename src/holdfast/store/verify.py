"""Verify copies of blocks: the one place where the store trusts or distrusts a stored record.

Records in the arenas of this store's domains are plain, so their checksum is verified in place.
Every other record may be sealed or may belong to a domain without a key here;
`holdfast.store.sealing` checks and opens it. `holdfast.store.receive` calls it for records that are
not stored yet. A record that is encoded is decoded after it was verified and opened.
"""

from __future__ import annotations

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.coded import decode_verified
from holdfast.codec.pack import verify, verify_stored
from holdfast.errors import Outcome
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.evict import reserve_slots
from holdfast.tiers.base import NOWHERE, Place, TierGet
from holdfast.wire.remote.buffer_pool import copy_parts


def read_copy(table: BlockTable, row: int, tier: int, place: Place) -> tuple[Outcome, memoryview]:
    """Return the record of a pinned row at a place; unverified, and undefined if it is not OK.

    Of a copy in memory, it is the slot. Of a shorter record, what follows it is undefined.
    """
    namespace, key = table.index.namespace(row), table.index.keys[row] or b""
    if tier == HOST:
        return Outcome.OK, table.host(namespace).view(place, namespace.slot_bytes)
    record = aligned_buffer(namespace.slot_bytes)
    get = TierGet(place, key, record, namespace, is_use=False)
    return table.lower[tier - 1].read([get])[0], record


def verify_record(
    table: BlockTable, record: memoryview, key: bytes, namespace: Namespace, tier: int
) -> Outcome:
    """Verify a record that was read from a tier; opens a sealed one from a lower tier in place.

    OK says nothing about the form: the record may be encoded.
    """
    if tier == HOST and namespace.domain in table.hosts:
        return verify_stored(record, key, namespace.fingerprint, namespace.raw_bytes)
    return table.sealing.check_and_open(record, key, namespace)


def verify_to_decode(
    table: BlockTable, record: memoryview, key: bytes, namespace: Namespace
) -> Outcome:
    """Verify an encoded record that was read from a lower tier and is decoded next.

    Decrypts a sealed one in place; without a tag, because the decoded record gets its own.
    """
    return table.sealing.check_and_decrypt(record, key, namespace)


def verify_as_stored(
    table: BlockTable, record: memoryview, key: bytes, namespace: Namespace, scratch: memoryview
) -> Outcome:
    """Verify a record from a lower tier and leave it as it is stored there.

    A sealed record of a domain with a key here is opened in `scratch`, which is as long. A sealed
    one of another domain is checked as far as that is possible without the key.
    """
    header = header_of_record(record)
    if header is None or not table.sealing.must_open(header):
        return table.sealing.check_and_open(record, key, namespace)
    if header.stored_bytes > len(record):
        return Outcome.CORRUPT
    opened = scratch[: header.stored_bytes]
    copy_parts([record[: header.stored_bytes]], [opened])
    return table.sealing.check_and_open(opened, key, namespace)


def verify_in_memory(table: BlockTable, row: int) -> Place:
    """Verify the host copy of a leased or pinned row; quarantine it if the check fails.

    Returns its place; NOWHERE if there is no copy, or if the check failed. A copy that another node
    sent encoded is decoded into another slot first, and also left as it is if no slot is free.
    Takes the lock only to move or to quarantine. If the lease expires during the check, the slot
    may hold another block: then nothing is quarantined, and the place does not match the row's any
    more.
    """
    place, key = table.copies.place(row, HOST), table.index.keys[row]
    if place < 0 or key is None:
        return NOWHERE
    namespace = table.index.namespace(row)
    record = table.host(namespace).view(place, namespace.slot_bytes)
    if row in table.encoded and namespace.domain in table.hosts:
        return _decode_in_memory(table, row, place, record)
    if namespace.domain in table.hosts:
        outcome = verify(record, key, namespace.fingerprint, namespace.raw_bytes)
    else:
        outcome = table.sealing.check_and_open(record, key, namespace)
    if outcome is Outcome.OK:
        return place
    with table.lock:
        if table.copies.place(row, HOST) == place and table.index.keys[row] == key:
            table.quarantine(row, HOST, outcome)
    return NOWHERE


def is_damaged_in_memory(table: BlockTable, row: int) -> bool:
    """Return whether the host copy of a pinned row fails its check, and quarantine it then."""
    place, key = table.copies.place(row, HOST), table.index.keys[row]
    if place < 0 or key is None:
        return True
    namespace = table.index.namespace(row)
    record = table.host(namespace).view(place, namespace.slot_bytes)
    outcome = verify_record(table, record, key, namespace, HOST)
    if outcome is not Outcome.OK:
        with table.lock:
            if table.copies.place(row, HOST) == place and table.index.keys[row] == key:
                table.quarantine(row, HOST, outcome)
    return outcome is not Outcome.OK


def _decode_in_memory(table: BlockTable, row: int, place: Place, record: memoryview) -> Place:
    """Decode the host copy of a leased row into a slot of its own; return that, or NOWHERE."""
    namespace, key = table.index.namespace(row), table.index.keys[row]
    with table.lock:
        slots = reserve_slots(table, namespace, 1)
    if not slots:
        return NOWHERE
    into, outcome = table.host(namespace).view(slots[0], namespace.slot_bytes), Outcome.MISS
    try:
        outcome = verify_stored(record, key or b"", namespace.fingerprint, namespace.raw_bytes)
        if outcome is Outcome.OK:
            outcome = decode_verified(record, into)
    finally:
        with table.lock:
            there = table.copies.place(row, HOST) == place and table.index.keys[row] == key
            if there and outcome is Outcome.OK:
                table.replace_here(row, slots[0])
            else:
                table.give_back(namespace, slots)
                if there:
                    table.quarantine(row, HOST, outcome)
    if not there:  # another fetch may have decoded it, or it was dropped
        return verify_in_memory(table, row) if table.index.keys[row] == key else NOWHERE
    return slots[0] if outcome is Outcome.OK else NOWHERE
