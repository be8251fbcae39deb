"""The CXL tier keeps the contract and evicts the least recently used records not in flight."""

import random
import threading

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.testing.tier_contract import Blocks, TierContract
from holdfast.tiers.base import NOWHERE, DroppedBlock, TierGet, TierPut, Volatile
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier

MIB = 1 << 20


class TestCxlTier(TierContract):
    def make_tier(self, folder, capacity_bytes):
        return CxlTier(CxlOptions(capacity=capacity_bytes))


@pytest.fixture
def tier():
    made = CxlTier(CxlOptions(capacity=4 * MIB))
    yield made
    made.close()


def fill(tier, blocks):
    """Write blocks until the first eviction; return the places of the blocks held, by number."""
    held = {}
    while True:
        found = blocks.reserve(tier)
        if found.dropped:
            tier.free(found.places)
            for dropped in found.dropped:
                held = {n: place for n, place in held.items() if place != dropped.place}
            return held
        number = len(held)
        assert tier.write([TierPut(found.places[0], blocks.record(number))]) == [Outcome.OK]
        held[number] = found.places[0]


def test_the_cxl_tier_is_volatile(tier):
    assert isinstance(tier, Volatile)


def test_the_least_recently_read_record_is_evicted_first(tier):
    blocks = Blocks(60_000)
    held = fill(tier, blocks)
    numbers = list(held)
    assert blocks.load(tier, numbers[:5], [held[n] for n in numbers[:5]]) == [Outcome.OK] * 5
    places = []
    gone = []
    for _ in range(10):
        found = blocks.reserve(tier)
        places += found.places
        gone += [dropped.key for dropped in found.dropped]
    assert NOWHERE not in places
    expected = [blocks.key(n) for n in numbers[5:]]
    assert gone == expected[: len(gone)]
    assert len(gone) >= 8


@pytest.mark.parametrize("is_use", [True, False])
def test_a_candidate_that_a_request_reads_stays_and_one_that_is_only_moved_leaves(tier, is_use):
    blocks = Blocks(60_000)
    fill(tier, blocks)
    ahead = 4 * blocks.namespace.slot_bytes
    [oldest, second, *_] = tier.candidates(ahead)
    into = aligned_buffer(blocks.namespace.slot_bytes)
    get = TierGet(oldest.place, oldest.key, into, blocks.namespace, is_use=is_use)
    assert tier.read([get]) == [Outcome.OK]
    [next_one, *_] = tier.candidates(ahead)
    assert next_one == (second if is_use else oldest)


def test_memory_moves_to_another_slot_size_one_run_at_a_time(tier):
    small, large = Blocks(10_000), Blocks(150_000)
    held = fill(tier, small)
    found = large.reserve(tier)
    assert found.places != [NOWHERE]
    assert 0 < len(found.dropped) < len(held)
    keys = [dropped.key for dropped in found.dropped]
    assert set(keys) <= {small.key(n) for n in held}
    gone = {dropped.place for dropped in found.dropped}
    left = {n: place for n, place in held.items() if place not in gone}
    assert small.load(tier, list(left), list(left.values())) == [Outcome.OK] * len(left)


def test_a_run_with_a_record_in_flight_is_not_evicted(tier):
    small, large = Blocks(10_000), Blocks(150_000)
    held = fill(tier, small)
    for number, place in held.items():
        if not number % 4:
            tier.free([place])
    reserved = tier.reserve([small.namespace.slot_bytes] * (len(held) // 4)).places
    assert NOWHERE not in reserved
    found = large.reserve(tier)
    assert all(dropped.place not in reserved for dropped in found.dropped)
    puts = [TierPut(p, small.record(1_000 + i)) for i, p in enumerate(reserved)]
    assert tier.write(puts) == [Outcome.OK] * len(puts)
    assert small.load(tier, range(1_000, 1_000 + len(puts)), reserved) == [Outcome.OK] * len(puts)


def test_a_record_that_can_never_fit_evicts_nothing(tier):
    blocks = Blocks(60_000)
    held = fill(tier, blocks)
    found = tier.reserve([64 * MIB])
    assert (found.places, found.dropped) == ([NOWHERE], [])
    assert tier.usage().records == len(held)


def test_bytes_that_are_not_a_record_are_corrupt(tier):
    [place] = tier.reserve([8192]).places
    assert tier.write([TierPut(place, memoryview(bytearray(8192)))]) == [Outcome.CORRUPT]
    assert tier.usage().used_bytes == 0


def test_read_and_written_bytes_are_counted(tier):
    blocks = Blocks(60_000)
    places = blocks.save(tier, range(3))
    blocks.load(tier, range(2), places[:2])
    usage = tier.usage()
    assert usage.written_bytes == 3 * blocks.namespace.slot_bytes
    assert usage.read_bytes == 2 * blocks.namespace.slot_bytes


def test_a_read_of_a_record_that_is_being_evicted_is_a_miss_or_its_own_bytes(tier):
    blocks = Blocks(60_000)
    held = fill(tier, blocks)
    numbers, places = list(held), list(held.values())
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            wrong.extend(
                outcome
                for outcome in blocks.load(tier, numbers, places)
                if outcome not in (Outcome.OK, Outcome.MISS)
            )

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    chosen = random.Random(1)
    for _ in range(300):
        found = blocks.reserve(tier)
        assert all(isinstance(dropped, DroppedBlock) for dropped in found.dropped)
        if NOWHERE not in found.places:
            tier.write([TierPut(found.places[0], blocks.record(10_000 + chosen.randrange(100)))])
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
