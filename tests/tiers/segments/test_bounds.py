"""Segments leave by age and bytes, least valuable first, and every writer deletes its share."""

import pytest

from holdfast.tiers.segments.bounds import (
    FILL_AIM,
    SpaceLimits,
    is_near_end,
    responsible_writer,
    to_retire,
)
from holdfast.tiers.segments.format import SegmentName, next_number
from holdfast.tiers.segments.index import SegmentState

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
MINE, THEIRS = "a" * 16, "b" * 16


def state(created_s=NOW_S, *, writer=MINE, age="7d", used_s=0.0, live=4, serial=0):
    number = f"{int(next_number('', created_s), 16) + serial:016x}"
    return SegmentState(SegmentName(age, writer, number), b"n" * 16, 100, 4, live, used_s)


def is_mine(name):
    return name.writer == MINE


def test_segments_past_their_age_class_leave():
    old, fresh = state(NOW_S - 7.1 * DAY_S), state(NOW_S - 6.9 * DAY_S)
    longer = state(NOW_S - 7.1 * DAY_S, age="30d")
    assert to_retire([old, fresh, longer], is_mine, SpaceLimits(0), NOW_S) == [old.name]


def test_segments_without_live_blocks_leave():
    empty = state(live=0)
    assert to_retire([empty, state(serial=1)], is_mine, SpaceLimits(0), NOW_S) == [empty.name]


def test_segments_of_others_stay():
    states = [state(NOW_S - 9 * DAY_S, writer=THEIRS), state(live=0, writer=THEIRS, serial=1)]
    assert to_retire(states, is_mine, SpaceLimits(150), NOW_S) == []


def test_a_full_medium_loses_what_was_not_used_for_longest_and_sparse_segments_first():
    used = [state(used_s=float(number), serial=number) for number in range(9)]
    sparse = state(used_s=99.0, live=1, serial=9)
    leaving = to_retire([*used, sparse], is_mine, SpaceLimits(900), NOW_S)
    assert set(leaving) == {sparse.name, used[0].name}
    assert 1000 - 100 * len(leaving) <= FILL_AIM * 900


def test_no_more_segments_leave_to_make_room_than_the_limit_says():
    used = [state(used_s=float(number), serial=number) for number in range(9)]
    ended = state(NOW_S - 8 * DAY_S, serial=9)
    leaving = to_retire([*used, ended], is_mine, SpaceLimits(300, segments=1), NOW_S)
    assert set(leaving) == {ended.name, used[0].name}


def durable(serial, until_s=NOW_S + DAY_S, **named):
    return state(serial=serial, **named)._replace(durable_until_s=until_s)


def test_segments_with_durable_blocks_make_no_room_until_their_time_is_over():
    states = [durable(serial=n) for n in range(9)] + [state(used_s=99.0, serial=9)]
    assert to_retire(states, is_mine, SpaceLimits(500), NOW_S) == [states[-1].name]
    assert to_retire(states[:9], is_mine, SpaceLimits(500), NOW_S) == []
    over = [durable(serial=n, until_s=NOW_S) for n in range(9)]
    assert len(to_retire(over, is_mine, SpaceLimits(500), NOW_S)) == 5


def test_a_durable_segment_leaves_at_its_end_and_stays_without_live_blocks():
    ended, moved = durable(0, created_s=NOW_S - 7.1 * DAY_S), durable(1, live=0)
    assert to_retire([ended, moved], is_mine, SpaceLimits(0), NOW_S) == [ended.name]


def test_the_share_of_a_writer_is_its_share_of_what_may_leave():
    states = [durable(serial=n) for n in range(10)]
    states += [state(writer=THEIRS, serial=20 + n) for n in range(10)]
    assert to_retire(states, is_mine, SpaceLimits(2_000), NOW_S) == []
    theirs = to_retire(states, lambda name: not is_mine(name), SpaceLimits(2_000), NOW_S)
    assert len(theirs) == 2


def test_all_writers_together_delete_about_the_excess():
    states = [state(writer=MINE, serial=n) for n in range(10)]
    states += [state(writer=THEIRS, serial=20 + n) for n in range(10)]
    mine = to_retire(states, is_mine, SpaceLimits(2_000), NOW_S)
    theirs = to_retire(states, lambda name: not is_mine(name), SpaceLimits(2_000), NOW_S)
    assert len(mine) == len(theirs) == 1


def test_nothing_leaves_while_there_is_room():
    assert to_retire([state(serial=n) for n in range(9)], is_mine, SpaceLimits(1_000), NOW_S) == []


def test_a_clock_that_is_behind_makes_nothing_leave_early():
    assert to_retire([state(NOW_S + 30 * DAY_S)], is_mine, SpaceLimits(0), NOW_S) == []


@pytest.mark.parametrize(("age_s", "near"), [(1.0, False), (6.0, True), (7.1, False)])
def test_a_segment_is_saved_again_in_its_last_quarter(age_s, near):
    assert is_near_end(state(NOW_S - age_s * DAY_S).name, NOW_S) is near


def test_a_live_writer_deletes_its_own_and_one_other_those_of_a_dead_one():
    live = ["a" * 16, "b" * 16, "c" * 16]
    assert responsible_writer(live[1], live) == live[1]
    chosen = {responsible_writer("d" * 16, order) for order in (live, live[::-1])}
    assert len(chosen) == 1
    assert chosen <= set(live)
