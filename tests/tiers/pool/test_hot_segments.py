"""The sketch finds what is hot in bounded memory."""

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.tiers.pool.hot_segments import HotSegments


def name(number):
    return number.to_bytes(8, "big")


@given(st.lists(st.integers(0, 30), max_size=400), st.integers(1, 20))
def test_counts_bound_the_true_counts_and_frequent_segments_are_kept(hits, capacity):
    sketch = HotSegments(ManualClock(), capacity)
    for number in hits:
        sketch.hit(name(number))
    actual = collections.Counter(map(name, hits))
    kept = sketch._counts
    assert len(kept) <= capacity
    for segment_id, count in kept.items():
        assert count.hits - count.error <= actual[segment_id] <= count.hits
        assert count.error <= len(hits) / capacity
    assert {each for each, count in actual.items() if count > len(hits) / capacity} <= set(kept)
    assert sum(count.hits for count in kept.values()) == len(hits)


def test_a_hot_segment_is_found_among_many_cold_ones():
    chance = random.Random(3)
    sketch = HotSegments(ManualClock(), capacity=64, hot_hits=60)
    hot = name(1 << 40)
    for number in range(5_000):
        sketch.hit(name(number))
        if chance.random() < 0.3:
            sketch.hit(hot)
    assert max(sketch._counts, key=lambda each: sketch._counts[each].hits) == hot
    assert sketch.is_hot(hot)
    assert not any(sketch.is_hot(name(number)) for number in range(5_000))


def test_a_segment_that_is_no_longer_requested_stops_being_hot_and_is_forgotten():
    clock = ManualClock()
    sketch = HotSegments(clock, half_life_s=60, hot_hits=60)
    assert [sketch.hit(name(1)) for _ in range(100)] == [False] * 59 + [True] * 41
    assert sketch.is_hot(name(1))
    clock.advance(60)
    assert not sketch.is_hot(name(1))
    assert sketch._counts[name(1)].hits == 50
    clock.advance(60 * 10)
    assert not sketch.is_hot(name(1))
    assert sketch._counts == {}
    assert not sketch.hit(name(1))


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 40)), max_size=200))
def test_halving_the_counts_keeps_the_sketch_consistent(steps):
    clock = ManualClock()
    sketch = HotSegments(clock, capacity=5, half_life_s=30)
    for number, wait_s in steps:
        clock.advance(wait_s)
        sketch.hit(name(number))
        assert {each for _, each in sketch._heap} == set(sketch._counts)
        assert len(sketch._heap) == len(sketch._counts) <= 5
        assert all(0 <= count.error <= count.hits for count in sketch._counts.values())
        assert all(hits <= sketch._counts[each].hits for hits, each in sketch._heap)


@pytest.mark.parametrize(("hits_a_minute", "hot_share"), [(64, 1.0), (29, 0.0)])
def test_a_segment_is_hot_at_64_requests_a_minute_and_never_below_30(hits_a_minute, hot_share):
    clock = ManualClock()
    sketch = HotSegments(clock)
    hot = []
    for _ in range(hits_a_minute * 10):
        hot.append(sketch.hit(name(1)))
        clock.advance(60 / hits_a_minute)
    later = hot[hits_a_minute * 5 :]
    assert sum(later) == hot_share * len(later)
