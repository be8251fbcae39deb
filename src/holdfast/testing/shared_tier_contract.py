"""The contract of `tiers.base.SharedTier` as tests: a subclass tests one shared tier.

    class TestMyTier(SharedTierContract):
        def make_remote_side(self, folder):
            return MyServer(folder)

        def make_tier(self, remote_side):
            return MyTier(remote_side.address)

The tests kill, stall and restart the remote side while the tier is in use. Payloads are a
pseudo-random function of the key, so that every byte that is read is checked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import pytest

from holdfast.buffers import aligned_buffer
from holdfast.codec.codec import Codec
from holdfast.errors import Outcome
from holdfast.limits import MIB, SEGMENT_BLOCKS
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.payloads import key_of, namespace_of, shortened
from holdfast.testing.stalls import StallWatch
from holdfast.tiers.base import (
    AnsweringTier,
    Expiring,
    HeldAnswer,
    Indexed,
    LocalTier,
    Place,
    Queryable,
    Reachable,
    SharedTier,
)
from holdfast.tiers.reported import description, shared_status, tier_status

SIZES = (4_000, 65_000, 300_000, 2 * MIB)
"""Payload bytes of the test records."""

_RECOVERY_S = 60.0
"""Timeout of the recovery after the remote side restarts."""

_GIVEN_UP_S = 3.0
"""Time after which a tier may have given its remote side up; its answers stay the same."""


class RemoteSide(Protocol):
    """The server of a shared tier; empty at first."""

    def kill(self) -> None:
        """Kill it; its records are lost."""
        ...

    def stall(self) -> None:
        """Stop its answers until `wake`, with all connections open."""
        ...

    def wake(self) -> None:
        """End a stall."""
        ...

    def restart(self) -> None:
        """Start it again after `kill`, at the same address and empty."""
        ...

    def close(self) -> None:
        """End it, and release its resources."""
        ...


class SharedTierContract:
    """The tests; a subclass makes the remote side and the tier.

    `deadline_s`: maximum duration of every call, in any state of the remote side. `slack_s`:
    additional time on a busy machine. Stalls of the machine are not counted. `codec`: encodes all
    records of the tests, so that most are shorter than a slot. `answers_locally`: lookups are
    answered from memory, so that only a read or a write finds out that the remote side is dead.
    """

    codec: ClassVar[Codec | None] = None
    answers_locally: ClassVar[bool] = False

    deadline_s: ClassVar[float] = 2.0
    slack_s: ClassVar[float] = 30.0

    def make_remote_side(self, folder: Path) -> RemoteSide:
        """Return a remote side that is ready to serve."""
        raise NotImplementedError

    def make_tier(self, remote_side: Any) -> SharedTier:  # noqa: ANN401  # the result of `make_remote_side`
        """Return a new tier that is a client of this remote side."""
        raise NotImplementedError

    def blocks(self, raw_bytes: int) -> ChainedBlocks:
        """Return test blocks with payloads of this many bytes."""
        return ChainedBlocks(raw_bytes, codec=self.codec)

    @pytest.fixture
    def remote_side(self, tmp_path: Path) -> Iterator[RemoteSide]:
        """A remote side for one test."""
        remote_side = self.make_remote_side(tmp_path)
        yield remote_side
        remote_side.close()

    @pytest.fixture
    def tier(self, remote_side: RemoteSide) -> Iterator[SharedTier]:
        """A tier that has written to the remote side; closed at the end."""
        tier = self.make_tier(remote_side)
        self._await_recovery(tier, self.blocks(4_000))
        yield tier
        tier.close()

    # Write and read.

    def test_it_is_a_shared_tier(self, tier: SharedTier) -> None:
        assert isinstance(tier, SharedTier)
        assert not isinstance(tier, LocalTier)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_was_written_is_read(self, tier: SharedTier, nbytes: int) -> None:
        blocks = self.blocks(nbytes)
        assert blocks.save(tier, range(6)) == [Outcome.OK] * 6
        assert blocks.load(tier, range(6)) == [Outcome.OK] * 6

    def test_what_one_wrote_another_reads(self, tier: SharedTier, remote_side: RemoteSide) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(6))
        with closing(self.make_tier(remote_side)) as other:
            assert other.held(blocks.namespace, blocks.keys(8), 0) == 6  # noqa: PLR2004  # as saved
            assert blocks.load(other, range(6)) == [Outcome.OK] * 6

    def test_a_block_may_be_written_again(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        for _ in range(3):
            assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
        assert blocks.load(tier, range(3)) == [Outcome.OK] * 3

    def test_blocks_of_many_sizes_and_segments_in_one_batch(self, tier: SharedTier) -> None:
        puts, gets = [], []
        for blocks in map(self.blocks, SIZES):
            puts += blocks.puts([0, 1, SEGMENT_BLOCKS])
            gets += blocks.gets([0, 1, SEGMENT_BLOCKS])
        assert tier.write(puts) == [Outcome.OK] * len(puts)
        assert tier.read(gets) == [Outcome.OK] * len(gets)

    def test_an_empty_batch_is_nothing(self, tier: SharedTier) -> None:
        assert tier.write([]) == []
        assert tier.read([]) == []
        assert tier.held(namespace_of(4_000), [], 0) == 0

    def test_buffers_stay_the_callers(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        [put] = blocks.puts([1])
        before = bytes(put.record)
        assert tier.write([put]) == [Outcome.OK]
        assert bytes(put.record) == before
        put.record[:] = bytes(len(before))
        assert blocks.load(tier, [1]) == [Outcome.OK]

    def test_an_unaligned_buffer_is_served_too(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        [put] = blocks.puts([1])
        shifted = memoryview(bytearray(len(put.record) + 17))[17:]
        shifted[:] = put.record
        assert tier.write([put._replace(record=shifted)]) == [Outcome.OK]
        shifted[:] = bytes(len(shifted))
        [get] = blocks.gets([1])
        assert tier.read([get._replace(into=shifted)]) == [Outcome.OK]
        assert blocks.is_right(shifted, get.key)

    # Places.

    def test_a_place_holds_nothing_until_it_is_written(self, tier: SharedTier) -> None:
        assert self.blocks(4_000).load(tier, [0]) == [Outcome.MISS]

    def test_a_whole_record_stays_although_a_reader_reports_it(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(4))
        tier.delete_corrupt(blocks.gets([1, 3]))
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    def test_what_was_deleted_is_gone_and_can_be_written_again(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(4))
        tier.delete(blocks.gets([1, 3]))
        assert blocks.load(tier, [0]) == [Outcome.OK]
        assert blocks.load(tier, [1]) == blocks.load(tier, [3]) == [Outcome.MISS]
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    # Misses.

    def test_what_is_not_there_is_a_miss(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, [0, 1, 3, 4])
        outcomes = blocks.load(tier, range(6))
        assert outcomes[:3] == [Outcome.OK, Outcome.OK, Outcome.MISS]
        assert set(outcomes[3:5]) <= {Outcome.OK, Outcome.MISS}
        assert outcomes[5] is Outcome.MISS
        assert blocks.load(tier, [3, 4]) == [Outcome.OK] * 2

    def test_another_key_is_never_served(self, tier: SharedTier) -> None:
        blocks = self.blocks(4_000)
        blocks.save(tier, range(3))
        wrong = [get._replace(place=Place(get.place ^ 5)) for get in blocks.gets(range(3))]
        assert blocks.check(wrong, tier.read(wrong)) <= {Outcome.OK, Outcome.MISS}
        wrong = [get._replace(key=key_of(9, 9)) for get in blocks.gets(range(3))]
        assert tier.read(wrong) == [Outcome.MISS] * 3

    def test_a_record_longer_than_its_buffer_is_a_miss(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(4))
        gets = blocks.gets(range(4))
        gets[2] = gets[2]._replace(into=aligned_buffer(4_096))
        outcomes = tier.read(gets)
        assert outcomes[:3] == [Outcome.OK, Outcome.OK, Outcome.MISS]
        blocks.check([*gets[:2], gets[3]], [*outcomes[:2], outcomes[3]])
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    def test_a_buffer_may_be_longer_than_its_record(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(4))
        gets = blocks.gets(range(4))
        gets[1] = gets[1]._replace(into=aligned_buffer(1 << 20))
        assert blocks.check(gets, tier.read(gets)) == {Outcome.OK}

    def test_records_of_one_namespace_may_differ_in_length(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        puts = blocks.puts(range(6))
        cut = {number: shortened(puts[number].record) for number in (1, 4)}
        mixed = [
            put._replace(record=cut.get(number, put.record)) for number, put in enumerate(puts)
        ]
        assert tier.write(mixed) == [Outcome.OK] * 6
        gets = blocks.gets(range(6))
        assert tier.read(gets) == [Outcome.OK] * 6
        for number, get in enumerate(gets):
            record = mixed[number].record
            assert bytes(get.into[16 : len(record)]) == bytes(record[16:])

    # The same key in another namespace.

    def test_the_same_key_in_two_namespaces_is_two_records(self, tier: SharedTier) -> None:
        mine = self.blocks(65_000)
        theirs, keys = mine.twin(), mine.keys(4)
        assert mine.save(tier, range(4)) == [Outcome.OK] * 4
        assert tier.held(theirs.namespace, keys, 0) == 0
        assert theirs.load(tier, range(4)) == [Outcome.MISS] * 4
        assert theirs.save(tier, range(4)) == [Outcome.OK] * 4
        for blocks in (mine, theirs):
            assert tier.held(blocks.namespace, keys, 0) == len(keys)
            assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    def test_one_batch_deletes_in_each_namespace_what_it_names_there(
        self, tier: SharedTier
    ) -> None:
        mine = self.blocks(65_000)
        theirs = mine.twin()
        mine.save(tier, range(3))
        theirs.save(tier, range(3))
        tier.delete([*mine.gets([1]), *theirs.gets([2])])
        for blocks, gone in ((mine, 1), (theirs, 2)):
            for number in range(3):
                expected = Outcome.MISS if number == gone else Outcome.OK
                assert blocks.load(tier, [number]) == [expected]

    # Coverage.

    def test_the_leading_run_is_counted_up_to_a_hole(self, tier: SharedTier) -> None:
        blocks = self.blocks(4_000)
        keys = blocks.keys(20)
        assert tier.held(blocks.namespace, keys, 0) == 0
        blocks.save(tier, [*range(7), *range(8, 20)])
        assert tier.held(blocks.namespace, keys, 0) == 7  # noqa: PLR2004  # the hole
        assert tier.held(blocks.namespace, keys, 3) == 4  # noqa: PLR2004  # from 3 to 7
        assert tier.held(blocks.namespace, keys, 7) == 0
        assert tier.held(blocks.namespace, keys, 8) == 12  # noqa: PLR2004  # to the end
        assert tier.held(blocks.namespace, keys, 20) == 0

    def test_a_run_goes_on_in_the_next_segment(self, tier: SharedTier) -> None:
        blocks = self.blocks(4_000)
        keys = blocks.keys(SEGMENT_BLOCKS + 10)
        blocks.save(tier, range(SEGMENT_BLOCKS - 4, SEGMENT_BLOCKS + 8))
        assert tier.held(blocks.namespace, keys, 0) == 0
        start = SEGMENT_BLOCKS - 4
        assert tier.held(blocks.namespace, keys, start) == 12  # noqa: PLR2004  # as saved
        assert tier.held(blocks.namespace, keys, SEGMENT_BLOCKS + 2) == 6  # noqa: PLR2004  # the rest

    def test_blocks_that_were_not_written_are_not_known(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        if not isinstance(tier, Queryable):
            return  # the store does not query it before a write
        blocks = self.blocks(400_000)
        puts = blocks.puts(range(6))
        assert not any(tier.known(puts))
        blocks.save(tier, range(3))
        assert not any(tier.known(puts)[3:])
        remote_side.kill()
        if self.answers_locally:
            return
        with StallWatch() as watch:
            begun_s = time.monotonic()
            assert not any(tier.known(puts))
            assert watch.since(begun_s) <= self.deadline_s + self.slack_s

    def test_an_index_in_memory_has_the_blocks_that_were_written_in_any_order(
        self, tier: SharedTier
    ) -> None:
        if not isinstance(tier, Indexed):
            return
        blocks = self.blocks(4_000)
        blocks.save(tier, [1, 3, 4])
        assert tier.held(blocks.namespace, blocks.keys(4), 3) == 1
        keys = [blocks.key(number) for number in (4, 0, 1, 2, 3)]
        assert tier.indexed(blocks.namespace, keys) == bytes([1, 0, 1, 0, 1])
        assert tier.indexed(blocks.twin().namespace, keys) == bytes(5)
        assert tier.indexed(blocks.namespace, []) == b""
        tier.delete(blocks.gets([4]))
        assert tier.indexed(blocks.namespace, keys) == bytes([0, 0, 1, 0, 1])

    def test_blocks_that_were_just_written_are_not_aged_and_depend_on_no_other_node(
        self, tier: SharedTier
    ) -> None:
        if not isinstance(tier, Expiring):
            return
        blocks = self.blocks(4_000)
        blocks.save(tier, [1, 2])
        keys = [blocks.key(number) for number in (2, 0, 1)]
        assert tier.aged(blocks.namespace, keys) == bytes(3)
        assert tier.aged(blocks.namespace, []) == b""
        assert tier.refresh(blocks.namespace, keys, 0.0)

    # Threads.

    def test_many_use_it_at_once(self, tier: SharedTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(16))

        def churn(seed: int) -> None:
            chosen = random.Random(seed)  # noqa: S311  # a test replays
            for turn in range(10):
                own = [SEGMENT_BLOCKS * seed + 4 * turn + n for n in range(4)]
                assert blocks.save(tier, own) == [Outcome.OK] * 4
                assert blocks.load(tier, own) == [Outcome.OK] * 4
                assert blocks.load(tier, [chosen.randrange(16)]) == [Outcome.OK]
                assert tier.held(blocks.namespace, blocks.keys(17), 4) == 12  # noqa: PLR2004

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(1, 5)))  # raises what a thread raised

    # Trouble.

    def test_no_answer_is_distinct_from_a_miss(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        if not isinstance(tier, AnsweringTier):
            return
        blocks = self.blocks(65_000)
        blocks.save(tier, range(3))
        keys = blocks.keys(4)
        assert tier.ask(blocks.namespace, keys, 0) == HeldAnswer(3, Outcome.OK)
        assert tier.ask(blocks.namespace, keys[:3], 1) == HeldAnswer(2, Outcome.OK)
        assert tier.ask(blocks.namespace, keys, 3) == HeldAnswer(0, Outcome.OK)
        assert tier.ask(blocks.namespace, keys, 0, 0.0).outcome is not Outcome.OK
        remote_side.kill()
        if self.answers_locally:
            blocks.load(tier, [0])
        answer = tier.ask(blocks.namespace, keys, 0)
        assert answer.blocks == 0
        assert answer.outcome in (Outcome.GONE, Outcome.LATE)

    def test_a_dead_remote_side_is_an_outcome_in_time(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(3))
        remote_side.kill()
        self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE, Outcome.MISS})

    def test_a_stalled_remote_side_is_an_outcome_in_time(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(3))
        remote_side.stall()
        try:
            self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        finally:
            remote_side.wake()

    def test_nothing_is_written_into_a_buffer_after_the_call(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        blocks = self.blocks(2 * MIB)
        blocks.save(tier, range(8))
        gets = blocks.gets(range(8))
        remote_side.stall()
        try:
            outcomes = tier.read(gets)
        finally:
            remote_side.wake()
        assert set(outcomes) <= {Outcome.GONE, Outcome.LATE}
        for get in gets:
            get.into[:] = bytes(len(get.into))
        self._await_recovery(tier, blocks)
        assert all(bytes(get.into) == bytes(len(get.into)) for get in gets)

    def test_it_is_used_again_once_it_is_back(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(3))
        remote_side.kill()
        self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        remote_side.restart()
        self._await_recovery(tier, blocks)
        assert tier.held(blocks.namespace, blocks.keys(5), 0) == 3  # noqa: PLR2004  # as saved
        assert blocks.load(tier, range(3)) == [Outcome.OK] * 3

    def test_it_reports_that_its_remote_side_is_unreachable(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        if not isinstance(tier, Reachable):
            return  # it does not report this
        blocks = self.blocks(65_000)
        blocks.save(tier, range(3))
        assert tier.reachable()
        remote_side.kill()
        end_s = time.monotonic() + _RECOVERY_S
        while tier.reachable():
            assert time.monotonic() < end_s, (
                "the remote side is dead, but the tier reports it as reachable"
            )
            tier.held(blocks.namespace, blocks.keys(3), 0)
            if self.answers_locally:
                blocks.load(tier, [0])
        remote_side.restart()
        self._await_recovery(tier, blocks)
        assert tier.reachable()

    def test_it_opens_while_its_remote_side_is_dead(self, remote_side: RemoteSide) -> None:
        blocks = self.blocks(65_000)
        remote_side.kill()
        with closing(self.make_tier(remote_side)) as tier:
            self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
            time.sleep(_GIVEN_UP_S)
            assert set(blocks.load(tier, range(3))) <= {Outcome.GONE, Outcome.LATE}

    def test_usage_counts_bytes_and_failures(
        self, tier: SharedTier, remote_side: RemoteSide
    ) -> None:
        blocks, before = self.blocks(65_000), tier.usage()
        blocks.save(tier, range(3))
        blocks.load(tier, range(2))
        sizes, usage = [len(put.record) for put in blocks.puts(range(3))], tier.usage()
        assert usage.written_bytes - before.written_bytes == sum(sizes)
        assert usage.read_bytes - before.read_bytes == sum(sizes[:2])
        assert usage.failures == before.failures
        remote_side.kill()
        blocks.load(tier, [0])
        assert tier.usage().failures > 0

    def test_it_describes_its_remote_side(self, tier: SharedTier, remote_side: RemoteSide) -> None:
        assert tier.describe()["tier"] == tier.name
        remote_side.kill()
        with StallWatch() as watch:
            begun_s = time.monotonic()
            assert tier.describe()["tier"] == tier.name
            assert watch.since(begun_s) <= self.deadline_s + self.slack_s

    def test_what_it_reports_is_shown(self, tier: SharedTier, remote_side: RemoteSide) -> None:
        for is_dead in (False, True):
            if is_dead:
                remote_side.kill()
            for told in (tier_status(tier), shared_status(tier)):
                assert not told.trouble, told.trouble
                assert msgspec.msgpack.encode(told)
            described = description(tier)
            assert tier.describe().keys() <= described.keys(), described
            assert msgspec.json.encode(described)
            assert msgspec.msgpack.encode(described)

    def test_after_close_everything_is_gone(self, tier: SharedTier) -> None:
        blocks = self.blocks(4_000)
        blocks.save(tier, range(2))
        tier.close()
        tier.close()
        assert blocks.save(tier, [3]) == [Outcome.GONE]
        assert blocks.load(tier, [0]) == [Outcome.GONE]
        assert tier.held(blocks.namespace, blocks.keys(2), 0) == 0
        assert tier.describe()["tier"] == tier.name

    def _expect_failure(
        self, tier: SharedTier, blocks: ChainedBlocks, allowed: set[Outcome]
    ) -> None:
        """Assert that every call fails with an allowed outcome, in time."""
        calls: list[tuple[Callable[[], Iterable[object]], set[Any]]] = [
            (lambda: blocks.save(tier, range(3)), {Outcome.GONE, Outcome.LATE}),
            (lambda: blocks.load(tier, range(3)), allowed),
            (lambda: [tier.held(blocks.namespace, blocks.keys(3), 0)], {0}),
        ]
        with StallWatch() as watch:
            for call, expected in calls:
                begun_s = time.monotonic()
                assert set(call()) <= expected
                assert watch.since(begun_s) <= self.deadline_s + self.slack_s

    def _await_recovery(self, tier: SharedTier, blocks: ChainedBlocks) -> None:
        end_s = time.monotonic() + _RECOVERY_S
        while blocks.save(tier, range(3)) != [Outcome.OK] * 3:
            assert time.monotonic() < end_s, f"not used again within {_RECOVERY_S:.0f} s"
            time.sleep(0.02)
