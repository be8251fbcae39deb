"""Routes: the owner, its stand-in, and whoever it was before."""

import random

import pytest

from holdfast.clock import ManualClock
from holdfast.membership.members import Member, MemberState
from holdfast.membership.membership import Membership, MembershipOptions
from holdfast.membership.placement import Placement
from holdfast.tiers.pool.lookup import SegmentLookup

SEGMENTS = [random.Random(number).randbytes(8) for number in range(2_000)]


def members(count):
    return [Member(id=f"n{n:02}", address=f"tcp://10.0.0.{n}:7070") for n in range(count)]


class Scene:
    def __init__(self, *listed, unseen_s=0.0):
        self.clock = ManualClock()
        self.membership = Membership(self.clock, MembershipOptions(unseen_s=unseen_s))
        self.down = set()
        self.membership.observe(listed)
        self.unsure = set()
        self.lookup = SegmentLookup(
            self.membership, lambda name: name not in self.down, lambda name: name in self.unsure
        )

    def observe(self, *listed, after_s=60.0):
        self.clock.advance(after_s)
        self.membership.observe(listed)

    def write(self, segment_id, copies=1):
        return [m.id for m in self.lookup.route(segment_id, copies).write]

    def read(self, segment_id, copies=1):
        return [m.id for m in self.lookup.route(segment_id, copies).read]


def test_the_owner_is_written_and_read():
    scene = Scene(*members(5))
    placement = Placement(members(5))
    for name in SEGMENTS[:100]:
        owner = placement.order(name)[0].id
        assert scene.write(name) == scene.read(name) == [owner]


def test_copies_are_the_first_of_the_ranking():
    scene = Scene(*members(5))
    for name in SEGMENTS[:100]:
        assert scene.write(name, 2) == [m.id for m in Placement(members(5)).order(name)[:2]]


def test_the_next_ranked_member_replaces_one_that_is_down_and_no_other_segment_moves():
    scene = Scene(*members(5))
    before = {name: scene.write(name) for name in SEGMENTS}
    scene.down = {"n03"}
    for name in SEGMENTS:
        second = Placement(members(5)).order(name)[1].id
        assert scene.write(name) == ([second] if before[name] == ["n03"] else before[name])
    assert scene.membership.views().current.view.epoch == 1
    scene.down = set()
    assert {name: scene.write(name) for name in SEGMENTS} == before


def test_a_substitute_is_also_read_while_the_owner_is_unsure():
    scene = Scene(*members(5))
    scene.down = scene.unsure = {"n03"}
    stood_in = {name: scene.write(name)[0] for name in SEGMENTS}
    scene.down = set()
    for name in SEGMENTS:
        order = [m.id for m in Placement(members(5)).order(name)]
        doubted = order[0] == "n03"
        assert scene.read(name) == order[: 1 + doubted]
        assert stood_in[name] in scene.read(name)
    scene.unsure = set()
    assert all(len(scene.read(name)) == 1 for name in SEGMENTS)


def test_a_route_is_empty_if_all_members_are_down():
    scene = Scene(*members(3))
    scene.down = {"n00", "n01", "n02"}
    route = scene.lookup.route(SEGMENTS[0])
    assert route.write == route.read == ()


def test_a_route_is_empty_if_there_are_no_members():
    lookup = SegmentLookup(Membership(ManualClock()), lambda _: True)
    assert lookup.route(SEGMENTS[0]).read == ()
    assert lookup.shares() == {}
    assert lookup.members() == ()


def test_every_segment_is_found_during_the_whole_ramp_of_a_new_member():
    scene = Scene(*members(8))
    held = {name: scene.write(name)[0] for name in SEGMENTS}
    scene.observe(*members(9))
    moved = []
    for _ in range(20):
        assert all(held[name] in scene.read(name) for name in SEGMENTS)
        moved.append(sum(scene.write(name) != [held[name]] for name in SEGMENTS) / len(SEGMENTS))
        scene.clock.advance(20)
    assert moved == sorted(moved)
    assert moved[0] < 0.015
    assert moved[-1] == pytest.approx(1 / 9, rel=0.15)


def test_a_drained_member_is_read_but_not_written():
    scene = Scene(*members(4))
    held = {name: scene.write(name)[0] for name in SEGMENTS}
    draining = Member(id="n02", address="tcp://10.0.0.2:7070", state=MemberState.DRAINING)
    scene.observe(*members(2), draining, members(4)[3])
    for name in SEGMENTS:
        assert scene.write(name) != ["n02"]
        assert held[name] in scene.read(name)
    scene.clock.advance(600)
    assert not any("n02" in scene.read(name) for name in SEGMENTS)


def test_a_member_removed_from_the_list_is_still_read_for_a_time():
    scene = Scene(*members(4))
    held = {name: scene.write(name)[0] for name in SEGMENTS}
    scene.observe(*members(3))
    scene.clock.advance(15)
    assert all(held[name] in scene.read(name) for name in SEGMENTS)
    assert {m.id for m in scene.lookup.members()} == {"n00", "n01", "n02", "n03"}


def test_a_previous_owner_is_read_at_its_current_address():
    scene = Scene(*members(4))
    moved = [Member(id=m.id, address="tcp://192.0.2.1:1") for m in members(4)]
    scene.observe(*moved, *members(5)[4:])
    for name in SEGMENTS[:200]:
        old = [m for m in scene.lookup.route(name).read if m.id != "n04"]
        assert all(m.address == "tcp://192.0.2.1:1" for m in old)


def test_no_member_occurs_twice_in_a_route():
    scene = Scene(*members(6))
    scene.observe(*members(7))
    scene.down = {"n01"}
    for name in SEGMENTS:
        read = scene.read(name, 2)
        assert len(read) == len(set(read)) <= 4


def test_shares_follow_weights_and_the_ramp():
    scene = Scene(*members(3))
    scene.observe(*members(3), Member(id="big", address="tcp://10.0.1.1:1", weight=3.0))
    assert scene.lookup.shares()["big"] == pytest.approx(3 / 16 / (3 + 3 / 16))
    scene.clock.advance(300)
    assert scene.lookup.shares()["big"] == pytest.approx(0.5)


def test_a_segment_written_by_a_later_process_is_found_during_the_ramp_of_its_owner():
    early, late = Scene(*members(3)), Scene(*members(4))
    early.observe(*members(4))
    for name in SEGMENTS:
        assert set(late.write(name)) <= set(early.read(name))


def fresh(*listed):
    """A process that has just started, and knows the list only."""
    return Scene(*listed, unseen_s=600.0)


@pytest.mark.parametrize("joined", [1, 2])
def test_a_new_process_also_reads_the_owners_from_before_members_joined(joined):
    before = Scene(*members(8))
    held = {name: before.write(name)[0] for name in SEGMENTS}
    scene = fresh(*members(8 + joined))
    assert all(held[name] in scene.read(name) for name in SEGMENTS)
    assert all(len(scene.read(name)) <= 3 for name in SEGMENTS)


def test_a_new_process_reads_draining_members():
    before = Scene(*members(8))
    held = {name: before.write(name)[0] for name in SEGMENTS}
    listed = members(8)
    listed[3] = Member(id="n03", address=listed[3].address, state=MemberState.DRAINING)
    scene = fresh(*listed)
    assert all(held[name] in scene.read(name) for name in SEGMENTS)
    assert all(scene.write(name) != ["n03"] for name in SEGMENTS)


def test_a_process_that_started_long_ago_reads_the_owner_only():
    scene = fresh(*members(8))
    assert any(len(scene.read(name)) > 1 for name in SEGMENTS)
    scene.clock.advance(601)
    assert all(len(scene.read(name)) == 1 for name in SEGMENTS)
