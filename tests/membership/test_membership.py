"""Views change when they should, and only then."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.membership.members import Member, MemberState, PoolView
from holdfast.membership.membership import Membership, MembershipOptions

DEAD_AFTER_S, OVERLAP_S, RAMP_S, FLEETING_S = 15.0, 600.0, 300.0, 5.0


def member(name, **fields):
    return Member(id=name, address=f"tcp://{name}:7070", **fields)


A, B, C = member("a"), member("b"), member("c")


class Scene:
    """A membership, its clock, and what is asked of them again and again."""

    def __init__(self, *members):
        self.clock = ManualClock(1_000.0)
        self.membership = Membership(self.clock, MembershipOptions())
        if members:
            self.membership.observe(members)

    def observe(self, *members, after_s=0.0):
        self.clock.advance(after_s)
        self.membership.observe(members)

    def after(self, seconds):
        self.clock.advance(seconds)
        return self

    @property
    def view(self):
        return self.membership.views().current.view

    @property
    def shares(self):
        return self.membership.views().current.shares

    @property
    def previous(self):
        placed = self.membership.views().previous
        return placed and placed.view

    @property
    def ids(self):
        return "".join(each.id for each in self.view.members)

    def member(self, member_id):
        return next(each for each in self.view.members if each.id == member_id)

    @property
    def placed_ids(self):
        return "".join(each.id for each in self.view.members if each.takes_segments)


def test_a_view_is_empty_before_the_first_list():
    scene = Scene()
    assert (scene.ids, scene.view.epoch, scene.previous) == ("", 0, None)


def test_the_first_list_is_taken_whole_and_at_full_weight():
    scene = Scene(B, A)
    assert (scene.ids, scene.view.epoch, scene.shares, scene.previous) == ("ab", 1, {}, None)


def test_a_missing_member_is_out_only_after_a_while():
    scene = Scene(A, B)
    scene.observe(A)
    assert scene.after(DEAD_AFTER_S - 0.1).ids == "ab"
    assert scene.view.epoch == 1
    assert scene.after(0.1).ids == "a"
    assert scene.view.epoch == 2


def test_a_member_that_is_called_dead_is_missing():
    scene = Scene(A, B)
    scene.observe(A, member("b", state=MemberState.DEAD))
    assert scene.ids == "ab"
    assert scene.after(DEAD_AFTER_S).ids == "a"


def test_the_last_view_stays_when_the_source_is_gone():
    scene = Scene(A, B)
    assert scene.after(7 * 24 * 3600).ids == "ab"
    assert scene.view.epoch == 1


def test_an_empty_list_never_empties_a_view():
    scene = Scene(A, B)
    for _ in range(100):
        scene.observe(after_s=10)
    assert (scene.ids, scene.view.epoch) == ("ab", 1)


def test_lists_that_name_others_never_empty_a_view():
    scene = Scene(A, B, C)
    scene.observe(A, after_s=1.0)
    scene.observe(A, after_s=DEAD_AFTER_S)
    assert scene.ids == "a"
    scene.observe(C, after_s=1.0)  # A is missing from here on, and C soon is, too
    seen = []
    for _ in range(8):  # B was out, so it must be back for a while; A must not be gone before
        scene.observe(B, after_s=DEAD_AFTER_S / 4)
        seen.append(scene.ids)
    assert set(seen) == {"a", "b"}
    assert seen == sorted(seen)


@pytest.mark.parametrize("gone", [[A], [A, member("b", state=MemberState.DRAINING)]])
@pytest.mark.parametrize("offset", [0, 1])
def test_flapping_at_1_hz_for_two_minutes_makes_less_than_two_epochs(gone, offset):
    scene = Scene(A, B)
    for second in range(120):
        scene.observe(*([A, B] if (second + offset) % 2 else gone), after_s=1)
    assert scene.view.epoch - 1 < 2


def test_a_member_that_starts_anew_every_second_makes_no_epoch():
    scene = Scene(A, B)
    for second in range(120):
        state = MemberState.JOINING if second % 2 else MemberState.SERVING
        scene.observe(A, member("b", incarnation=str(second), state=state), after_s=1)
    assert scene.view.epoch == 1
    assert scene.member("b").incarnation == "119"


def test_a_flapping_newcomer_joins_once():
    scene = Scene(A)
    for second in range(120):
        scene.observe(*([A] if second % 2 else [A, B]), after_s=1)
    assert (scene.ids, scene.view.epoch) == ("ab", 2)


def test_a_removed_member_returns_only_after_a_delay():
    scene = Scene(A, B)
    scene.observe(A)
    scene.observe(A, B, after_s=DEAD_AFTER_S + 1)
    assert scene.ids == "a"
    assert scene.after(DEAD_AFTER_S - 0.1).ids == "a"
    assert scene.after(0.1).ids == "ab"
    assert scene.shares == {"b": 1 / 16}


def test_a_draining_member_gets_no_segments_but_stays_known():
    scene = Scene(A, B)
    scene.observe(A, member("b", state=MemberState.DRAINING))
    assert (scene.ids, scene.placed_ids, scene.view.epoch) == ("ab", "a", 2)
    scene.observe(A, B)
    assert scene.placed_ids == "a"
    assert scene.after(DEAD_AFTER_S).placed_ids == "ab"
    assert scene.shares == {}


def test_a_draining_newcomer_is_known_and_moves_nothing():
    scene = Scene(A)
    scene.observe(A, member("b", state=MemberState.DRAINING))
    assert (scene.ids, scene.placed_ids, scene.view.epoch) == ("ab", "a", 1)


def test_a_newcomer_starts_with_a_sixteenth_and_has_all_after_the_ramp():
    scene = Scene(A)
    scene.observe(A, B)
    assert scene.shares == {"b": 1 / 16}
    assert scene.after(RAMP_S / 2).shares == {"b": 9 / 16}
    assert scene.after(RAMP_S / 2).shares == {}
    assert scene.view.epoch == 2


def test_a_joining_member_ramps_up_even_in_the_first_list():
    scene = Scene(A, member("b", state=MemberState.JOINING))
    assert scene.shares == {"b": 1 / 16}


def test_a_new_address_or_weight_counts_at_once():
    scene = Scene(A, B)
    scene.observe(A, Member(id="b", address="tcp://elsewhere:1"))
    assert (scene.member("b").address, scene.view.epoch) == ("tcp://elsewhere:1", 2)
    scene.observe(A, Member(id="b", address="tcp://elsewhere:1", weight=2.0))
    assert (scene.view.epoch, scene.shares) == (3, {})


def test_the_previous_view_is_known_for_a_limited_time():
    scene = Scene(A, B)
    scene.observe(A, B, C, after_s=60)
    assert [each.id for each in scene.previous.members] == ["a", "b"]
    assert scene.after(OVERLAP_S - 0.1).previous is not None
    assert scene.after(0.1).previous is None


def test_a_short_lived_view_does_not_become_the_previous_view():
    scene = Scene(A)
    scene.observe(A, B, after_s=60)
    scene.observe(A, B, C, after_s=FLEETING_S / 2)
    assert scene.view.epoch == 3
    assert [each.id for each in scene.previous.members] == ["a"]
    scene.observe(A, B, C, member("d"), after_s=FLEETING_S)
    assert [each.id for each in scene.previous.members] == ["a", "b", "c"]


def test_the_previous_view_keeps_its_shares():
    scene = Scene(A)
    scene.observe(A, B, after_s=60)
    scene.observe(A, B, C, after_s=RAMP_S / 2)
    scene.after(10)
    assert scene.membership.views().previous.shares == {"b": 9 / 16}


def test_views_of_the_same_members_have_the_same_digest():
    here, there = Scene(A, B), Scene(C)
    there.observe(A, B, C, after_s=1)
    there.observe(A, B, after_s=1)
    there.after(DEAD_AFTER_S)
    assert here.view.digest == there.view.digest
    assert here.view.epoch != there.view.epoch
    assert PoolView.of(1, [A, B]).digest != PoolView.of(1, [A, C]).digest


def test_ids_that_come_and_go_are_forgotten():
    scene = Scene(A)
    for pod in range(500):
        scene.observe(A, member(f"pod-{pod}"), after_s=30)
    scene.observe(A, after_s=30)
    scene.after(2 * OVERLAP_S).observe(A)
    assert scene.ids == "a"
    assert len(scene.membership._observations) == 1
    assert not scene.membership._removed
    assert not scene.membership._joined_s


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcde")), st.floats(0, 40)), max_size=40))
def test_views_follow_lists_within_the_time_allowed(steps):
    scene = Scene(A)
    missing_s = dict.fromkeys("bcde", 1e9)
    epoch = 0
    for names, wait_s in steps:
        scene.observe(*(member(name) for name in sorted(names)))
        scene.after(wait_s)
        for name in "abcde":
            gone = name not in names and names
            missing_s[name] = missing_s.get(name, 0.0) + wait_s if gone else 0.0
            if name in names and wait_s >= DEAD_AFTER_S:
                assert name in scene.ids
            if gone and missing_s[name] >= DEAD_AFTER_S + 0.001:
                assert name not in scene.ids or scene.ids == name, "the last one stays"
        assert scene.ids
        assert scene.view.epoch >= epoch
        epoch = scene.view.epoch


def test_threads_see_whole_views():
    scene = Scene(A, B)
    ends = threading.Event()
    torn = []

    def look():
        while not ends.is_set():
            views = scene.membership.views()
            if PoolView.of(0, views.current.view.members).digest != views.current.view.digest:
                torn.append(views)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(300):
        scene.observe(A, B, *([C] if round_ % 2 else []), after_s=20)
    ends.set()
    for thread in threads:
        thread.join()
    assert not torn
