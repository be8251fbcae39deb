"""Blocks that are independent of each other are found one by one, on shared tiers too."""

import hashlib

import numpy as np
import pytest

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout
from holdfast.errors import Outcome
from holdfast.named_blocks import PrefixPosition, memory_of
from holdfast.testing.memory import SharedMemoryTier
from holdfast.tiers.base import segment_place

MIB = 1 << 20
NBYTES = 8_192
LAYOUT = OpaqueLayout(
    dtype="float16",
    block_tokens=16,
    layers=1,
    nbytes=NBYTES,
    arrangement="rows",
    engine="engine",
    engine_version="1",
)
NAMED = Fingerprint(
    Meaning(
        model="m",
        positions="none",
        adapter="none",
        kv_quantisation="none",
        kv_scales="none",
        naming="engine sha256",
        block_tokens=16,
        kv_group=KvGroup.all_layers(1),
    ),
    LAYOUT,
)


def names(*numbers):
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


def rows(count, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (count, NBYTES), np.uint8)


@pytest.fixture
def two_stores(harness):
    """Return the records of a shared tier, a store that has saved six blocks there, and another."""
    records = {}
    one, other = (harness(MIB, SharedMemoryTier(records, "pool")) for _ in range(2))
    session = one.store.named_session(NAMED)
    at = PrefixPosition(names("before")[0], 40)
    assert session.put(names(*range(6)), [memory_of(row) for row in rows(6)], at) == 6 * [
        Outcome.OK
    ]
    one.flush()
    return records, one, other


def test_another_store_finds_and_reads_single_blocks_of_a_shared_tier(two_stores):
    _, _, other = two_stores
    session, wanted = other.store.named_session(NAMED), names(4, "missing", 1)
    expected = [Outcome.OK, Outcome.MISS, Outcome.OK]
    assert session.exists(wanted) == expected
    found = np.zeros((3, NBYTES), np.uint8)
    assert session.get(wanted, [memory_of(row) for row in found]) == expected
    assert (found[[0, 2]] == rows(6)[[4, 1]]).all()


def test_each_block_is_placed_by_its_own_key(two_stores):
    records, _, _ = two_stores
    assert len(records) == 6
    for (_, key), (place, _) in records.items():
        assert place == segment_place(key[:8])


def test_a_shared_tier_that_lost_a_block_makes_only_that_one_a_miss(two_stores):
    records, _, other = two_stores
    session = other.store.named_session(NAMED)
    assert session.exists(names(*range(6))) == 6 * [Outcome.OK]
    records.pop(next(iter(records)))
    found = np.zeros((6, NBYTES), np.uint8)
    outcomes = session.get(names(*range(6)), [memory_of(row) for row in found])
    good = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
    assert len(good) == 5
    assert (found[good] == rows(6)[good]).all()


def test_a_shared_tier_that_does_not_answer_is_not_a_miss(harness):
    class Away(SharedMemoryTier):
        def misplaced(self, namespace, keys):
            return set()

        def lost(self):
            return None

        def reachable(self):
            return False

    one = harness(MIB, Away({}, "pool"))
    session = one.store.named_session(NAMED)
    assert session.exists(names(1)) == [Outcome.GONE]
    session.put(names(1), [memory_of(row) for row in rows(1)])
    assert session.exists(names(1)) == [Outcome.OK]


def test_blocks_of_one_prefix_are_evicted_from_its_end(harness):
    one = harness(MIB)
    session = one.store.named_session(NAMED)
    session.put(names(*range(8)), [memory_of(row) for row in rows(8)])
    for other in range(100, 260, 8):
        session.put(names(*range(other, other + 8)), [memory_of(row) for row in rows(8, other)])
        held = [outcome is Outcome.OK for outcome in session.exists(names(*range(8)))]
        assert held == sorted(held, reverse=True), "no block is evicted before those behind it"
