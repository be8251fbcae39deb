"""Every promise of `holdfast.tiers.base.Shared` as a test; a shared tier proves itself with these.

    class TestMyTier(SharedTierContract):
        def make_far_side(self, folder):
            return MyServer(folder)

        def make_tier(self, far_side):
            return MyTier(far_side.address)

The far side is real: it is killed, stopped and started again while the tier is in use. Payloads
are a pseudo-random function of the key, so every byte that comes back is checked.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import MIB, PAYLOAD_BYTES_MAX, SEGMENT_BLOCKS
from holdfast.testing.chained import Chained
from holdfast.testing.payloads import is_right, key_of, world_of
from holdfast.testing.standstill import Standstills
from holdfast.tiers.base import Asked, Place, Reachable, Reserved, Shared

SIZES = (4_000, 65_000, 300_000, 2 * MIB)
"""Payload bytes of the records used."""

_RECOVERY_S = 30.0


class FarSide(Protocol):
    """What a shared tier is a client of. Empty when made."""

    def kill(self) -> None:
        """End it at once, and what it held with it."""
        ...

    def stall(self) -> None:
        """Let it answer nothing, without closing anything; `wake` ends that."""
        ...

    def wake(self) -> None:
        """Let it go on where it was."""
        ...

    def restart(self) -> None:
        """Start it again after `kill`, where it was, empty."""
        ...

    def close(self) -> None:
        """End it for good."""
        ...


class SharedTierContract:
    """Subclass it, say how to make the two sides, and run pytest.

    `deadline_s`: by when a call is over, whatever the far side does; `slack_s` is what a busy
    machine may add; for how long it stood still does not count.
    """

    deadline_s: ClassVar[float] = 2.0
    slack_s: ClassVar[float] = 2.0

    def make_far_side(self, folder: Path) -> FarSide:
        """Return a far side that is ready to serve."""
        raise NotImplementedError

    def make_tier(self, far_side: Any) -> Shared:  # noqa: ANN401  # as `make_far_side` made it
        """Return a tier of that far side; every call returns another client."""
        raise NotImplementedError

    @pytest.fixture
    def far_side(self, tmp_path: Path) -> Iterator[FarSide]:
        """A far side of this test's own."""
        far_side = self.make_far_side(tmp_path)
        yield far_side
        far_side.close()

    @pytest.fixture
    def tier(self, far_side: FarSide) -> Iterator[Shared]:
        """A tier of it that has met it, closed at the end."""
        tier = self.make_tier(far_side)
        self._await_recovery(tier, Chained(4_000))
        yield tier
        tier.close()

    # Write and read.

    def test_it_is_a_shared_tier(self, tier: Shared) -> None:
        assert isinstance(tier, Shared)
        assert list(tier.survivors()) == []

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_was_written_is_read(self, tier: Shared, nbytes: int) -> None:
        blocks = Chained(nbytes)
        assert blocks.save(tier, range(6)) == [Outcome.OK] * 6
        assert blocks.load(tier, range(6)) == [Outcome.OK] * 6

    def test_what_one_wrote_another_reads(self, tier: Shared, far_side: FarSide) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(6))
        other = self.make_tier(far_side)
        try:
            assert other.held(blocks.world, blocks.keys(8), 0) == 6  # noqa: PLR2004  # as saved
            assert blocks.load(other, range(6)) == [Outcome.OK] * 6
        finally:
            other.close()

    def test_a_block_may_be_written_again(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        for _ in range(3):
            assert blocks.save(tier, range(3)) == [Outcome.OK] * 3
        assert blocks.load(tier, range(3)) == [Outcome.OK] * 3

    def test_blocks_of_many_sizes_and_segments_in_one_batch(self, tier: Shared) -> None:
        puts, gets = [], []
        for blocks in map(Chained, SIZES):
            puts += blocks.puts([0, 1, SEGMENT_BLOCKS])
            gets += blocks.gets([0, 1, SEGMENT_BLOCKS])
        assert tier.write(puts) == [Outcome.OK] * len(puts)
        assert tier.read(gets) == [Outcome.OK] * len(gets)

    def test_an_empty_batch_is_nothing(self, tier: Shared) -> None:
        assert tier.reserve([]) == Reserved([], [])
        assert tier.write([]) == []
        assert tier.read([]) == []
        assert tier.held(world_of(4_000), [], 0) == 0
        tier.free([])

    def test_buffers_stay_the_callers(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        [put] = blocks.puts([1])
        before = bytes(put.record)
        assert tier.write([put]) == [Outcome.OK]
        assert bytes(put.record) == before
        put.record[:] = bytes(len(before))
        assert blocks.load(tier, [1]) == [Outcome.OK]

    def test_an_unaligned_buffer_is_served_too(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        [put] = blocks.puts([1])
        shifted = memoryview(bytearray(len(put.record) + 17))[17:]
        shifted[:] = put.record
        assert tier.write([put._replace(record=shifted)]) == [Outcome.OK]
        shifted[:] = bytes(len(shifted))
        [get] = blocks.gets([1])
        assert tier.read([get._replace(into=shifted)]) == [Outcome.OK]
        assert is_right(shifted, blocks.world, get.key)

    # Places.

    def test_any_size_has_a_place(self, tier: Shared) -> None:
        sizes = [4096, 2 * MIB, PAYLOAD_BYTES_MAX]
        found = tier.reserve(sizes)
        assert len(found.places) == len(sizes)
        assert min(found.places) >= 0
        assert found.dropped == []

    def test_a_reserved_place_holds_nothing(self, tier: Shared) -> None:
        blocks = Chained(4_000)
        tier.reserve([blocks.world.record_bytes])
        assert blocks.load(tier, [0]) == [Outcome.MISS]

    def test_freeing_forgets_nothing(self, tier: Shared) -> None:
        blocks = Chained(4_000)
        blocks.save(tier, range(4))
        tier.free([blocks.place(number) for number in range(4)])
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    def test_what_was_condemned_is_gone_and_can_be_written_again(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(4))
        tier.condemn(blocks.gets([1, 3]))
        assert blocks.load(tier, [0]) == [Outcome.OK]
        assert blocks.load(tier, [1]) == blocks.load(tier, [3]) == [Outcome.MISS]
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    # What is not there.

    def test_what_is_not_there_is_a_miss(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, [0, 1, 3, 4])
        outcomes = blocks.load(tier, range(6))
        assert outcomes[:3] == [Outcome.OK, Outcome.OK, Outcome.MISS]
        assert set(outcomes[3:5]) <= {Outcome.OK, Outcome.MISS}
        assert outcomes[5] is Outcome.MISS
        assert blocks.load(tier, [3, 4]) == [Outcome.OK] * 2

    def test_another_key_is_never_served(self, tier: Shared) -> None:
        blocks = Chained(4_000)
        blocks.save(tier, range(3))
        wrong = [get._replace(place=Place(get.place ^ 5)) for get in blocks.gets(range(3))]
        assert blocks.check(wrong, tier.read(wrong)) <= {Outcome.OK, Outcome.MISS}
        wrong = [get._replace(key=key_of(9, 9)) for get in blocks.gets(range(3))]
        assert tier.read(wrong) == [Outcome.MISS] * 3

    def test_a_record_of_another_length_is_a_miss(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(4))
        gets = blocks.gets(range(4))
        for number, nbytes in ((1, 4_096), (2, 1 << 20)):
            gets[number] = gets[number]._replace(into=aligned_buffer(nbytes))
        outcomes = tier.read(gets)
        assert outcomes[:3] == [Outcome.OK, Outcome.MISS, Outcome.MISS]
        blocks.check([gets[0], gets[3]], [outcomes[0], outcomes[3]])
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4

    # What is held.

    def test_the_leading_run_is_counted_up_to_a_hole(self, tier: Shared) -> None:
        blocks = Chained(4_000)
        keys = blocks.keys(20)
        assert tier.held(blocks.world, keys, 0) == 0
        blocks.save(tier, [*range(7), *range(8, 20)])
        assert tier.held(blocks.world, keys, 0) == 7  # noqa: PLR2004  # the hole
        assert tier.held(blocks.world, keys, 3) == 4  # noqa: PLR2004  # from 3 to 7
        assert tier.held(blocks.world, keys, 7) == 0
        assert tier.held(blocks.world, keys, 8) == 12  # noqa: PLR2004  # to the end
        assert tier.held(blocks.world, keys, 20) == 0

    def test_a_run_goes_on_in_the_next_segment(self, tier: Shared) -> None:
        blocks = Chained(4_000)
        keys = blocks.keys(SEGMENT_BLOCKS + 10)
        blocks.save(tier, range(SEGMENT_BLOCKS - 4, SEGMENT_BLOCKS + 8))
        assert tier.held(blocks.world, keys, 0) == 0
        start = SEGMENT_BLOCKS - 4
        assert tier.held(blocks.world, keys, start) == 12  # noqa: PLR2004  # as saved
        assert tier.held(blocks.world, keys, SEGMENT_BLOCKS + 2) == 6  # noqa: PLR2004  # the rest

    # Threads.

    def test_what_is_known_is_there(self, tier: Shared, far_side: FarSide) -> None:
        if not isinstance(tier, Asked):
            return  # nobody asks it before a write
        blocks = Chained(400_000)
        puts = blocks.puts(range(6))
        assert not any(tier.known(puts))
        blocks.save(tier, range(3))
        assert not any(tier.known(puts)[3:])
        far_side.kill()
        begun_s = time.monotonic()
        assert not any(tier.known(puts))
        assert time.monotonic() - begun_s <= self.deadline_s + self.slack_s

    def test_many_use_it_at_once(self, tier: Shared) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(16))
        wrong: list[object] = []

        def churn(seed: int) -> None:
            chosen = random.Random(seed)  # noqa: S311  # a test replays
            try:
                for turn in range(10):
                    own = [SEGMENT_BLOCKS * seed + 4 * turn + n for n in range(4)]
                    assert blocks.save(tier, own) == [Outcome.OK] * 4
                    assert blocks.load(tier, own) == [Outcome.OK] * 4
                    assert blocks.load(tier, [chosen.randrange(16)]) == [Outcome.OK]
                    assert tier.held(blocks.world, blocks.keys(17), 4) == 12  # noqa: PLR2004
            except BaseException as error:  # noqa: BLE001  # shown by the assertion below
                wrong.append(error)

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    # Trouble.

    def test_a_dead_far_side_is_an_outcome_in_time(self, tier: Shared, far_side: FarSide) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(3))
        far_side.kill()
        self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE, Outcome.MISS})

    def test_a_silent_far_side_is_an_outcome_in_time(self, tier: Shared, far_side: FarSide) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(3))
        far_side.stall()
        try:
            self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        finally:
            far_side.wake()

    def test_nothing_is_written_into_a_buffer_after_the_call(
        self, tier: Shared, far_side: FarSide
    ) -> None:
        blocks = Chained(2 * MIB)
        blocks.save(tier, range(8))
        gets = blocks.gets(range(8))
        far_side.stall()
        try:
            outcomes = tier.read(gets)
        finally:
            far_side.wake()
        assert set(outcomes) <= {Outcome.GONE, Outcome.LATE}
        for get in gets:
            get.into[:] = bytes(len(get.into))
        self._await_recovery(tier, blocks)
        assert all(bytes(get.into) == bytes(len(get.into)) for get in gets)

    def test_it_is_used_again_once_it_is_back(self, tier: Shared, far_side: FarSide) -> None:
        blocks = Chained(65_000)
        blocks.save(tier, range(3))
        far_side.kill()
        self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        far_side.restart()
        self._await_recovery(tier, blocks)
        assert tier.held(blocks.world, blocks.keys(5), 0) == 3  # noqa: PLR2004  # as saved
        assert blocks.load(tier, range(3)) == [Outcome.OK] * 3

    def test_it_says_so_while_nobody_is_there(self, tier: Shared, far_side: FarSide) -> None:
        if not isinstance(tier, Reachable):
            return  # it does not promise to know
        blocks = Chained(65_000)
        blocks.save(tier, range(3))
        assert tier.reachable()
        far_side.kill()
        end_s = time.monotonic() + _RECOVERY_S
        while tier.reachable():
            assert time.monotonic() < end_s, "nobody is there, and it does not say so"
            tier.held(blocks.world, blocks.keys(3), 0)
        far_side.restart()
        self._await_recovery(tier, blocks)
        assert tier.reachable()

    def test_it_opens_although_nobody_answers(self, far_side: FarSide) -> None:
        blocks = Chained(65_000)
        far_side.kill()
        tier = self.make_tier(far_side)
        try:
            self._expect_failure(tier, blocks, {Outcome.GONE, Outcome.LATE})
        finally:
            tier.close()

    def test_usage_counts_bytes_and_failures(self, tier: Shared, far_side: FarSide) -> None:
        blocks, before = Chained(65_000), tier.usage()
        blocks.save(tier, range(3))
        blocks.load(tier, range(2))
        size, usage = blocks.world.record_bytes, tier.usage()
        assert usage.written_bytes - before.written_bytes == 3 * size
        assert usage.read_bytes - before.read_bytes == 2 * size
        assert usage.failures == before.failures
        far_side.kill()
        blocks.load(tier, [0])
        assert tier.usage().failures > 0

    def test_it_describes_its_far_side(self, tier: Shared, far_side: FarSide) -> None:
        assert tier.describe()["tier"] == tier.name
        far_side.kill()
        begun_s = time.monotonic()
        assert tier.describe()["tier"] == tier.name
        assert time.monotonic() - begun_s <= self.deadline_s + self.slack_s

    def test_after_close_everything_is_gone(self, tier: Shared) -> None:
        blocks = Chained(4_000)
        blocks.save(tier, range(2))
        tier.close()
        tier.close()
        assert blocks.save(tier, [3]) == [Outcome.GONE]
        assert blocks.load(tier, [0]) == [Outcome.GONE]
        assert tier.held(blocks.world, blocks.keys(2), 0) == 0
        assert tier.describe()["tier"] == tier.name

    def _expect_failure(self, tier: Shared, blocks: Chained, allowed: set[Outcome]) -> None:
        """Assert that every call fails as allowed, and in time."""
        calls: list[tuple[Callable[[], Iterable[object]], set[Any]]] = [
            (lambda: blocks.save(tier, range(3)), {Outcome.GONE, Outcome.LATE}),
            (lambda: blocks.load(tier, range(3)), allowed),
            (lambda: [tier.held(blocks.world, blocks.keys(3), 0)], {0}),
        ]
        with Standstills() as watch:
            for call, expected in calls:
                begun_s = time.monotonic()
                assert set(call()) <= expected
                assert watch.since(begun_s) <= self.deadline_s + self.slack_s

    def _await_recovery(self, tier: Shared, blocks: Chained) -> None:
        end_s = time.monotonic() + _RECOVERY_S
        while blocks.save(tier, range(3)) != [Outcome.OK] * 3:
            assert time.monotonic() < end_s, f"not used again within {_RECOVERY_S:.0f} s"
            time.sleep(0.02)
