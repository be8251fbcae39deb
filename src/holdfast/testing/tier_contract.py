"""The contract of `tiers.base.LocalTier` as tests: a subclass tests one tier.

    class TestMyTier(TierContract):
        durable = True

        def make_tier(self, folder, capacity_bytes):
            return MyTier(folder, capacity_bytes)

pytest collects the inherited tests. Payloads are a pseudo-random function of the key, so that every
byte that is read is checked.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from holdfast.blocks.namespace import namespace_of as namespace_of_header
from holdfast.buffers import aligned_buffer
from holdfast.codec.codec import Codec
from holdfast.errors import Outcome
from holdfast.testing.payloads import (
    encoded_record,
    header_of,
    is_right,
    is_right_encoded,
    key_of,
    namespace_of,
    record_of,
    shortened,
)
from holdfast.tiers.base import (
    NOWHERE,
    Flushable,
    LocalTier,
    NamesCandidates,
    Place,
    ReservedPlaces,
    TierGet,
    TierPut,
)
from holdfast.tiers.reported import tier_status

SIZES = (4_000, 65_000, 300_000)
"""Payload bytes of the test records: one sector, some, and many."""


class TierContract:
    """The tests; a subclass makes the tier.

    `durable`: a second tier on the same folder finds the records of the first. `capacity_bytes`:
    the argument of `make_tier`; the tier may have a little less. `codec`: encodes all records of
    the tests, so that most are shorter than a slot.
    """

    codec: ClassVar[Codec | None] = None

    durable: ClassVar[bool] = False
    capacity_bytes: ClassVar[int] = 16 << 20

    def make_tier(self, folder: Path, capacity_bytes: int) -> LocalTier:
        """Return a new tier; `folder` is empty at first, and the same at a restart."""
        raise NotImplementedError

    def blocks(self, raw_bytes: int, seed: int = 0) -> Blocks:
        """Return test blocks with payloads of this many bytes."""
        return Blocks(raw_bytes, seed, self.codec)

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[LocalTier]:
        """A fresh tier, closed at the end."""
        tier = self.make_tier(tmp_path, self.capacity_bytes)
        yield tier
        tier.close()

    # Write and read.

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_was_written_is_read(self, tier: LocalTier, nbytes: int) -> None:
        blocks = self.blocks(nbytes)
        places = blocks.save(tier, range(8))
        assert NOWHERE not in places
        assert blocks.load(tier, range(8), places) == [Outcome.OK] * 8

    def test_records_of_many_sizes_share_a_tier(self, tier: LocalTier) -> None:
        held = [(blocks, blocks.save(tier, range(4))) for blocks in map(self.blocks, SIZES)]
        for blocks, places in held:
            assert blocks.load(tier, range(4), places) == [Outcome.OK] * 4

    def test_places_differ_and_are_not_negative(self, tier: LocalTier) -> None:
        places = tier.reserve([8192] * 20).places
        assert len(set(places)) == 20  # noqa: PLR2004 - as asked
        assert min(places) >= 0

    def test_records_of_one_namespace_may_differ_in_length(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        records = [blocks.record(number) for number in range(6)]
        records[1], records[4] = shortened(records[1]), shortened(records[4])
        before = tier.usage().used_bytes
        places = tier.reserve([*map(len, records)]).places
        puts = [TierPut(place, record) for place, record in zip(places, records, strict=True)]
        assert tier.write(puts) == [Outcome.OK] * 6
        used = tier.usage().used_bytes - before
        assert used <= sum(map(len, records)) + sum(map(len, (records[1], records[4])))
        gets = blocks.gets(range(6), places)
        assert tier.read(gets) == [Outcome.OK] * 6
        for get, record in zip(gets, records, strict=True):
            assert bytes(get.into[16 : len(record)]) == bytes(record[16:])

    def test_a_record_longer_than_its_buffer_is_a_miss(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        places = blocks.save(tier, range(3))
        gets = blocks.gets(range(3), places)
        gets[1] = gets[1]._replace(into=aligned_buffer(4_096))
        assert tier.read(gets) == [Outcome.OK, Outcome.MISS, Outcome.OK]

    def test_an_empty_batch_is_nothing(self, tier: LocalTier) -> None:
        assert tier.reserve([]) == ReservedPlaces([], [])
        assert tier.write([]) == []
        assert tier.read([]) == []
        tier.free([])

    def test_buffers_stay_the_callers(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        record = blocks.record(1)
        before = bytes(record[16:])
        [place] = tier.reserve([len(record)]).places
        assert tier.write([TierPut(place, record)]) == [Outcome.OK]
        assert bytes(record[16:]) == before, "only the 16-byte mark may change"
        record[:] = bytes(len(record))
        assert blocks.load(tier, [1], [place]) == [Outcome.OK]

    def test_an_unaligned_buffer_is_served_too(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        size = len(blocks.record(1))
        [place] = tier.reserve([size]).places
        shifted = memoryview(bytearray(size + 17))[17:]
        shifted[:] = blocks.record(1)
        assert tier.write([TierPut(place, shifted)]) == [Outcome.OK]
        shifted[:] = bytes(size)
        assert tier.read([TierGet(place, blocks.key(1), shifted, blocks.namespace)]) == [Outcome.OK]
        assert blocks.is_right(shifted, 1)

    # Misses.

    def test_a_reserved_place_holds_nothing(self, tier: LocalTier) -> None:
        blocks = self.blocks(4_000)
        places = tier.reserve([len(blocks.record(1))]).places
        blocks.expect_nothing(tier, [1], places)

    def test_another_key_is_never_served(self, tier: LocalTier) -> None:
        blocks = self.blocks(4_000)
        places = blocks.save(tier, range(4))
        blocks.expect_nothing(tier, range(4), places[1:] + places[:1])

    def test_a_place_that_never_was_is_a_miss(self, tier: LocalTier) -> None:
        blocks = self.blocks(4_000)
        blocks.expect_nothing(tier, [1, 2], [Place(1 << 50), Place(12_345)])

    def test_a_freed_place_is_a_miss_or_another_record(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        places = blocks.save(tier, range(6))
        tier.free(places[:3])
        blocks.expect_nothing(tier, range(3), places[:3])
        assert blocks.load(tier, range(3, 6), places[3:]) == [Outcome.OK] * 3
        tier.free(places[:3])

    def test_writing_where_nothing_is_reserved_fails(self, tier: LocalTier) -> None:
        blocks = self.blocks(4_000)
        record = blocks.record(1)
        [place] = tier.reserve([len(record)]).places
        tier.free([place])
        assert tier.write([TierPut(place, record)]) != [Outcome.OK]
        blocks.expect_nothing(tier, [1], [place])

    # Capacity.

    def test_a_size_it_can_never_hold_gets_nowhere(self, tier: LocalTier) -> None:
        found = tier.reserve([tier.usage().capacity_bytes * 2, 8192])
        assert found.places[0] == NOWHERE
        assert found.places[1] != NOWHERE

    def test_a_size_of_nothing_gets_nowhere(self, tier: LocalTier) -> None:
        assert tier.reserve([0]) == ReservedPlaces([NOWHERE], [])

    def test_a_size_it_can_never_hold_drops_nothing(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        places = blocks.save(tier, range(4))
        found = tier.reserve([tier.usage().capacity_bytes * 2])
        assert found == ReservedPlaces([NOWHERE], [])
        assert blocks.load(tier, range(4), places) == [Outcome.OK] * 4

    def test_a_flush_makes_written_records_safe_and_no_others(self, tier: LocalTier) -> None:
        """A place without a record is never safe."""
        if not isinstance(tier, Flushable):
            pytest.skip("not Flushable")
        blocks = self.blocks(4_000)
        places = blocks.save(tier, range(3))
        [empty] = blocks.reserve(tier).places
        assert tier.flush([*places, empty]) == [True] * 3 + [False]
        tier.free(places[:1])
        assert tier.flush([*places[1:], empty]) == [True, True, False]

    def test_a_full_tier_reserves_nowhere_and_freed_places_again(self, tier: LocalTier) -> None:
        size = len(self.blocks(300_000).record(0))
        places: list[Place] = []
        while (found := tier.reserve([size])).places != [NOWHERE]:
            assert not found.dropped, "no record was written, so none can be dropped"
            places += found.places
            assert len(places) * size <= tier.usage().capacity_bytes
        assert len(places) * size >= tier.usage().capacity_bytes // 2
        tier.free(places)
        again = tier.reserve([size] * (len(places) // 2)).places
        assert NOWHERE not in again

    def test_a_record_of_another_length_is_corrupt_and_its_place_is_free_again(
        self, tier: LocalTier
    ) -> None:
        large, small = self.blocks(300_000), self.blocks(4_000)
        size = len(large.record(0))
        places: list[Place] = []
        while (found := tier.reserve([size])).places != [NOWHERE]:
            places += found.places
            assert len(places) * size <= tier.usage().capacity_bytes
        puts = [TierPut(place, small.record(n)) for n, place in enumerate(places)]
        assert tier.write(puts) == [Outcome.CORRUPT] * len(puts)
        small.expect_nothing(tier, range(len(places)), places)
        again = tier.reserve([size] * (len(places) // 2)).places
        assert NOWHERE not in again

    def test_what_is_dropped_is_named_and_the_rest_stays(self, tier: LocalTier) -> None:
        both = self.blocks(300_000), self.blocks(300_000, seed=1)
        held: dict[Place, tuple[Blocks, int]] = {}
        for number in range(3 * self.capacity_bytes // 300_000):
            blocks, each = both[number % 2], number // 2
            found = blocks.reserve(tier)
            for dropped in found.dropped:
                was, gone = held.pop(dropped.place)
                assert (dropped.namespace, dropped.key) == (was.namespace, was.key(gone))
            if found.places == [NOWHERE]:
                break
            assert tier.write([TierPut(found.places[0], blocks.record(each))]) == [Outcome.OK]
            held[found.places[0]] = blocks, each
        assert tier.usage().records == len(held)
        assert len(held) * 300_000 >= tier.usage().capacity_bytes // 2
        for place, (blocks, each) in held.items():
            assert blocks.load(tier, [each], [place]) == [Outcome.OK]

    # Candidates, if the tier names them.

    def test_a_tier_with_room_names_no_candidates(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        blocks.save(tier, range(8))
        assert _naming(tier).candidates(len(blocks.record(0))) == []

    def test_what_is_dropped_was_named_before(self, tier: LocalTier) -> None:
        blocks, naming, dropped = self.blocks(300_000), _naming(tier), 0
        for number in range(3 * self.capacity_bytes // 300_000):
            size = len(blocks.record(number))
            named = naming.candidates(size)
            assert len({*named}) == len(named)
            found = blocks.reserve(tier, number)
            assert {*found.dropped} <= {*named}
            dropped += len(found.dropped)
            if found.places == [NOWHERE]:
                break
            assert tier.write([TierPut(found.places[0], blocks.record(number))]) == [Outcome.OK]
        assert dropped

    def test_candidates_stay_and_can_be_read(self, tier: LocalTier) -> None:
        blocks, naming, held = self.blocks(300_000), _naming(tier), dict[bytes, int]()
        for number in range(2 * self.capacity_bytes // 300_000):
            found = blocks.reserve(tier, number)
            assert tier.write([TierPut(found.places[0], blocks.record(number))]) == [Outcome.OK]
            held[blocks.key(number)] = number
        before = tier.usage().records
        named = naming.candidates(self.capacity_bytes)
        assert named == naming.candidates(self.capacity_bytes)
        assert named
        assert tier.usage().records == before
        for key, place, namespace in named:
            assert namespace == blocks.namespace
            assert blocks.load(tier, [held[key]], [place]) == [Outcome.OK]

    def test_a_freed_record_is_no_candidate(self, tier: LocalTier) -> None:
        blocks, naming = self.blocks(300_000), _naming(tier)
        for number in range(2 * self.capacity_bytes // 300_000):
            found = blocks.reserve(tier, number)
            assert tier.write([TierPut(found.places[0], blocks.record(number))]) == [Outcome.OK]
        everything = naming.candidates(2 * self.capacity_bytes)
        assert 0 < len(everything) <= tier.usage().records
        tier.free([everything[0].place])
        assert everything[0] not in naming.candidates(2 * self.capacity_bytes)

    def test_the_same_key_in_two_namespaces_is_two_records(self, tier: LocalTier) -> None:
        mine, theirs = self.blocks(65_000), self.blocks(65_000, seed=1)
        here, there = mine.save(tier, range(4)), theirs.save(tier, range(4))
        assert set(here).isdisjoint(there)
        tier.free(here[:1])
        assert mine.load(tier, range(1, 4), here[1:]) == [Outcome.OK] * 3
        assert theirs.load(tier, range(4), there) == [Outcome.OK] * 4

    def test_usage_adds_up(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        size = len(blocks.record(0))
        assert (tier.usage().used_bytes, tier.usage().records) == (0, 0)
        assert 0 < tier.usage().capacity_bytes <= self.capacity_bytes
        places = blocks.save(tier, range(5))
        assert tier.usage().records == 5  # noqa: PLR2004 - as saved
        assert 5 * size <= tier.usage().used_bytes <= 10 * size
        tier.free(places)
        assert (tier.usage().used_bytes, tier.usage().records) == (0, 0)

    def test_what_it_reports_is_shown(self, tier: LocalTier) -> None:
        for fill in (0, 3):
            self.blocks(4_000).save(tier, range(fill))
            told = tier_status(tier)
            assert not told.trouble, told.trouble
            assert msgspec.json.decode(msgspec.json.encode(told))["tier"] == tier.name
            assert msgspec.msgpack.encode(told)

    # Threads.

    def test_readers_and_writers_do_not_disturb_one_another(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        kept = blocks.save(tier, range(16))

        def churn(seed: int) -> None:
            chosen = random.Random(seed)  # noqa: S311 - a test replays
            for turn in range(12):
                numbers = [1_000 * seed + 4 * turn + n for n in range(4)]
                places = blocks.save(tier, numbers)
                assert blocks.load(tier, numbers, places) == [Outcome.OK] * 4
                tier.free(places)
                number = chosen.randrange(16)
                assert blocks.load(tier, [number], [kept[number]]) == [Outcome.OK]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(1, 5)))  # raises what a thread raised

    def test_a_reader_during_reuse_never_sees_wrong_bytes(self, tier: LocalTier) -> None:
        blocks = self.blocks(65_000)
        places = blocks.save(tier, range(8))
        begun, stop = threading.Event(), threading.Event()

        def read() -> None:
            while not stop.is_set():
                blocks.load(tier, range(8), places)
                begun.set()

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                assert begun.wait(60)
                tier.free(places)
                for turn in range(20):
                    numbers = range(100 + 8 * turn, 108 + 8 * turn)
                    tier.free(blocks.save(tier, numbers))
            finally:
                stop.set()
            reader.result()  # raises what it raised

    # The end, and after.

    def test_after_close_everything_is_gone(self, tier: LocalTier) -> None:
        blocks = self.blocks(4_000)
        record = blocks.record(1)
        places = tier.reserve([len(record)] * 2).places
        assert tier.write([TierPut(places[0], record)]) == [Outcome.OK]
        tier.close()
        tier.close()
        assert tier.write([TierPut(places[1], record)]) == [Outcome.GONE]
        assert tier.read([TierGet(places[0], blocks.key(1), record, blocks.namespace)]) == [
            Outcome.GONE
        ]

    def test_what_survives_is_what_was_written(self, tmp_path: Path) -> None:
        blocks = self.blocks(65_000)
        first = self.make_tier(tmp_path, self.capacity_bytes)
        assert list(first.survivors()) == []
        places = blocks.save(first, range(20))
        first.free(places[:2])
        first.close()
        with closing(self.make_tier(tmp_path, self.capacity_bytes)) as second:
            found = list(second.survivors())
            expected = [blocks.key(n) for n in range(2, 20)] if self.durable else []
            assert [survivor.header.key for survivor in found] == expected
            if self.durable:
                again = [survivor.place for survivor in found]
                assert blocks.load(second, range(2, 20), again) == [Outcome.OK] * 18
                assert second.usage().records == 18  # noqa: PLR2004 - as saved

    def test_records_of_one_key_in_two_namespaces_survive_both(self, tmp_path: Path) -> None:
        mine, theirs = self.blocks(65_000), self.blocks(65_000, seed=1)
        first = self.make_tier(tmp_path, self.capacity_bytes)
        for number in range(4):
            mine.save(first, [number])
            theirs.save(first, [number])
        first.close()
        with closing(self.make_tier(tmp_path, self.capacity_bytes)) as second:
            found = list(second.survivors())
            names = [(namespace_of_header(each.header), each.header.key) for each in found]
            both = [(one.namespace, one.key(n)) for n in range(4) for one in (mine, theirs)]
            assert names == (both if self.durable else [])
            for blocks in (mine, theirs) if self.durable else ():
                places = [e.place for e in found if e.header.domain == blocks.namespace.domain]
                assert blocks.load(second, range(4), places) == [Outcome.OK] * 4

    def test_it_serves_while_survivors_come_in(self, tmp_path: Path) -> None:
        blocks = self.blocks(65_000)
        first = self.make_tier(tmp_path, self.capacity_bytes)
        blocks.save(first, range(20))
        first.close()
        with closing(self.make_tier(tmp_path, self.capacity_bytes)) as second:
            fresh = blocks.save(second, range(100, 104))
            assert blocks.load(second, range(100, 104), fresh) == [Outcome.OK] * 4
            for survivor in second.survivors():
                number = next(n for n in range(20) if blocks.key(n) == survivor.header.key)
                assert blocks.load(second, [number], [survivor.place]) == [Outcome.OK]
                places = blocks.save(second, [200 + number])
                assert blocks.load(second, [200 + number], places) == [Outcome.OK]

    def test_a_survivor_keeps_its_place_until_the_next_is_taken(self, tmp_path: Path) -> None:
        blocks = self.blocks(65_000)
        first = self.make_tier(tmp_path, self.capacity_bytes)
        blocks.save(first, range(20))
        first.close()
        with closing(self.make_tier(tmp_path, self.capacity_bytes)) as second:
            survivors = iter(second.survivors())
            taken = next(survivors, None)
            assert (taken is not None) == self.durable
            records = self.capacity_bytes // blocks.namespace.slot_bytes
            for number in range(100, 100 + 2 * records):
                [place] = blocks.reserve(second).places
                assert taken is None or place != taken.place
                if place != NOWHERE:
                    second.write([TierPut(place, blocks.record(number))])


def _naming(tier: LocalTier) -> NamesCandidates:
    """Return the tier if it names candidates, else skip the test."""
    if not isinstance(tier, NamesCandidates):
        pytest.skip("this tier names no candidates, which is permitted")
    return tier


class Blocks:
    """Test blocks of one size, by number, with methods that write, read and check them.

    With a `codec`, their records are encoded, and most are shorter than a slot.
    """

    def __init__(self, raw_bytes: int, seed: int = 0, codec: Codec | None = None) -> None:
        self.namespace = namespace_of(raw_bytes, seed)
        self._codec = codec

    def key(self, number: int) -> bytes:
        return key_of(number, self.namespace.raw_bytes)

    def record(self, number: int) -> memoryview:
        """Return the packed record of block `number`, in memory of its own."""
        if self._codec is None:
            return record_of(self.namespace, self.key(number))
        return encoded_record(header_of(self.namespace, self.key(number)), self._codec)

    def is_right(self, record: memoryview, number: int) -> bool:
        """Return whether a record that was read is that of a block; see `payloads.is_right`."""
        check = is_right if self._codec is None else is_right_encoded
        return check(record, self.namespace, self.key(number))

    def reserve(self, tier: LocalTier, number: int = 0) -> ReservedPlaces:
        return tier.reserve([len(self.record(number))])

    def save(self, tier: LocalTier, numbers: Sequence[int]) -> list[Place]:
        """Reserve and write blocks, which must fit; return their places."""
        records = [self.record(number) for number in numbers]
        places = tier.reserve([*map(len, records)]).places
        puts = [TierPut(place, record) for place, record in zip(places, records, strict=True)]
        assert tier.write(puts) == [Outcome.OK] * len(puts)
        return places

    def gets(self, numbers: Sequence[int], places: Sequence[Place]) -> list[TierGet]:
        """Return read requests for blocks, each with memory of its own."""
        size = self.namespace.slot_bytes
        return [
            TierGet(place, self.key(n), aligned_buffer(size), self.namespace)
            for n, place in zip(numbers, places, strict=True)
        ]

    def load(
        self, tier: LocalTier, numbers: Sequence[int], places: Sequence[Place]
    ) -> list[Outcome]:
        """Read blocks; return the outcomes, with CORRUPT for OK blocks that do not verify.

        Raises AssertionError for a block that verifies with wrong bytes.
        """
        gets = self.gets(numbers, places)
        outcomes = []
        for number, get, outcome in zip(numbers, gets, tier.read(gets), strict=True):
            right = outcome is Outcome.OK and self.is_right(get.into, number)
            outcomes.append(Outcome.CORRUPT if outcome is Outcome.OK and not right else outcome)
        return outcomes

    def expect_nothing(
        self, tier: LocalTier, numbers: Sequence[int], places: Sequence[Place]
    ) -> None:
        """Assert that each read is a MISS or returns bytes that do not verify for the key."""
        outcomes = self.load(tier, numbers, places)
        assert set(outcomes) <= {Outcome.MISS, Outcome.CORRUPT}
