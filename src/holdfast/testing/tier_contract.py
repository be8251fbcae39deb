"""Every promise of `holdfast.tiers.base.Tier` as a test; a tier proves itself with one subclass.

    class TestMyTier(TierContract):
        durable = True

        def make_tier(self, folder, capacity_bytes):
            return MyTier(folder, capacity_bytes)

pytest collects the inherited tests. Payloads are a pseudo-random function of the key, so every
byte that comes back is checked.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.testing.payloads import is_right, key_of, record_of, world_of
from holdfast.tiers.base import NOWHERE, Get, Place, Put, Reserved, Tier

SIZES = (4_000, 65_000, 300_000)
"""Payload bytes of the records used: one sector, some, and many."""


class TierContract:
    """Subclass it, say how to make the tier, and run pytest.

    `durable`: a tier made again on the same folder finds what was written. `capacity_bytes`: asked
    of `make_tier`; the tier may take a little less.
    """

    durable: ClassVar[bool] = False
    capacity_bytes: ClassVar[int] = 16 << 20

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        """Return a new tier; `folder` is empty the first time and the same at a restart."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier, closed at the end."""
        tier = self.make_tier(tmp_path, self.capacity_bytes)
        yield tier
        tier.close()

    # Write and read.

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_was_written_is_read(self, tier: Tier, nbytes: int) -> None:
        blocks = Blocks(nbytes)
        places = blocks.save(tier, range(8))
        assert NOWHERE not in places
        assert blocks.load(tier, range(8), places) == [Outcome.OK] * 8

    def test_records_of_many_sizes_share_a_tier(self, tier: Tier) -> None:
        held = [(blocks, blocks.save(tier, range(4))) for blocks in map(Blocks, SIZES)]
        for blocks, places in held:
            assert blocks.load(tier, range(4), places) == [Outcome.OK] * 4

    def test_places_differ_and_are_not_negative(self, tier: Tier) -> None:
        places = tier.reserve([8192] * 20).places
        assert len(set(places)) == 20  # noqa: PLR2004 - as asked
        assert min(places) >= 0

    def test_an_empty_batch_is_nothing(self, tier: Tier) -> None:
        assert tier.reserve([]) == Reserved([], [])
        assert tier.write([]) == []
        assert tier.read([]) == []
        tier.free([])

    def test_buffers_stay_the_callers(self, tier: Tier) -> None:
        blocks = Blocks(65_000)
        record = blocks.record(1)
        before = bytes(record[16:])
        [place] = tier.reserve([len(record)]).places
        assert tier.write([Put(place, record)]) == [Outcome.OK]
        assert bytes(record[16:]) == before, "only the 16-byte mark may change"
        record[:] = bytes(len(record))
        assert blocks.load(tier, [1], [place]) == [Outcome.OK]

    def test_an_unaligned_buffer_is_served_too(self, tier: Tier) -> None:
        blocks = Blocks(65_000)
        size = len(blocks.record(1))
        [place] = tier.reserve([size]).places
        shifted = memoryview(bytearray(size + 17))[17:]
        shifted[:] = blocks.record(1)
        assert tier.write([Put(place, shifted)]) == [Outcome.OK]
        shifted[:] = bytes(size)
        assert tier.read([Get(place, blocks.key(1), shifted, blocks.world)]) == [Outcome.OK]
        assert is_right(shifted, blocks.world, blocks.key(1))

    # What is not there.

    def test_a_reserved_place_holds_nothing(self, tier: Tier) -> None:
        blocks = Blocks(4_000)
        places = tier.reserve([len(blocks.record(1))]).places
        blocks.expect_nothing(tier, [1], places)

    def test_another_key_is_never_served(self, tier: Tier) -> None:
        blocks = Blocks(4_000)
        places = blocks.save(tier, range(4))
        blocks.expect_nothing(tier, range(4), places[1:] + places[:1])

    def test_a_place_that_never_was_is_a_miss(self, tier: Tier) -> None:
        blocks = Blocks(4_000)
        blocks.expect_nothing(tier, [1, 2], [Place(1 << 50), Place(12_345)])

    def test_a_freed_place_is_a_miss_or_another_record(self, tier: Tier) -> None:
        blocks = Blocks(65_000)
        places = blocks.save(tier, range(6))
        tier.free(places[:3])
        blocks.expect_nothing(tier, range(3), places[:3])
        assert blocks.load(tier, range(3, 6), places[3:]) == [Outcome.OK] * 3
        tier.free(places[:3])

    def test_writing_where_nothing_is_reserved_fails(self, tier: Tier) -> None:
        blocks = Blocks(4_000)
        record = blocks.record(1)
        [place] = tier.reserve([len(record)]).places
        tier.free([place])
        assert tier.write([Put(place, record)]) != [Outcome.OK]
        blocks.expect_nothing(tier, [1], [place])

    # Room.

    def test_a_size_it_can_never_hold_gets_nowhere(self, tier: Tier) -> None:
        found = tier.reserve([tier.usage().capacity_bytes * 2, 8192])
        assert found.places[0] == NOWHERE
        assert found.places[1] != NOWHERE

    def test_full_is_said_and_freed_room_is_found_again(self, tier: Tier) -> None:
        size = len(Blocks(300_000).record(0))
        places: list[Place] = []
        while (found := tier.reserve([size])).places != [NOWHERE]:
            assert not found.dropped, "nothing was written, so there is nothing to give up"
            places += found.places
            assert len(places) * size <= tier.usage().capacity_bytes
        assert len(places) * size >= tier.usage().capacity_bytes // 2
        tier.free(places)
        again = tier.reserve([size] * (len(places) // 2)).places
        assert NOWHERE not in again

    def test_what_is_dropped_is_named_and_the_rest_stays(self, tier: Tier) -> None:
        blocks = Blocks(300_000)
        held: dict[bytes, tuple[int, Place]] = {}
        for number in range(3 * self.capacity_bytes // 300_000):
            found = blocks.reserve(tier)
            for dropped in found.dropped:
                assert held.pop(dropped.key)[1] == dropped.place
            if found.places == [NOWHERE]:
                break
            assert tier.write([Put(found.places[0], blocks.record(number))]) == [Outcome.OK]
            held[blocks.key(number)] = (number, found.places[0])
        assert tier.usage().records == len(held)
        assert len(held) * 300_000 >= tier.usage().capacity_bytes // 2
        numbers, places = zip(*held.values(), strict=True)
        assert blocks.load(tier, numbers, places) == [Outcome.OK] * len(held)

    def test_usage_adds_up(self, tier: Tier) -> None:
        blocks = Blocks(65_000)
        size = len(blocks.record(0))
        assert (tier.usage().used_bytes, tier.usage().records) == (0, 0)
        assert 0 < tier.usage().capacity_bytes <= self.capacity_bytes
        places = blocks.save(tier, range(5))
        assert tier.usage().records == 5  # noqa: PLR2004 - as saved
        assert 5 * size <= tier.usage().used_bytes <= 10 * size
        tier.free(places)
        assert (tier.usage().used_bytes, tier.usage().records) == (0, 0)

    # Threads.

    def test_readers_and_writers_do_not_disturb_one_another(self, tier: Tier) -> None:
        blocks = Blocks(65_000)
        kept = blocks.save(tier, range(16))
        wrong: list[object] = []

        def churn(seed: int) -> None:
            chosen = random.Random(seed)  # noqa: S311 - a test replays
            try:
                for turn in range(12):
                    numbers = [1_000 * seed + 4 * turn + n for n in range(4)]
                    places = blocks.save(tier, numbers)
                    assert blocks.load(tier, numbers, places) == [Outcome.OK] * 4
                    tier.free(places)
                    number = chosen.randrange(16)
                    assert blocks.load(tier, [number], [kept[number]]) == [Outcome.OK]
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                wrong.append(error)

        threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_a_reader_during_reuse_never_sees_wrong_bytes(self, tier: Tier) -> None:
        blocks = Blocks(65_000)
        places = blocks.save(tier, range(8))
        stop = threading.Event()
        wrong: list[object] = []

        def read() -> None:
            try:
                while not stop.is_set():
                    blocks.load(tier, range(8), places)
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                wrong.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        tier.free(places)
        for turn in range(20):
            numbers = range(100 + 8 * turn, 108 + 8 * turn)
            tier.free(blocks.save(tier, numbers))
        stop.set()
        reader.join()
        assert wrong == []

    # The end, and after.

    def test_after_close_everything_is_gone(self, tier: Tier) -> None:
        blocks = Blocks(4_000)
        record = blocks.record(1)
        places = tier.reserve([len(record)] * 2).places
        assert tier.write([Put(places[0], record)]) == [Outcome.OK]
        tier.close()
        tier.close()
        assert tier.write([Put(places[1], record)]) == [Outcome.GONE]
        assert tier.read([Get(places[0], blocks.key(1), record, blocks.world)]) == [Outcome.GONE]

    def test_what_survives_is_what_was_written(self, tmp_path: Path) -> None:
        blocks = Blocks(65_000)
        first = self.make_tier(tmp_path, self.capacity_bytes)
        assert list(first.survivors()) == []
        places = blocks.save(first, range(20))
        first.free(places[:2])
        first.close()
        second = self.make_tier(tmp_path, self.capacity_bytes)
        try:
            found = list(second.survivors())
            expected = [blocks.key(n) for n in range(2, 20)] if self.durable else []
            assert [survivor.header.key for survivor in found] == expected
            if self.durable:
                again = [survivor.place for survivor in found]
                assert blocks.load(second, range(2, 20), again) == [Outcome.OK] * 18
                assert second.usage().records == 18  # noqa: PLR2004 - as saved
        finally:
            second.close()

    def test_it_serves_while_survivors_come_in(self, tmp_path: Path) -> None:
        blocks = Blocks(65_000)
        first = self.make_tier(tmp_path, self.capacity_bytes)
        blocks.save(first, range(20))
        first.close()
        second = self.make_tier(tmp_path, self.capacity_bytes)
        try:
            fresh = blocks.save(second, range(100, 104))
            assert blocks.load(second, range(100, 104), fresh) == [Outcome.OK] * 4
            for survivor in second.survivors():
                number = next(n for n in range(20) if blocks.key(n) == survivor.header.key)
                assert blocks.load(second, [number], [survivor.place]) == [Outcome.OK]
                places = blocks.save(second, [200 + number])
                assert blocks.load(second, [200 + number], places) == [Outcome.OK]
        finally:
            second.close()


class Blocks:
    """Test blocks of one size, by number, and their way in and out of a tier."""

    def __init__(self, payload_bytes: int) -> None:
        self.world = world_of(payload_bytes)

    def key(self, number: int) -> bytes:
        """Return the key of block `number`."""
        return key_of(number, self.world.payload_bytes)

    def record(self, number: int) -> memoryview:
        """Return the packed record of block `number`, in memory of its own."""
        return record_of(self.world, self.key(number))

    def reserve(self, tier: Tier) -> Reserved:
        """Ask for one place."""
        return tier.reserve([self.world.record_bytes])

    def save(self, tier: Tier, numbers: Sequence[int]) -> list[Place]:
        """Reserve and write blocks that there must be room for; return their places."""
        places = tier.reserve([self.world.record_bytes] * len(numbers)).places
        puts = [Put(place, self.record(n)) for place, n in zip(places, numbers, strict=True)]
        assert tier.write(puts) == [Outcome.OK] * len(puts)
        return places

    def load(self, tier: Tier, numbers: Sequence[int], places: Sequence[Place]) -> list[Outcome]:
        """Read blocks; CORRUPT where OK does not verify. Raises if it does with wrong bytes."""
        gets = [
            Get(place, self.key(n), aligned_buffer(self.world.record_bytes), self.world)
            for n, place in zip(numbers, places, strict=True)
        ]
        outcomes = []
        for get, outcome in zip(gets, tier.read(gets), strict=True):
            right = outcome is Outcome.OK and is_right(get.into, self.world, get.key)
            outcomes.append(Outcome.CORRUPT if outcome is Outcome.OK and not right else outcome)
        return outcomes

    def expect_nothing(self, tier: Tier, numbers: Sequence[int], places: Sequence[Place]) -> None:
        """Assert that a read is a MISS, or brings bytes that do not verify for the key."""
        outcomes = self.load(tier, numbers, places)
        assert set(outcomes) <= {Outcome.MISS, Outcome.CORRUPT}
