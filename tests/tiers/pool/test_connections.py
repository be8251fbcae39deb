"""The connections of a pool: one to each member, none to where nobody is any more."""

import random

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import ConfigError, Outcome
from holdfast.membership.members import Member
from holdfast.tiers.pool.connections import TargetConnections
from holdfast.tiers.pool.health import HealthOptions, PoolHealth
from holdfast.tiers.pool.target_statistics import CallKind
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.wire.remote.client import ReceivedRecords


class FarSide:
    def __init__(self, address):
        self.address = address
        self.closed = False
        self.page = address.replace("tcp", "http").replace("7070", "9464/")

    def close(self):
        self.closed = True


@pytest.fixture
def made():
    return []


@pytest.fixture
def health():
    judged = PoolHealth(ManualClock(1.0), HealthOptions(), random.Random(1))
    judged.keep(["a", "b"])
    return judged


@pytest.fixture
def counts():
    return TransferCounts()


@pytest.fixture
def connections(made, health, counts):
    def connect(member):
        if "nowhere" in member.address:
            raise ConfigError("no such place")
        made.append(FarSide(member.address))
        return made[-1]

    return TargetConnections(connect, health, counts)


def at(address, name="a"):
    return Member(id=name, address=address)


class Called:
    """Calls that note their target, and succeed."""

    def __init__(self):
        self.targets = []

    def __call__(self, target, on_progress):
        self.targets.append(target)
        return [Outcome.OK]


def test_a_member_is_connected_to_once(connections, made):
    called = Called()
    for _ in range(2):
        assert connections.call(at("tcp://h:1"), called) == [Outcome.OK]
    assert called.targets == [made[0]] * 2
    assert len(made) == 1


def test_a_member_that_moved_is_reconnected_and_its_old_connection_is_closed_later(
    connections, made
):
    called = Called()
    connections.call(at("tcp://h:1"), called)
    connections.call(at("tcp://h:2"), called)
    assert called.targets == made
    assert not made[0].closed  # a call may be under way on it
    connections.keep(["a"])
    assert [far.closed for far in made] == [True, False]


def test_a_failed_connection_leaves_no_call_in_flight_and_keeps_the_old_connection(
    connections, made, health, caplog
):
    called = Called()
    connections.call(at("tcp://h:1"), called, 5)
    assert [connections.call(at("tcp://nowhere:1"), called, 5) for _ in range(9)] == [None] * 9
    assert caplog.text.count("is not asked: no such place") == 1
    assert health.trusted("a")
    assert [report.in_flight_bytes for report in health.reports()] == [0, 0]
    connections.call(at("tcp://h:1"), called, 5)
    assert called.targets == [made[0]] * 2
    assert not made[0].closed


def test_the_latency_of_a_read_is_the_time_to_its_first_byte(connections, health):
    def get(_, on_progress):
        health._clock.advance(0.002)
        on_progress(48)
        health._clock.advance(0.5)
        on_progress(1 << 20)
        return ReceivedRecords(4, Outcome.OK)

    got = connections.call(at("tcp://h:1"), get, 1 << 20, CallKind.READ)
    assert got == ReceivedRecords(4, Outcome.OK)
    assert health.reports()[0].first_byte_s == pytest.approx(0.002)


@pytest.mark.parametrize(("blocks", "first_byte_s"), [(0, None), (1, 0.3)])
def test_a_read_without_blocks_is_a_success_and_yields_no_read_latency(
    connections, health, counts, blocks, first_byte_s
):
    def get(*_):
        health._clock.advance(0.3)
        return ReceivedRecords(blocks, Outcome.MISS)

    got = connections.call(at("tcp://h:1"), get, 1 << 20, CallKind.READ)
    assert got.blocks == blocks
    report = health.reports()[0]
    assert report.first_byte_s == (first_byte_s and pytest.approx(first_byte_s))
    assert report.failure_share == counts.usage().failures == 0


def test_the_reported_trouble_of_a_member_that_left_is_forgotten(connections, counts, caplog):
    for address in ("tcp://h:1", "tcp://nowhere:1"):
        connections.call(at(address), lambda target, _: failed(target))
    assert connections.trouble("a") == "broken"
    assert counts.usage().failures == 1
    connections.keep(["b"])
    assert connections.trouble("a") == ""
    connections.call(at("tcp://nowhere:1"), Called())
    assert caplog.text.count("is not asked: no such place") == 2


def failed(target):
    target.trouble = "broken"
    return [Outcome.GONE]


def test_a_close_closes_all_connections(connections, made):
    for address in ("tcp://h:1", "tcp://h:2", "tcp://h:3"):
        connections.call(at(address), Called())
    connections.call(at("tcp://h:9", "b"), Called())
    connections.close()
    assert [far.closed for far in made] == [True] * 4


def test_the_page_of_a_member_is_known_once_it_is_connected(connections):
    assert connections.page("a") == ""
    connections.call(at("tcp://here:7070"), lambda target, _: ReceivedRecords(0, Outcome.MISS))
    assert connections.page("a") == "http://here:9464/"
    connections.keep([])
    assert connections.page("a") == ""
