"""Durable marks name blocks until a time; the file brings back what an earlier process marked."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.store.durable_marks import MARKS_MAX, DurableMarks

ONE = Namespace(b"f" * 16, b"d" * 16, 4096, 16)
OTHER = ONE._replace(fingerprint=b"g" * 16)


def key(number):
    return number.to_bytes(16, "big")


class Clock:
    def __init__(self):
        self.now_s = 1e9

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def marks(clock):
    return DurableMarks(clock)


def test_a_block_is_marked_until_its_time(marks, clock):
    marks.add(ONE, [key(1)], 60.0)
    assert marks.holds(ONE, key(1))
    assert not marks.holds(OTHER, key(1))
    clock.now_s += 61
    assert not marks.holds(ONE, key(1))


def test_the_longer_of_two_marks_counts(marks, clock):
    marks.add(ONE, [key(1)], 60.0)
    marks.add(ONE, [key(1)], 10.0)
    clock.now_s += 30
    assert marks.holds(ONE, key(1))
    assert len(marks) == 1


def test_ended_marks_are_forgotten(marks, clock):
    marks.add(ONE, [key(1)], 10.0)
    marks.add(OTHER, [key(1)], 60.0)
    clock.now_s += 30
    marks.expire()
    assert marks.names() == [(OTHER, key(1))]
    assert len(marks) == 1


def test_changes_are_given_once_and_restore_the_marks(marks, clock):
    marks.add(ONE, [key(1), key(2)], 60.0)
    marks.add(OTHER, [key(3)], 60.0)
    marks.remove(ONE, [key(2), key(9)])
    again = DurableMarks(clock)
    again.restore(marks.take_unsaved())
    assert marks.take_unsaved() == []
    assert again.names() == marks.names() == [(ONE, key(1)), (OTHER, key(3))]
    assert again.take_unsaved() == [], "the file has them already"


def test_all_marks_of_a_namespace_are_removed(marks, clock):
    marks.add(ONE, [key(1)], 60.0)
    marks.add(OTHER, [key(2)], 60.0)
    marks.remove_all(lambda namespace: namespace == ONE)
    again = DurableMarks(clock)
    again.restore(marks.take_unsaved())
    assert again.names() == marks.names() == [(OTHER, key(2))]


def test_the_oldest_mark_of_the_largest_namespace_is_forgotten_beyond_the_limit(marks):
    marks.add(OTHER, [key(0)], 60.0)
    marks.add(ONE, [key(number) for number in range(MARKS_MAX)], 60.0)
    assert len(marks) == MARKS_MAX
    assert marks.holds(OTHER, key(0))
    assert not marks.holds(ONE, key(0))
    assert marks.holds(ONE, key(MARKS_MAX - 1))
