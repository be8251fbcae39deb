"""The connections of a pool: one to each member, none to where nobody is any more."""

import random

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import ConfigError, Outcome
from holdfast.membership.members import Member
from holdfast.tiers.pool.connections import TargetConnections
from holdfast.tiers.pool.health import HealthOptions, PoolHealth
from holdfast.tiers.pool.target_statistics import CallKind
from holdfast.wire.remote.client import ReceivedRecords


class FarSide:
    def __init__(self, address):
        self.address = address
        self.closed = False

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
def connections(made, health):
    def connect(member):
        if "nowhere" in member.address:
            raise ConfigError("no such place")
        made.append(FarSide(member.address))
        return made[-1]

    return TargetConnections(connect, health)


def at(address, name="a"):
    return Member(id=name, address=address)


def test_a_member_is_connected_to_once(connections, made):
    first, again = connections.begin(at("tcp://h:1"), 1), connections.begin(at("tcp://h:1"), 1)
    assert first.target is again.target
    assert len(made) == 1


def test_who_moved_is_reached_anew_and_the_old_connections_end_with_the_next_view(
    connections, made
):
    connections.begin(at("tcp://h:1"), 1)
    assert connections.begin(at("tcp://h:2"), 1).target is made[1]
    assert not made[0].closed  # a call may be under way on it
    connections.keep(["a"])
    assert [far.closed for far in made] == [True, False]


def test_who_can_not_be_connected_to_has_nothing_under_way_and_keeps_what_there_was(
    connections, made, health, caplog
):
    connections.run(connections.begin(at("tcp://h:1"), 5), lambda _: [Outcome.OK])
    assert [connections.begin(at("tcp://nowhere:1"), 5) for _ in range(9)] == [None] * 9
    assert caplog.text.count("is not asked: no such place") == 1
    assert health.trusted("a")
    assert [report.in_flight_bytes for report in health.reports()] == [0, 0]
    assert connections.begin(at("tcp://h:1"), 5).target is made[0]
    assert not made[0].closed


def test_of_a_read_counts_when_its_first_byte_came(connections, health):
    call = connections.begin(at("tcp://h:1"), 1 << 20, CallKind.READ)
    on_progress = connections.on_progress(call)

    def get(_):
        health._clock.advance(0.002)
        on_progress(48)
        health._clock.advance(0.5)
        on_progress(1 << 20)
        return ReceivedRecords(4, Outcome.OK)

    assert connections.run(call, get) == ReceivedRecords(4, Outcome.OK)
    assert health.reports()[0].first_byte_s == pytest.approx(0.002)
    assert connections.on_progress(None) is None


@pytest.mark.parametrize(("blocks", "first_byte_s"), [(0, None), (1, 0.3)])
def test_a_read_that_brings_nothing_went_well_and_is_no_measure_of_reads(
    connections, health, blocks, first_byte_s
):
    call = connections.begin(at("tcp://h:1"), 1 << 20, CallKind.READ)
    health._clock.advance(0.3)
    assert connections.run(call, lambda _: ReceivedRecords(blocks, Outcome.MISS)).blocks == blocks
    report = health.reports()[0]
    assert report.first_byte_s == (first_byte_s and pytest.approx(first_byte_s))
    assert report.failure_share == connections.failures == 0


def test_nothing_stays_connected_at_the_end(connections, made):
    for address in ("tcp://h:1", "tcp://h:2", "tcp://h:3"):
        connections.begin(at(address), 1)
    connections.begin(at("tcp://h:9", "b"), 1)
    connections.close()
    assert [far.closed for far in made] == [True] * 4
