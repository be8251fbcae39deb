"""The index finds the newest segment of each block, and forgets what leaves."""

import random
import tracemalloc

import msgspec
import pytest

from holdfast.tiers.segments.format import DurableSegment, IndexedSegment, SegmentName, head_bytes
from holdfast.tiers.segments.index import SegmentIndex

SPACE, OTHER = b"a" * 16, b"b" * 16


def name(number):
    return SegmentName("7d", "0" * 16, f"{number:016x}")


def key(number):
    return random.Random(number).randbytes(16)


def listed(number, blocks, space=SPACE, sectors=2):
    keys = b"".join(map(key, blocks))
    lengths = sectors.to_bytes(4, "little") * len(blocks)
    return IndexedSegment(name(number).path, space, keys, lengths)


def test_blocks_have_their_position_in_the_object():
    index = SegmentIndex()
    index.add(listed(1, range(5)), 0.0)
    [third, absent] = index.positions([(SPACE, key(3)), (SPACE, key(9))], 1.0)
    assert absent is None
    assert third is not None
    assert (third.start, third.nbytes) == (head_bytes(5) + 3 * 8192, 8192)
    assert index.name_of(third.segment) == name(1)


def test_a_run_ends_at_the_first_missing_block_and_in_another_namespace():
    index = SegmentIndex()
    index.add(listed(1, range(7)), 0.0)
    index.add(listed(2, range(8, 20)), 0.0)
    assert index.held_run(SPACE, [key(n) for n in range(20)]) == 7
    assert index.held_run(SPACE, [key(n) for n in range(8, 30)]) == 12
    assert index.held_run(OTHER, [key(0)]) == 0
    assert index.held_run(SPACE, []) == 0


def test_the_newest_segment_of_a_block_counts_and_the_old_one_loses_it():
    index = SegmentIndex()
    index.add(listed(1, range(4)), 0.0)
    index.add(listed(2, [2, 3]), 0.0)
    [position] = index.positions([(SPACE, key(2))], 0.0)
    assert position is not None
    assert index.name_of(position.segment) == name(2)
    assert {state.name: state.live_blocks for state in index.segments()} == {name(1): 2, name(2): 2}
    assert index.live_keys(name(1), [key(n) for n in range(4)]) == [True, True, False, False]


def test_a_block_that_a_segment_has_twice_leaves_another_segment_once():
    index = SegmentIndex()
    index.add(listed(1, [0, 1]), 0.0)
    index.add(listed(2, [0, 0]), 0.0)
    assert {state.name: state.live_blocks for state in index.segments()} == {name(1): 1, name(2): 1}
    assert index.live_keys(name(2), [key(0), key(0)]) == [False, True]
    assert index.held_run(SPACE, [key(0), key(1)]) == 2


def test_a_segment_with_one_block_twice_has_no_live_block_once_that_is_removed():
    index = SegmentIndex()
    index.add(listed(1, [0, 0]), 0.0)
    assert index.forget_blocks(name(1), key(0)) == 1
    assert [state.live_blocks for state in index.segments()] == [0]


def test_two_indexes_agree_about_a_block_of_two_segments_in_whichever_order_they_learn():
    one, other = SegmentIndex(), SegmentIndex()
    for index, order in ((one, [1, 2]), (other, [2, 1])):
        for number in order:
            index.add(listed(number, range(number, number + 4)), 0.0)
    for index in (one, other):
        live = {state.name: state.live_blocks for state in index.segments()}
        assert live == {name(1): 1, name(2): 4}
        assert index.live_keys(name(1), [key(n) for n in range(1, 5)]) == [True] + [False] * 3
        assert index.forget_segment(name(1)) == 1
        assert index.held_run(SPACE, [key(n) for n in range(2, 6)]) == 4


def test_a_segment_that_is_kept_longer_has_its_blocks_whatever_comes_later():
    index, brief = SegmentIndex(), name(9)._replace(age_class="1d")
    index.add(listed(1, range(4)), 0.0)
    index.add(msgspec.structs.replace(listed(9, range(2, 6)), path=brief.path), 0.0)
    live = {state.name: state.live_blocks for state in index.segments()}
    assert live == {name(1): 4, brief: 2}


def test_a_segment_that_leaves_takes_its_blocks_along():
    index = SegmentIndex()
    index.add(listed(1, range(4)), 0.0)
    index.add(listed(2, range(4, 6)), 0.0)
    assert index.forget_segment(name(1)) == 4
    assert index.forget_segment(name(1)) == 0
    assert index.held_run(SPACE, [key(0)]) == 0
    assert index.held_run(SPACE, [key(4), key(5)]) == 2
    assert index.counts() == (1, head_bytes(2) + 2 * 8192, 2)
    assert index.stored_bytes == head_bytes(2) + 2 * 8192


def test_single_blocks_are_removed_from_the_segment_that_has_them():
    index = SegmentIndex()
    index.add(listed(1, range(4)), 0.0)
    assert index.forget_blocks(name(1), key(1) + key(9)) == 1
    assert index.forget_blocks(name(1), key(1)) == 0
    assert index.forget_blocks(name(7), key(2)) == 0
    assert index.held_run(SPACE, [key(n) for n in range(4)]) == 1
    assert [state.live_blocks for state in index.segments()] == [3]


def durable(number, until_s=100.0):
    return DurableSegment(name(number).path, until_s)


def durable_until(index):
    return {state.name: state.durable_until_s for state in index.segments()}


def test_a_segment_is_durable_whether_it_is_known_before_or_after_that():
    index = SegmentIndex()
    index.add(listed(1, range(4)), 0.0)
    assert index.keep([durable(1), durable(2)], wall_s=1.0)
    index.add(listed(2, range(4, 6)), 0.0)
    index.add(listed(3, range(6, 8)), 0.0)
    assert durable_until(index) == {name(1): 100.0, name(2): 100.0, name(3): 0.0}
    index.keep([durable(1, 50.0), durable(2, 200.0)], wall_s=1.0)
    assert durable_until(index) == {name(1): 100.0, name(2): 200.0, name(3): 0.0}
    index.keep([DurableSegment(name(3).path, float("inf"))], wall_s=1.0)
    assert index.durable_until_s(name(3)) == name(3).expires_s()


def test_a_durable_segment_stays_until_all_its_blocks_are_in_other_durable_ones():
    index = SegmentIndex()
    index.add(listed(1, range(4)), 0.0)
    index.keep([durable(1)], wall_s=1.0)
    index.add(listed(2, range(4)), 0.0)
    assert index.begin_leaving([name(1)], 1.0) == []
    index.keep([durable(2, 99.0)], wall_s=1.0)
    assert index.begin_leaving([name(1)], 1.0) == []
    index.keep([durable(2, 100.0)], wall_s=1.0)
    assert index.begin_leaving([name(1)], 1.0) == [name(1)]


def test_a_segment_that_is_leaving_does_not_become_durable():
    index = SegmentIndex()
    index.add(listed(1, range(4)), 0.0)
    assert index.begin_leaving([name(1), name(9)], 1.0) == [name(1)]
    assert not index.keep([durable(1)], wall_s=1.0)
    assert index.durable_until_s(name(1)) == 0.0
    index.end_leaving([name(1)])
    assert index.keep([durable(1)], wall_s=1.0)
    assert index.begin_leaving([name(1)], 1.0) == []
    assert index.begin_leaving([name(1)], name(1).expires_s()) == [name(1)]


def test_the_segment_of_a_writer_is_found_also_if_it_has_a_further_copy_only():
    index, other = SegmentIndex(), name(9)._replace(writer="1" * 16)
    index.add(listed(1, range(4)), 0.0)
    index.add(msgspec.structs.replace(listed(9, [2, 3, 4]), path=other.path), 0.0)
    keys = [key(n) for n in range(6)]
    assert index.segments_of_writer(SPACE, keys, "0" * 16) == [name(1)] * 4 + [None] * 2
    assert index.segments_of_writer(SPACE, keys, "1" * 16) == [None] * 2 + [other] * 3 + [None]


def test_adding_a_segment_twice_changes_nothing():
    index = SegmentIndex()
    for _ in range(2):
        index.add(listed(1, range(4)), 0.0)
    assert index.counts()[0] == 1


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_a_dict_under_random_changes(seed):
    chosen, index, segments = random.Random(seed), SegmentIndex(), {}
    for number in range(400):
        step = chosen.random() if segments else 1.0
        if step < 0.2:
            gone = chosen.choice(list(segments))
            index.forget_segment(name(gone))
            del segments[gone]
        elif step < 0.4:
            of = chosen.choice(list(segments))
            removed = {block for block in segments[of] if chosen.random() < 0.5}
            index.forget_blocks(name(of), b"".join(map(key, removed)))
            segments[of] = [block for block in segments[of] if block not in removed]
        else:
            segments[number] = chosen.sample(range(3_000), chosen.randrange(1, 60))
            index.add(listed(number, segments[number]), 0.0)
    held = {block: name(number) for number in sorted(segments) for block in segments[number]}
    found = index.positions([(SPACE, key(block)) for block in range(3_000)], 0.0)
    got = {
        block: index.name_of(position.segment) for block, position in enumerate(found) if position
    }
    assert got == held
    live = {state.name: state.live_blocks for state in index.segments()}
    assert live == {name(number): list(held.values()).count(name(number)) for number in segments}


def test_a_block_is_found_in_another_segment_once_its_copy_is_deleted_or_leaves():
    index = SegmentIndex()
    for number in (1, 2, 3):
        index.add(listed(number, range(number, number + 4)), 0.0)
    index.forget_blocks(name(2), key(4))
    index.forget_blocks(name(3), key(3) + key(4))
    assert index.forget_segment(name(3)) == 2
    keys = [(SPACE, key(n)) for n in range(1, 7)]
    found = [p and index.name_of(p.segment) for p in index.positions(keys, 0.0)]
    assert found == [name(1), name(2), name(2), name(1), name(2), None]
    live = {state.name: state.live_blocks for state in index.segments()}
    assert live == {name(1): 2, name(2): 3}


def test_a_block_takes_little_memory():
    index, per_segment = SegmentIndex(), 512
    for number in range(200):
        keys = random.Random(number).randbytes(16 * per_segment)
        lengths = (2).to_bytes(4, "little") * per_segment
        index.add(IndexedSegment(name(number).path, SPACE, keys, lengths), 0.0)
    assert index.nbytes / (200 * per_segment) < 64


def test_segments_that_left_take_no_memory():
    index = SegmentIndex()

    def come_and_go(numbers):
        for number in numbers:
            index.add(listed(number, [number % 7]), 0.0)
            index.forget_segment(name(number))

    come_and_go(range(500))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        come_and_go(range(500, 8_000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 30_000
    assert index.counts() == (0, 0, 0)
    index.add(listed(9_000, range(4)), 0.0)
    assert index.held_run(SPACE, [key(n) for n in range(4)]) == 4
