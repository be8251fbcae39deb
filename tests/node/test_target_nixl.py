"""Records over NIXL between a node and a target, where both have it; over TCP where one has not."""

import contextlib
import logging

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.node.target import Entry, TargetServer, address_of, bind
from holdfast.node.target_service import Service
from holdfast.store.store import Store
from holdfast.testing.payloads import is_right, key_of, record_of, world_of
from holdfast.wire import nixl
from holdfast.wire.nixl import Agent
from holdfast.wire.target import Target
from holdfast.wire.window import Lane, Road

pytestmark = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed")

WORLD = world_of(300_000)
KEYS = [key_of(i) for i in range(20)]
RECORDS = [record_of(WORLD, key) for key in KEYS]


@pytest.fixture(scope="module")
def road():
    road = Road()
    assert road.wait(60) is not None
    return road


class Served:
    """A target in this process, its service, and a client with a window."""

    def __init__(self, undo, road, *, offer):
        store = Store(32 * MIB, [], {"default": b"s" * 32})
        undo.callback(store.close)
        store.take_foreign()
        store.start()
        self.service = Service(store)
        undo.callback(self.service.close)
        if offer:
            self.service.offer_nixl()
        listener = bind("tcp://127.0.0.1:0")
        server = TargetServer(listener, self.service, Entry())
        server.start()
        undo.callback(server.close)
        self.target = Target(address_of(listener), road=road)
        undo.callback(self.target.close)

    def get(self, keys):
        into = [aligned_buffer(WORLD.record_bytes) for _ in keys]
        got = self.target.get(WORLD, keys, into, 10)
        for key, record in zip(keys[: got.blocks], into, strict=False):
            assert is_right(record, WORLD, key)
        return got.blocks


@pytest.fixture
def served(road):
    with contextlib.ExitStack() as undo:
        yield lambda offer=True: Served(undo, road, offer=offer)


def test_records_come_back_and_none_crosses_the_socket(served):
    there = served()
    assert there.target.put(RECORDS, 10) == [Outcome.OK] * len(RECORDS)
    assert there.target.over == "nixl"
    assert there.get(KEYS) == len(KEYS)
    assert there.service.counters.received_bytes == sum(map(len, RECORDS))


def test_a_run_ends_at_the_first_block_that_is_not_held(served):
    there = served()
    there.target.put(RECORDS[:5] + RECORDS[6:], 10)
    assert there.get(KEYS) == 5


def test_a_record_that_is_not_the_one_announced_is_not_held(served, monkeypatch):
    there = served()
    lane_fill = Lane.fill
    monkeypatch.setattr(Lane, "fill", lambda lane, parts: lane_fill(lane, [parts[0], *parts[:2]]))
    outcomes = there.target.put(RECORDS[:3], 10)
    assert outcomes == [Outcome.OK, Outcome.FULL, Outcome.FULL]


def test_a_target_without_it_gets_records_over_tcp_and_a_log_line(served, caplog):
    there = served(offer=False)
    with caplog.at_level(logging.INFO, "holdfast"):
        assert there.target.put(RECORDS, 10) == [Outcome.OK] * len(RECORDS)
        assert there.get(KEYS) == len(KEYS)
    assert there.target.over == "tcp"
    said = [line for line in caplog.messages if "over tcp" in line]
    assert len(said) == 1


def test_a_failed_transfer_is_made_up_for_over_tcp(served, monkeypatch):
    there = served()
    there.target.put(RECORDS, 10)

    def fail(*_):
        raise nixl.ProtocolError("nixl: the fabric is gone")

    monkeypatch.setattr(Agent, "write", fail)
    assert there.get(KEYS) == len(KEYS)
    assert there.target.over == "tcp"


def test_a_peer_that_describes_its_memory_wrongly_is_cut_off(served, monkeypatch):
    there = served()
    there.target.put(RECORDS, 10)
    monkeypatch.setattr("holdfast.wire.target_connection.pack_spans", lambda _: bytes(16))
    assert there.get(KEYS[:3]) == 3
    assert there.target.over == "tcp"
