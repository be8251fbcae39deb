"""What writers of one medium learn from each other, retire and delete."""

import threading
import time
from contextlib import closing

import pytest

from holdfast.clock import ManualClock
from holdfast.codec.seal import DataKey
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.format import SegmentName
from holdfast.tiers.segments.index import SegmentIndex
from holdfast.tiers.segments.index_log import MERGE_COUNT
from holdfast.tiers.segments.medium import MediumAnswer
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

WITHIN_S = 60.0


QUICK = {"read_s": 0.2}
"""Limits with which a tier deletes early what it has retired; a busy machine may read slower."""


def open_tier(objects, wall_s=time.time, age="7d", medium=None, **limits):
    limits = SegmentTierLimits(
        **{"read_s": 60.0, "write_s": 60.0, "ask_s": 60.0, "poll_s": 0.05, **limits}
    )
    writer = SegmentWriter(age, wall_s=wall_s)
    return SegmentTier(medium or MemoryMedium(objects), writer, limits, "segments")


def await_that(reached):
    end_s = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end_s, "not reached"
        time.sleep(0.02)


@pytest.fixture
def objects():
    return MemoryObjects()


def segments(objects):
    return [name for name in objects.objects if not name.startswith("index/")]


def test_a_tier_that_is_open_learns_what_another_writes(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as one, closing(open_tier(objects)) as other:
        assert blocks.save(one, range(4)) == [Outcome.OK] * 4
        await_that(lambda: other.held(blocks.namespace, blocks.keys(4), 0) == 4)
        assert blocks.load(other, range(4)) == [Outcome.OK] * 4


def test_lookups_send_no_request(objects):
    blocks = ChainedBlocks(4_000)
    with closing(open_tier(objects, poll_s=3_600.0)) as tier:
        blocks.save(tier, range(300))
        before = len(objects.calls)
        assert tier.held(blocks.namespace, blocks.keys(2_048), 0) == 300
        assert tier.known(blocks.puts([1, 400])) == [True, False]
        assert len(objects.calls) == before


def test_one_block_is_one_request_and_neighbours_share_ranges(objects):
    blocks = ChainedBlocks(MIB)
    with closing(open_tier(objects, poll_s=3_600.0)) as tier:
        blocks.save(tier, range(32))
        before = objects.count("read")
        assert blocks.load(tier, [5]) == [Outcome.OK]
        assert objects.count("read") == before + 1
        assert blocks.load(tier, range(32)) == [Outcome.OK] * 32
        assert objects.count("read") == before + 1 + 4


def test_a_batch_becomes_one_object_and_one_index_object(objects):
    blocks = ChainedBlocks(MIB)
    with closing(open_tier(objects, poll_s=3_600.0)) as tier:
        before = objects.count("put")
        blocks.save(tier, range(32))
        assert objects.count("put") == before + 2
        assert len(segments(objects)) == 1


def test_a_segment_that_is_gone_is_a_miss_and_is_forgotten(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects, poll_s=3_600.0)) as tier:
        blocks.save(tier, range(4))
        for name in segments(objects):
            del objects.objects[name]
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 4
        assert blocks.load(tier, range(4)) == [Outcome.MISS] * 4
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 0
        assert tier.reachable()


def test_a_medium_that_is_emptied_while_tiers_are_open_promises_nothing_more(objects, caplog):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as one, closing(open_tier(objects)) as other:
        blocks.save(one, range(4))
        await_that(lambda: other.held(blocks.namespace, blocks.keys(4), 0) == 4)
        objects.objects.clear()
        for tier in (one, other):
            await_that(lambda tier=tier: not tier.held(blocks.namespace, blocks.keys(4), 0))
        # A tier forgets before it says so.
        await_that(lambda: "index objects are gone though no node deleted them" in caplog.text)
        assert blocks.save(one, range(4)) == [Outcome.OK] * 4
        await_that(lambda: other.held(blocks.namespace, blocks.keys(4), 0) == 4)
        assert blocks.load(other, range(4)) == [Outcome.OK] * 4


def test_segments_are_served_on_if_only_their_index_objects_are_deleted(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as tier:
        blocks.save(tier, range(4))
        before = objects.calls.count(("list", "7d"))
        for name in [name for name in objects.objects if name.startswith("index/")]:
            del objects.objects[name]
        await_that(lambda: objects.calls.count(("list", "7d")) > before)
        rounds = objects.calls.count(("list", "index")) + 5
        await_that(lambda: objects.calls.count(("list", "index")) >= rounds)
        assert objects.calls.count(("list", "7d")) == before + 1, "segments are looked for once"
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4


class LateListing(MemoryMedium):
    """A listing of index objects is empty once, when a test asks for it."""

    is_late = False

    def list(self, prefix, deadline):
        answer = super().list(prefix, deadline)
        if prefix == "index" and self.is_late:
            self.is_late = False
            return MediumAnswer(Outcome.OK)
        return answer


def test_one_late_listing_forgets_nothing(objects):
    blocks, medium = ChainedBlocks(65_000), LateListing(objects)
    with closing(open_tier(objects, medium=medium)) as tier:
        blocks.save(tier, range(4))
        medium.is_late = True
        await_that(lambda: not medium.is_late)
        rounds = objects.calls.count(("list", "index")) + 3
        await_that(lambda: objects.calls.count(("list", "index")) >= rounds)
        assert ("list", "7d") not in objects.calls
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 4


class LateLearning(MemoryMedium):
    """Lists only what it has put itself, until `learns`: as between two listings."""

    def __init__(self, objects):
        super().__init__(objects)
        self.learns, self.own = False, set()

    def put(self, name, parts, deadline):
        self.own.add(name)
        return super().put(name, parts, deadline)

    def list(self, prefix, deadline):
        answer = super().list(prefix, deadline)
        if self.learns:
            return answer
        return answer._replace(names=[name for name in answer.names if name in self.own])


def test_a_block_that_two_writers_saved_at_once_keeps_one_of_its_copies(objects):
    """Each of them learns of the other's copy after its own."""
    blocks, media = ChainedBlocks(65_000), [LateLearning(objects) for _ in range(2)]
    with (
        closing(open_tier(objects, medium=media[0], **QUICK)) as one,
        closing(open_tier(objects, medium=media[1], **QUICK)) as other,
    ):
        assert blocks.save(one, range(4)) == [Outcome.OK] * 4
        assert blocks.save(other, range(4)) == [Outcome.OK] * 4
        assert len(segments(objects)) == 2
        for medium in media:
            medium.learns = True
        await_that(lambda: len(segments(objects)) == 1)
        for tier in (one, other):
            rounds = objects.calls.count(("list", "index")) + 10
            await_that(lambda rounds=rounds: objects.calls.count(("list", "index")) >= rounds)
            assert tier.held(blocks.namespace, blocks.keys(4), 0) == 4
        with closing(open_tier(objects)) as third:
            assert third.held(blocks.namespace, blocks.keys(4), 0) == 4
            assert blocks.load(third, range(4)) == [Outcome.OK] * 4


def test_a_block_stays_in_the_segment_that_is_kept_longer(objects):
    """A copy that is made later, and deleted earlier, does not take its place."""
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects, age="30d", **QUICK)) as lasting:
        assert blocks.save(lasting, range(4)) == [Outcome.OK] * 4
        with closing(open_tier(objects, age="1d", **QUICK)) as brief:
            assert blocks.save(brief, range(4)) == [Outcome.OK] * 4
            await_that(lambda: [name[:4] for name in segments(objects)] == ["30d/"])
            assert brief.held(blocks.namespace, blocks.keys(4), 0) == 4
        assert lasting.held(blocks.namespace, blocks.keys(4), 0) == 4


def sealed(blocks, nonce):
    """Return a block to write, sealed with a data key."""
    [put] = blocks.puts([0])
    record = memoryview(bytearray(len(put.record)))
    sealer = DataKey(b"o" * 32, 1).sealer(put.record, nonce)
    assert sealer.seal(put.record, record) is Outcome.OK
    return put._replace(record=record)


def test_a_record_that_cannot_be_verified_is_replaced_by_a_writer_whose_clock_is_behind(objects):
    pytest.importorskip("cryptography")
    blocks = ChainedBlocks(65_000)
    bad, good = sealed(blocks, b"n" * 12), sealed(blocks, b"m" * 12)
    bad.record[200] ^= 1
    with (
        closing(open_tier(objects, wall_s=lambda: time.time() + 600)) as ahead,
        closing(open_tier(objects)) as tier,
    ):
        assert ahead.write([bad]) == [Outcome.OK]
        await_that(lambda: tier.held(blocks.namespace, blocks.keys(1), 0) == 1)
        tier.delete_corrupt(blocks.gets([0]))
        assert tier.known([good]) == [False]
        assert tier.write([good]) == [Outcome.OK]
        for reader in (tier, ahead):

            def reads(reader=reader):
                [get] = blocks.gets([0])
                return reader.read([get]) == [Outcome.OK] and get.into == good.record

            await_that(reads)


def damaged(data, how):
    half = len(data) // 2
    return {
        "truncated": data[:half],
        "longer": data + bytes(100_000),
        "empty": b"",
        "zeros": bytes(len(data)),
        "shifted": data[4096:] + data[:4096],
    }[how]


@pytest.mark.parametrize("how", ["truncated", "longer", "empty", "zeros", "shifted"])
def test_a_changed_object_serves_right_blocks_or_misses(objects, how):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects, poll_s=3_600.0)) as tier:
        blocks.save(tier, range(8))
        for name in segments(objects):
            objects.objects[name] = damaged(objects.objects[name], how)
        outcomes = blocks.load(tier, range(8))
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS}
        held = tier.held(blocks.namespace, blocks.keys(8), 0)
        assert held == outcomes.count(Outcome.OK)
        assert outcomes.count(Outcome.OK) == {"longer": 8, "truncated": 3}.get(how, 0)


def test_swapped_objects_are_misses(objects):
    one, two = ChainedBlocks(65_000), ChainedBlocks(65_000)
    with closing(open_tier(objects, poll_s=3_600.0)) as tier:
        one.save(tier, range(4))
        two.save(tier, range(4))
        first, second = segments(objects)
        stored = objects.objects
        stored[first], stored[second] = stored[second], stored[first]
        for blocks in (one, two):
            assert blocks.load(tier, range(4)) == [Outcome.MISS] * 4
            assert tier.held(blocks.namespace, blocks.keys(4), 0) == 0


EARLIER = {
    "other keys": lambda live: (ChainedBlocks(65_000), range(4), 0),
    "keys of another namespace": lambda live: (live.twin(), range(4), 0),
    "some of its blocks": lambda live: (live, [0, 1, 5, 4], 2),
    "its blocks in another place": lambda live: (live, [3, 2, 1, 0], 0),
}
"""The blocks of a segment of an earlier generation, and how many are where they are expected."""


@pytest.mark.parametrize("what", EARLIER)
def test_an_earlier_segment_under_a_live_name_is_a_miss(objects, what):
    """Its bytes are valid records, and there are as many: a cache or a restored backup has them."""
    live = ChainedBlocks(65_000)
    earlier, numbers, right = EARLIER[what](live)
    with closing(open_tier(objects, **QUICK)) as tier:
        assert earlier.save(tier, numbers) == [Outcome.OK] * 4
        [stale] = [objects.objects[name] for name in segments(objects)]
        tier.delete(earlier.gets(numbers))
        await_that(lambda: not segments(objects))
        assert live.save(tier, range(4)) == [Outcome.OK] * 4
    [name] = segments(objects)
    assert len(objects.objects[name]) == len(stale)
    objects.objects[name] = stale
    expected = [Outcome.OK] * right + [Outcome.MISS] * (4 - right)
    with closing(open_tier(objects, **QUICK)) as tier:
        assert tier.held(live.namespace, live.keys(4), 0) == 4
        assert live.load(tier, range(4)) == expected
        assert live.load(tier, range(4)) == expected
        assert tier.held(live.namespace, live.keys(4), 0) == right
        if earlier is not live:
            assert earlier.load(tier, range(4)) == [Outcome.MISS] * 4
        assert live.save(tier, range(4)) == [Outcome.OK] * 4
        assert live.load(tier, range(4)) == [Outcome.OK] * 4


def test_a_damaged_index_object_is_passed_over(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as tier:
        blocks.save(tier, range(4))
    objects.objects["index/00112233445566aa/0123456789abcdef"] = b"garbage"
    objects.objects["index/garbage"] = b""
    with closing(open_tier(objects)) as tier:
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 4
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4


def test_a_full_store_refuses_saves_and_serves_loads(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as tier:
        blocks.save(tier, range(4))
        objects.fault = lambda verb, name: Outcome.FULL if verb == "put" else Outcome.OK
        assert blocks.save(tier, range(4, 8)) == [Outcome.FULL] * 4
        assert tier.reachable()
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4
        objects.fault = None
        await_that(lambda: blocks.save(tier, range(4, 8)) == [Outcome.OK] * 4)


def test_the_capacity_bounds_the_objects_and_the_least_used_leave_first(objects):
    old, used, new = (ChainedBlocks(65_000) for _ in range(3))
    size = 4 * old.namespace.slot_bytes + 4096
    with closing(open_tier(objects, capacity_bytes=int(2.2 * size), **QUICK)) as tier:
        old.save(tier, range(4))
        used.save(tier, range(4))
        await_that(lambda: used.load(tier, range(4)) == [Outcome.OK] * 4)
        assert new.save(tier, range(4)) == [Outcome.OK] * 4
        await_that(lambda: tier.held(old.namespace, old.keys(4), 0) == 0)
        await_that(lambda: sum(len(objects.objects[n]) for n in segments(objects)) <= 2.2 * size)


def test_reads_for_moves_and_checks_do_not_keep_a_segment(objects):
    moved, used, new = (ChainedBlocks(65_000) for _ in range(3))
    size = 4 * moved.namespace.slot_bytes + 4096
    with closing(open_tier(objects, capacity_bytes=int(2.5 * size))) as tier:
        moved.save(tier, range(4))
        used.save(tier, range(4))
        assert used.load(tier, range(4)) == [Outcome.OK] * 4
        gets = [get._replace(is_use=False) for get in moved.gets(range(4))]
        assert tier.read(gets) == [Outcome.OK] * 4
        assert new.save(tier, range(4)) == [Outcome.OK] * 4
        await_that(lambda: tier.held(moved.namespace, moved.keys(4), 0) == 0)
        assert tier.held(used.namespace, used.keys(4), 0) == 4


def test_a_tier_above_its_capacity_takes_no_more(objects):
    blocks = ChainedBlocks(65_000)
    size = 4 * blocks.namespace.slot_bytes + 4096
    with closing(open_tier(objects, poll_s=3_600.0, capacity_bytes=size)) as tier:
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        assert blocks.save(tier, range(4, 8)) == [Outcome.FULL] * 4


def test_segments_of_every_writer_leave_after_their_age_class(objects):
    blocks, now_s = ChainedBlocks(65_000), [time.time()]
    with closing(open_tier(objects, wall_s=lambda: now_s[0], age="1d", **QUICK)) as tier:
        blocks.save(tier, range(4))
        now_s[0] += 2 * 86_400
        await_that(lambda: not segments(objects))
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 0


def test_a_segment_that_is_read_near_its_end_is_saved_again(objects):
    blocks, now_s = ChainedBlocks(65_000), [time.time()]
    with closing(open_tier(objects, wall_s=lambda: now_s[0])) as tier:
        blocks.save(tier, range(4))
        now_s[0] += 6.5 * 86_400
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4
        await_that(lambda: len(segments(objects)) >= 2)
        now_s[0] += 86_400
        await_that(lambda: blocks.load(tier, range(4)) == [Outcome.OK] * 4)


def test_deleted_blocks_are_gone_for_other_processes_too(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects, **QUICK)) as one, closing(open_tier(objects)) as other:
        blocks.save(one, range(4))
        await_that(lambda: other.held(blocks.namespace, blocks.keys(4), 0) == 4)
        one.delete(blocks.gets([2]))
        await_that(lambda: other.held(blocks.namespace, blocks.keys(4), 0) == 2)
        one.delete(blocks.gets([0, 1, 3]))
        await_that(lambda: not segments(objects))


def test_many_small_index_objects_become_few(objects):
    blocks = ChainedBlocks(4_000)
    with closing(open_tier(objects, **QUICK)) as tier:
        for number in range(MERGE_COUNT + 4):
            assert blocks.save(tier, [number]) == [Outcome.OK]
        await_that(lambda: sum(n.startswith("index/") for n in objects.objects) < 16)
    with closing(open_tier(objects)) as tier:
        count = MERGE_COUNT + 4
        assert tier.held(blocks.namespace, blocks.keys(count), 0) == count
        assert blocks.load(tier, range(count)) == [Outcome.OK] * count


def test_a_merge_keeps_a_segment_that_a_put_has_listed_but_not_yet_added(objects, monkeypatch):
    blocks, merged, add = ChainedBlocks(4_000), threading.Event(), SegmentIndex.add
    slow = blocks.keys(1)[0]

    def add_after_the_merge(index, listed, *more):
        if slow in listed.keys:
            assert merged.wait(WITHIN_S)
        add(index, listed, *more)

    monkeypatch.setattr(SegmentIndex, "add", add_after_the_merge)
    with closing(open_tier(objects, **QUICK)) as tier:
        first = threading.Thread(target=blocks.save, args=(tier, [0]))
        first.start()
        await_that(lambda: any(name.startswith("index/") for name in objects.objects))
        for number in range(1, MERGE_COUNT + 4):
            assert blocks.save(tier, [number]) == [Outcome.OK]
        await_that(lambda: sum(n.startswith("index/") for n in objects.objects) < 16)
        merged.set()
        first.join()
    with closing(open_tier(objects)) as tier:
        count = MERGE_COUNT + 4
        assert tier.held(blocks.namespace, blocks.keys(count), 0) == count


def test_a_medium_that_permits_reads_only_is_read(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as tier:
        blocks.save(tier, range(4))

    class ReadOnlyMedium(MemoryMedium):
        def probe(self, deadline):
            return super().probe(deadline)._replace(read_only="reads only")

    limits = SegmentTierLimits(ask_s=60.0)
    medium = ReadOnlyMedium(objects)
    with closing(SegmentTier(medium, SegmentWriter("7d"), limits, "segments")) as tier:
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 4
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4
        assert (tier.may_write(), tier.limits()) == (False, "reads only")
        assert blocks.save(tier, range(4)) == [Outcome.GONE] * 4


@pytest.mark.parametrize("days", [-6.0, -0.1, 0.1, 6.0])
def test_writers_with_different_clocks_find_each_others_blocks(objects, days):
    """An age class of 7 days is longer than any of these differences."""
    one, two = ChainedBlocks(65_000), ChainedBlocks(65_000)
    with (
        closing(open_tier(objects)) as right,
        closing(open_tier(objects, lambda: time.time() + 86_400 * days)) as wrong,
    ):
        assert one.save(right, range(4)) == [Outcome.OK] * 4
        assert two.save(wrong, range(4)) == [Outcome.OK] * 4
        for tier in (right, wrong):
            for blocks in (one, two):
                await_that(lambda t=tier, b=blocks: t.held(b.namespace, b.keys(4), 0) == 4)
                assert blocks.load(tier, range(4)) == [Outcome.OK] * 4


def test_a_writer_whose_clock_is_too_late_loses_its_blocks_to_others_and_nothing_else(objects):
    one, two = ChainedBlocks(65_000), ChainedBlocks(65_000)
    with (
        closing(open_tier(objects)) as right,
        closing(open_tier(objects, lambda: time.time() - 8 * 86_400)) as wrong,
    ):
        assert one.save(right, range(4)) == [Outcome.OK] * 4
        assert two.save(wrong, range(4)) == [Outcome.OK] * 4
        await_that(lambda: wrong.held(one.namespace, one.keys(4), 0) == 4)
        assert right.held(two.namespace, two.keys(4), 0) == 0
        assert len(segments(objects)) == 2
        assert one.load(right, range(4)) == [Outcome.OK] * 4
        assert two.load(wrong, range(4)) == [Outcome.OK] * 4


def test_a_segment_whose_writer_died_before_it_listed_it_is_deleted(objects):
    clock, blocks = ManualClock(), ChainedBlocks(65_000)
    with closing(open_tier(objects)) as tier:
        blocks.save(tier, range(2))
    [kept] = segments(objects)
    old_ms, new_ms = int(1e3 * (time.time() - 7_200)), int(1e3 * time.time())
    orphan, young = (
        SegmentName("7d", "00112233445566aa", f"{at_ms << 16:016x}").path
        for at_ms in (old_ms, new_ms)
    )
    objects.objects[orphan] = objects.objects[young] = b"not listed"
    limits = SegmentTierLimits(ask_s=60.0, poll_s=0.05)
    writer = SegmentWriter("7d", clock)
    with closing(SegmentTier(MemoryMedium(objects), writer, limits, "segments")) as tier:
        assert tier.held(blocks.namespace, blocks.keys(2), 0) == 2
        clock.advance(3_700.0)
        await_that(lambda: sorted(segments(objects)) == sorted([kept, young]))
        assert tier.held(blocks.namespace, blocks.keys(2), 0) == 2


def test_a_writer_that_sweeps_its_own_old_index_object_suspects_no_other_program(objects, caplog):
    clock, blocks, now_s = ManualClock(), ChainedBlocks(65_000), [time.time()]
    limits = SegmentTierLimits(write_s=60.0, ask_s=60.0, poll_s=0.05)
    writer = SegmentWriter("7d", clock, wall_s=lambda: now_s[0])
    with closing(SegmentTier(MemoryMedium(objects), writer, limits, "segments")) as tier:
        assert blocks.save(tier, range(2)) == [Outcome.OK] * 2
        [old] = [name for name in objects.objects if name.startswith("index/")]
        now_s[0] += 31 * 86_400
        assert blocks.save(tier, range(2, 4)) == [Outcome.OK] * 2
        clock.advance(3_700.0)
        await_that(lambda: old not in objects.objects)
        rounds = objects.calls.count(("list", "index")) + 6
        await_that(lambda: objects.calls.count(("list", "index")) >= rounds)
        assert "index objects are gone" not in caplog.text
        assert blocks.load(tier, range(2, 4)) == [Outcome.OK] * 2


def test_a_tier_that_closes_during_its_first_listing_reports_no_failure(objects, caplog):
    listing, closed = threading.Event(), threading.Event()

    class SlowMedium(MemoryMedium):
        def list(self, prefix, deadline):
            listing.set()
            assert closed.wait(WITHIN_S)
            return super().list(prefix, deadline)

        def close(self):
            super().close()
            closed.set()

    tier = SegmentTier(SlowMedium(objects), SegmentWriter("7d"), SegmentTierLimits(), "segments")
    assert listing.wait(WITHIN_S)
    tier.close()
    assert caplog.messages == []


def test_a_medium_that_is_refused_is_not_used(objects):
    class DishonestMedium(MemoryMedium):
        def probe(self, deadline):
            return super().probe(deadline)._replace(refusal="it lies")

    blocks = ChainedBlocks(65_000)
    limits = SegmentTierLimits(ask_s=1.0, write_s=1.0, read_s=1.0)
    medium = DishonestMedium(objects)
    with closing(SegmentTier(medium, SegmentWriter("7d"), limits, "segments")) as tier:
        assert tier.ask(blocks.namespace, blocks.keys(1), 0).outcome is not Outcome.OK
        assert set(blocks.save(tier, [0])) <= {Outcome.GONE, Outcome.LATE}
        await_that(lambda: not tier.reachable())
        assert [each.trouble for each in tier.member_health()] == ["it lies"]
        assert segments(objects) == []


def test_a_save_that_waits_for_the_first_listing_ends_with_the_tier():
    """The medium does not answer, and the time of a save is longer than any test."""
    objects, blocks, outcomes = MemoryObjects(), ChainedBlocks(65_000), []
    objects.fault = lambda *_: Outcome.LATE
    tier = open_tier(objects, read_s=3_600.0, write_s=3_600.0)
    began = threading.Event()

    def save():
        began.set()
        outcomes.extend(blocks.save(tier, range(2)))

    saving = threading.Thread(target=save)
    saving.start()
    began.wait()
    time.sleep(0.05)
    tier.close()
    saving.join()
    assert len(outcomes) == 2
    assert set(outcomes) <= {Outcome.GONE, Outcome.LATE}
