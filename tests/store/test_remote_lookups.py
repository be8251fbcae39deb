"""A thousand who miss the same segment at once are one question, and one read."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import Outcome
from holdfast.store.remote_lookups import MISS_S, MISSES_MAX, InflightLookups
from holdfast.testing.memory import SharedMemoryTier

MIB = 1 << 20


class CountingTier(SharedMemoryTier):
    """Counts questions, and reads of each block."""

    def __init__(self, records) -> None:
        super().__init__(records)
        self.questions, self.reads, self._lock = 0, {}, threading.Lock()

    def held(self, namespace, keys, start, within_s=math.inf):
        with self._lock:
            self.questions += 1
        return super().held(namespace, keys, start, within_s)

    def read(self, batch):
        with self._lock:
            for get in batch:
                self.reads[get.key] = self.reads.get(get.key, 0) + 1
        return super().read(batch)


def test_a_thousand_concurrent_misses_of_one_segment_cause_at_most_two_reads(harness) -> None:
    far = {}
    writer = harness(4 * MIB, CountingTier(far))
    chain = writer.chain(1, 32)
    writer.save(chain)
    writer.flush()
    reader = harness(4 * MIB, CountingTier(far))

    def ask(_):
        covered = reader.store.look(reader.namespace, chain.keys, 60.0).blocks
        return covered, reader.read(chain, 60.0)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(1_000)))
    assert answers == [(32, 32)] * 1_000
    assert reader.tier.questions <= 2
    assert set(reader.tier.reads) == set(chain.keys)
    assert max(reader.tier.reads.values()) <= 2


def test_repeated_lookups_of_a_missing_context_are_limited_in_rate(harness) -> None:
    one = harness(4 * MIB, CountingTier({}))
    chain = one.chain(1, 4)
    for _ in range(1_000):
        assert one.store.look(one.namespace, chain.keys, 60.0).blocks == 0
    assert one.tier.questions == 1
    one.clock.advance(MISS_S)
    one.store.look(one.namespace, chain.keys, 60.0)
    assert one.tier.questions == 2


def test_the_number_of_remembered_misses_is_bounded() -> None:
    asking = InflightLookups()
    for number in range(MISSES_MAX + 10):
        assert asking.begin((1, str(number).encode()), 0.0) is None
        asking.end((1, str(number).encode()), 0, 0.0)
    assert asking.begin((1, b"0"), 0.0) is None, "the oldest no went first"
    assert asking.begin((1, b"100"), 0.0).done()
    assert asking.begin((2, b"100"), 0.0) is None, "another tier may have it"


def test_a_lookup_that_was_not_answered_is_remembered_as_such() -> None:
    asking = InflightLookups()
    assert asking.begin((1, b"k"), 0.0) is None
    waiting = asking.begin((1, b"k"), 0.0)
    asking.end((1, b"k"), 0, 0.0, Outcome.GONE)
    assert waiting.done()
    assert waiting.result() is Outcome.GONE
    assert asking.begin((1, b"k"), 0.0).result() is Outcome.GONE
    assert asking.begin((1, b"k"), MISS_S) is None
    asking.end((1, b"k"), 0, MISS_S)
    assert asking.begin((1, b"k"), MISS_S).result() is Outcome.OK, "now it is a no"


def test_a_second_lookup_of_the_same_key_waits_for_the_first() -> None:
    asking = InflightLookups()
    assert asking.begin((1, b"k"), 0.0) is None
    waiting = asking.begin((1, b"k"), 0.0)
    assert not waiting.done()
    asking.end((1, b"k"), 3, 0.0)
    assert waiting.done()
    assert asking.begin((1, b"k"), 0.0) is None, "a yes is in the index now"
