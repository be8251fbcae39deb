"""Verify copies of blocks: the one place where the store trusts or distrusts a stored record.

Records in the arenas of this store's domains are plain, so their checksum is verified in place.
Every other record may be sealed or may belong to a domain without a key here;
`holdfast.store.sealing` checks and opens it. `holdfast.store.receive` calls it for records that are
not stored yet.
"""

from __future__ import annotations

from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import verify
from holdfast.errors import Outcome
from holdfast.store.block_table import HOST, BlockTable
from holdfast.tiers.base import NOWHERE, Place, TierGet


def read_copy(table: BlockTable, row: int, tier: int, place: Place) -> tuple[Outcome, memoryview]:
    """Return the record of a pinned row at a place; unverified, and undefined if it is not OK.

    Of a copy in memory, it is the slot.
    """
    namespace, key = table.index.namespace(row), table.index.keys[row] or b""
    if tier == HOST:
        return Outcome.OK, table.host(namespace).view(place, namespace.slot_bytes)
    record = aligned_buffer(namespace.slot_bytes)
    return table.lower[tier - 1].read([TierGet(place, key, record, namespace)])[0], record


def verify_record(
    table: BlockTable, record: memoryview, key: bytes, namespace: Namespace, tier: int
) -> Outcome:
    """Verify a record that was read from a tier; opens a sealed one from a lower tier in place."""
    if tier == HOST and namespace.domain in table.hosts:
        return verify(record, key, namespace.fingerprint, namespace.raw_bytes)
    return table.sealing.check_and_open(record, key, namespace)


def verify_in_memory(table: BlockTable, row: int) -> Place:
    """Verify the host copy of a leased or pinned row; quarantine it if the check fails.

    Returns its place; NOWHERE if there is no copy, or if the check failed. Takes the lock only to
    quarantine. If the lease expires during the check, the slot may hold another block: then nothing
    is quarantined, and the place does not match the row's any more.
    """
    place, key = Place(table.index.places[HOST][row]), table.index.keys[row]
    if place < 0 or key is None:
        return NOWHERE
    namespace = table.index.namespace(row)
    record = table.host(namespace).view(place, namespace.slot_bytes)
    outcome = verify_record(table, record, key, namespace, HOST)
    if outcome is Outcome.OK:
        return place
    with table.lock:
        if table.index.places[HOST][row] == place and table.index.keys[row] == key:
            table.quarantine(row, HOST, outcome)
    return NOWHERE
