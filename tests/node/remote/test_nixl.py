"""Records over NIXL between a node and a target, where both have it; over TCP where one has not."""

import logging
from itertools import repeat

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.codec.codec import codec_named
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.testing.payloads import (
    encoded_record,
    header_of,
    is_right,
    is_right_encoded,
    key_of,
    namespace_of,
    record_of,
)
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.wire.remote import nixl
from holdfast.wire.remote.buffer_pool import TransferBuffers, copy_parts
from holdfast.wire.remote.nixl import NixlAgent

pytestmark = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed")

NAMESPACE = namespace_of(300_000)
KEYS = [key_of(i) for i in range(20)]
RECORDS = [record_of(NAMESPACE, key) for key in KEYS]


@pytest.fixture(scope="module")
def transfer_buffers():
    transfer_buffers = TransferBuffers()
    assert transfer_buffers.wait(60) is not None
    return transfer_buffers


@pytest.fixture
def served(serve_here, transfer_buffers):
    """Call to serve a target, over NIXL if it `offer`s it, and a client with a window."""

    def start(offer=True):
        assert transfer_buffers.wait(60) is not None  # a test before may have spoiled the pool
        node = serve_here(NAMESPACE, host_bytes=32 * MIB, transfer_buffers=transfer_buffers)
        if offer:
            node.service.offer_nixl()
        return node

    return start


def test_records_are_transferred_by_nixl_and_not_over_the_socket(served):
    there = served()
    assert there.target.put(RECORDS, 60) == [Outcome.OK] * len(RECORDS)
    assert there.target.transport == "nixl"
    assert there.get(KEYS) == len(KEYS)
    assert there.service.counters.received_bytes == sum(map(len, RECORDS))


def test_encoded_records_are_transferred_by_nixl_with_their_own_length(served):
    there = served()
    encoded = [encoded_record(header_of(NAMESPACE, key), codec_named("planes")) for key in KEYS]
    assert all(len(record) < NAMESPACE.slot_bytes for record in encoded)
    records = [*encoded[:-1], RECORDS[-1]]
    assert there.target.put(records, 60) == [Outcome.OK] * len(records)
    assert there.service.counters.received_bytes == sum(map(len, records))
    into = [aligned_buffer(NAMESPACE.slot_bytes) for _ in KEYS]
    assert there.target.get(NAMESPACE, KEYS, into, 60).blocks == len(KEYS)
    assert there.target.transport == "nixl"
    assert all(is_right_encoded(*each) for each in zip(into[:-1], repeat(NAMESPACE), KEYS))
    assert is_right(into[-1], NAMESPACE, KEYS[-1])


def test_nixl_is_used_after_the_arena_released_its_memory(served):
    there = served()
    assert there.target.put(RECORDS, 60) == [Outcome.OK] * len(RECORDS)
    leave_all(there.store)
    assert StoreView(there.store).used_slots() == 0
    assert there.target.put(RECORDS, 60) == [Outcome.OK] * len(RECORDS)
    assert there.get(KEYS) == len(KEYS)
    assert there.target.transport == "nixl"


def test_a_target_switches_to_tcp_if_memory_cannot_be_registered(served, monkeypatch, caplog):
    there = served()
    assert there.target.put(RECORDS[:1], 60) == [Outcome.OK]

    def refuse(_):
        raise nixl.ProtocolError("nixl: no locked memory is left")

    monkeypatch.setattr(there.service.agent, "register", refuse)
    namespace = namespace_of(3_000_000)
    records = [record_of(namespace, key) for key in KEYS[:2]]
    assert there.target.put(records, 60) == [Outcome.OK] * 2
    assert there.get(KEYS[:2], namespace) == 2
    assert there.target.transport == "tcp"
    assert there.service.agent is None
    assert "records go over TCP from now on: nixl: no locked memory is left" in caplog.text


def test_slots_that_a_lost_transfer_may_read_stay_leased(served, monkeypatch):
    there = served()
    assert there.target.put(RECORDS, 60) == [Outcome.OK] * len(RECORDS)
    assert there.target.transport == "nixl"

    def lose(*_):
        raise nixl.MoveLostError("nixl: a transfer cannot be cancelled")

    with monkeypatch.context() as patch:
        patch.setattr(nixl.PeerMemory, "write", lose)
        assert there.get(KEYS[:3]) == 3  # over TCP
    # The same connection answers only after it has released the lease of the get before.
    assert there.target.exist(NAMESPACE, KEYS[:1], 60).outcome is Outcome.OK
    assert there.store.status().leases == 1


def test_a_get_ends_at_the_first_block_that_is_not_held(served):
    there = served()
    there.target.put(RECORDS[:5] + RECORDS[6:], 60)
    assert there.get(KEYS) == 5


def test_a_record_that_differs_from_its_announced_header_is_not_stored(served, monkeypatch):
    there = served()
    monkeypatch.setattr(
        "holdfast.wire.remote.connection.copy_parts",
        lambda parts, into: copy_parts([parts[0], *parts[:2]], into),
    )
    outcomes = there.target.put(RECORDS[:3], 60)
    assert outcomes == [Outcome.OK, Outcome.FULL, Outcome.FULL]


def test_a_target_without_nixl_gets_records_over_tcp_and_this_is_logged(served, caplog):
    there = served(offer=False)
    with caplog.at_level(logging.INFO, "holdfast"):
        assert there.target.put(RECORDS, 60) == [Outcome.OK] * len(RECORDS)
        assert there.get(KEYS) == len(KEYS)
    assert there.target.transport == "tcp"
    said = [line for line in caplog.messages if "over tcp" in line]
    assert len(said) == 1


def test_a_failed_transfer_is_repeated_over_tcp(served, monkeypatch):
    there = served()
    there.target.put(RECORDS, 60)

    def fail(*_):
        raise nixl.ProtocolError("nixl: the fabric is gone")

    monkeypatch.setattr(NixlAgent, "move", fail)
    assert there.get(KEYS) == len(KEYS)
    assert there.target.transport == "tcp"


def test_records_go_over_tcp_after_an_invalid_description_of_memory(served, monkeypatch):
    there = served()
    there.target.put(RECORDS, 60)
    monkeypatch.setattr("holdfast.wire.remote.connection.pack_spans", lambda _: bytes(16))
    assert there.get(KEYS[:3]) == 3
    assert there.target.transport == "tcp"


def test_nixl_is_not_offered_if_blocks_are_sealed(served, monkeypatch, caplog):
    there = served(offer=False)
    monkeypatch.setattr(there.store.table.sealing, "seals", lambda _: True)
    with caplog.at_level(logging.INFO, "holdfast"):
        there.service.offer_nixl()
    assert there.service.agent is None
    assert "nixl is not offered" in caplog.text
