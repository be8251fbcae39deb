"""Durable marks name blocks until a time; the file brings back what an earlier process marked."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.store.durable_marks import (
    BELIEVED_AFTER_S,
    MARKS_MAX,
    DurableMarks,
    MarkedBlocks,
)

ONE = Namespace(b"f" * 16, b"d" * 16, 4096, 16)
DAY_S = 86_400.0
OTHER = ONE._replace(fingerprint=b"g" * 16)


def key(number):
    return number.to_bytes(16, "big")


class Clocks:
    """A wall clock that may be set, and a monotonic clock."""

    def __init__(self, wall_s=1.8e9):
        self.steady, self.wall_s = ManualClock(), wall_s

    def advance(self, seconds):
        self.steady.advance(seconds)
        self.wall_s += seconds

    def marks(self):
        return DurableMarks(self.steady, lambda: self.wall_s)


@pytest.fixture
def clock():
    return Clocks()


@pytest.fixture
def marks(clock):
    return clock.marks()


def test_a_block_is_marked_until_its_time(marks, clock):
    marks.add(ONE, [key(1)], 60.0)
    assert marks.holds(ONE, key(1))
    assert not marks.holds(OTHER, key(1))
    clock.advance(61)
    assert not marks.holds(ONE, key(1))


def test_the_longer_of_two_marks_counts(marks, clock):
    marks.add(ONE, [key(1)], 60.0)
    marks.add(ONE, [key(1)], 10.0)
    clock.advance(30)
    assert marks.holds(ONE, key(1))
    assert len(marks) == 1


def test_ended_marks_are_forgotten(marks, clock):
    marks.add(ONE, [key(1)], 10.0)
    marks.add(OTHER, [key(1)], 60.0)
    clock.advance(30)
    marks.expire()
    assert marks.names() == [(OTHER, key(1))]
    assert len(marks) == 1


def test_changes_are_given_once_and_restore_the_marks(marks, clock):
    marks.add(ONE, [key(1), key(2)], 60.0)
    marks.add(OTHER, [key(3)], 60.0)
    marks.remove(ONE, [key(2), key(9)])
    again = clock.marks()
    again.restore(marks.take_unsaved())
    assert marks.take_unsaved() == []
    assert again.names() == marks.names() == [(ONE, key(1)), (OTHER, key(3))]
    assert again.take_unsaved() == [], "the file has them already"


def test_all_marks_of_a_namespace_are_removed(marks, clock):
    marks.add(ONE, [key(1)], 60.0)
    marks.add(OTHER, [key(2)], 60.0)
    marks.remove_all(lambda namespace: namespace == ONE)
    again = clock.marks()
    again.restore(marks.take_unsaved())
    assert again.names() == marks.names() == [(OTHER, key(2))]


def test_the_oldest_mark_of_the_largest_namespace_is_forgotten_beyond_the_limit(marks):
    marks.add(OTHER, [key(0)], 60.0)
    marks.add(ONE, [key(number) for number in range(MARKS_MAX)], 60.0)
    assert len(marks) == MARKS_MAX
    assert marks.holds(OTHER, key(0))
    assert not marks.holds(ONE, key(0))
    assert marks.holds(ONE, key(MARKS_MAX - 1))


@pytest.mark.parametrize("step_s", [1.8e9, 40 * DAY_S, -40 * DAY_S, -1.8e9])
def test_a_mark_lasts_as_long_as_it_was_given_however_the_wall_clock_is_set(step_s):
    clock = Clocks(wall_s=max(0.0, -step_s))
    marks = clock.marks()
    marks.add(ONE, [key(1)], 30 * DAY_S)
    clock.wall_s += step_s
    clock.advance(29 * DAY_S)
    marks.expire()
    assert marks.holds(ONE, key(1))
    clock.advance(2 * DAY_S)
    assert not marks.holds(ONE, key(1))


@pytest.mark.parametrize("step_s", [1.8e9, 40 * DAY_S, -40 * DAY_S])
def test_marks_that_were_saved_before_the_wall_clock_was_set_are_saved_again(step_s):
    clock = Clocks(wall_s=max(0.0, -step_s))
    marks = clock.marks()
    marks.add(ONE, [key(1)], 30 * DAY_S)
    marks.take_unsaved()
    assert not marks.take_clock_change()
    clock.wall_s += step_s
    assert marks.take_clock_change()
    assert not marks.take_clock_change(), "it was set once"
    assert marks.all() == [MarkedBlocks(ONE, clock.wall_s + 30 * DAY_S, key(1))]


def test_a_start_with_a_clock_ahead_keeps_the_marks_that_the_right_clock_keeps(clock):
    before = clock.marks()
    before.add(ONE, [key(1)], 30 * DAY_S)
    before.add(ONE, [key(2)], DAY_S)
    clock.advance(2 * DAY_S)
    clock.wall_s += 40 * DAY_S
    marks = clock.marks()
    marks.restore(before.take_unsaved())
    assert marks.holds(ONE, key(1))
    clock.advance(60.0)
    marks.expire()
    clock.wall_s -= 40 * DAY_S
    assert marks.take_clock_change()
    clock.advance(2 * BELIEVED_AFTER_S)
    assert marks.holds(ONE, key(1))
    assert not marks.holds(ONE, key(2))
    marks.expire()
    assert marks.names() == [(ONE, key(1))]


def test_a_later_save_counts_though_the_clock_at_the_start_was_behind(clock):
    before = clock.marks()
    before.add(ONE, [key(1)], 30 * DAY_S)
    clock.advance(29 * DAY_S)
    right_s, clock.wall_s = clock.wall_s, 0.0
    marks = clock.marks()
    marks.restore(before.take_unsaved())
    marks.add(ONE, [key(1)], 30 * DAY_S)
    clock.wall_s = right_s
    clock.advance(29 * DAY_S)
    assert marks.holds(ONE, key(1))


def test_marks_that_ended_while_no_process_ran_are_not_named_and_are_forgotten_later(clock):
    before = clock.marks()
    before.add(ONE, [key(1)], DAY_S)
    clock.advance(2 * DAY_S)
    marks = clock.marks()
    marks.restore(before.take_unsaved())
    assert marks.names() == []
    clock.advance(BELIEVED_AFTER_S)
    marks.expire_if_due()
    assert len(marks) == 0


def test_the_last_of_several_marks_ends_when_the_wall_clock_says(clock):
    before = clock.marks()
    before.add(ONE, [key(1)], 9 * DAY_S)
    clock.advance(DAY_S)
    marks = clock.marks()
    marks.restore(before.take_unsaved())
    marks.add(ONE, [key(2)], DAY_S)
    assert marks.until_s(ONE, [key(2), key(3)]) == clock.wall_s + DAY_S
    assert marks.until_s(ONE, [key(1), key(2)]) == clock.wall_s + 8 * DAY_S
    assert marks.until_s(ONE, [key(3)]) == 0.0
