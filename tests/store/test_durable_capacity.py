"""Durable contexts on a bucket with a capacity: what was acknowledged outlasts everything else."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Retention
from holdfast.clock import SystemClock
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.tiers.segments.index_log import MERGE_COUNT
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.upkeep import DEAD_S
from holdfast.tiers.segments.writer import SegmentWriter

DAY_S = 86_400.0
TOKENS = BLOCKS * LAYOUT.block_tokens
WALL_S = 1.8e9
EXAMPLES = 6


def context_bytes():
    """Bytes of the segment of one context."""
    objects = MemoryObjects()
    with BoundedStore(objects, 0) as one:
        one.save(1)
        return sum(len(objects.objects[name]) for name in segments(objects))


def segments(objects):
    return {name for name in objects.objects if not name.startswith("index/")}


class LockedObjects(MemoryObjects):
    """Objects of which some cannot be deleted, and of which a number of puts fail."""

    def __init__(self):
        super().__init__()
        self.locked, self.failing_puts = set(), 0
        self.fault = self._fault

    def _fault(self, verb, names):
        if verb == "delete" and self.locked.intersection(names.split(",")):
            return Outcome.GONE
        if verb == "put" and self.failing_puts:
            self.failing_puts -= 1
            return Outcome.GONE
        return Outcome.OK


class AdvancedClock(SystemClock):
    """The machine's clock, ahead by as much as a test advances it."""

    def __init__(self):
        self._ahead_s = 0.0

    def now(self):
        return super().now() + self._ahead_s

    def advance(self, seconds):
        self._ahead_s += seconds


class BoundedStore:
    """A store above a bucket with room for a number of contexts; 0: without a limit."""

    def __init__(self, objects, capacity_bytes, keep="30d", durable_s=30 * DAY_S):
        self.wall_s, self.clock = WALL_S, AdvancedClock()
        writer = SegmentWriter(keep, self.clock, wall_s=lambda: self.wall_s)
        limits = SegmentTierLimits(
            read_s=0.2, write_s=60.0, ask_s=60.0, poll_s=0.05, capacity_bytes=capacity_bytes
        )
        self.tier = SegmentTier(MemoryMedium(objects), writer, limits, "object")
        options = StoreOptions(wall_s=lambda: self.wall_s, durable_s=durable_s)
        self.store = Store(16 * MIB, [self.tier], {"default": b"k" * 32}, options)
        self.store.start()
        self.session = self.store.session(FINGERPRINT)
        self.view = StoreView(self.store)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()

    def save(self, seed, retention=Retention.SESSION):
        self.session.save(tokens_for(seed), blocks_for(seed), retention)
        self.view.wait_until_written()

    def save_durable(self, seed, deadline_s=60.0):
        """Save and sync; return whether all of it is acknowledged."""
        self.save(seed, Retention.DURABLE)
        return self.session.sync(tokens_for(seed), deadline_s=deadline_s) == TOKENS

    def is_on_bucket(self, seed):
        keys = self.session.chain(tokens_for(seed)).keys
        return self.tier.held(self.session.namespace, keys, 0) == BLOCKS

    def loads(self, seed):
        """Load a context from the bucket; return whether every byte of it is right."""
        leave_all(self.store)
        found = np.zeros_like(blocks_for(seed))
        self.session.cover(tokens_for(seed))
        landed = self.session.fetch(tokens_for(seed), into=found, deadline_s=60.0)
        return landed.tokens == TOKENS and bool((found == blocks_for(seed)).all())

    def displace(self, seeds, contexts):
        """Save so many contexts that the bucket has deleted as many to make room."""
        before = self.tier.describe()["medium"]["segments_deleted"]

        def has_displaced():
            self.save(next(seeds))
            leave_all(self.store)
            return self.tier.describe()["medium"]["segments_deleted"] >= before + contexts

        self.view.wait_until(has_displaced, "others left the bucket")


def test_an_acknowledged_context_stays_on_a_full_bucket():
    objects = MemoryObjects()
    with BoundedStore(objects, 8 * context_bytes()) as one:
        assert one.save_durable(1)
        one.displace(itertools.count(100), 12)
        assert one.is_on_bucket(1)
        assert one.loads(1)


def test_durable_contexts_that_fill_a_bucket_stay_and_the_next_one_is_not_acknowledged():
    objects = MemoryObjects()
    with BoundedStore(objects, 4 * context_bytes()) as one:
        acknowledged = [seed for seed in range(4) if one.save_durable(seed)]
        assert len(acknowledged) >= 3
        assert not one.save_durable(10, deadline_s=0.5)
        rounds = objects.count("list") + 5
        one.view.wait_until(lambda: objects.count("list") > rounds, "there were more rounds")
        assert all(one.loads(seed) for seed in acknowledged)


def test_a_context_is_no_longer_kept_after_its_time():
    objects = MemoryObjects()
    with BoundedStore(objects, 6 * context_bytes(), durable_s=DAY_S) as one:
        assert one.save_durable(1)
        one.displace(itertools.count(100), 6)
        assert one.is_on_bucket(1)
        one.wall_s += 2 * DAY_S
        seeds = itertools.count(200)

        def has_left():
            one.save(next(seeds))
            leave_all(one.store)
            return not one.is_on_bucket(1)

        one.view.wait_until(has_left, "the context left the bucket")


def test_a_context_of_another_node_is_acknowledged_by_this_one_and_stays():
    objects, size = MemoryObjects(), context_bytes()
    with BoundedStore(objects, 8 * size) as other, BoundedStore(objects, 8 * size) as one:
        other.save(1)
        one.view.wait_until(lambda: one.is_on_bucket(1), "the context is listed")
        assert one.save_durable(1)
        other.displace(itertools.count(100), 12)
        assert other.loads(1)
        assert one.loads(1)


def test_a_context_stays_after_a_restart_of_the_node_that_has_saved_it():
    objects, size = MemoryObjects(), context_bytes()
    with BoundedStore(objects, 8 * size) as one:
        assert one.save_durable(1)
        kept = segments(objects)
        first = set(objects.objects) - kept
        one.displace(itertools.count(100), 2 * MERGE_COUNT)
        one.view.wait_until(lambda: not first & set(objects.objects), "they are merged")
    with BoundedStore(objects, 8 * size) as again:
        again.view.wait_until(lambda: again.is_on_bucket(1), "the context is listed")
        again.clock.advance(2 * DEAD_S)
        again.displace(itertools.count(300), 12)
        assert kept < segments(objects)
        assert again.is_on_bucket(1)
        assert again.save_durable(1)
        assert again.loads(1)


def test_durable_blocks_that_a_bucket_has_lost_are_counted():
    objects = MemoryObjects()
    with BoundedStore(objects, 0) as one:
        assert one.save_durable(1)
        for name in segments(objects):
            del objects.objects[name]
        leave_all(one.store)
        found = np.zeros_like(blocks_for(1))
        assert one.session.fetch(tokens_for(1), found, deadline_s=60.0).outcome is not Outcome.OK
        durable = one.store.status().durable
        assert durable.evicted == BLOCKS


class Fleet:
    """Two nodes of one bucket, and when each context was acknowledged."""

    KEEP_S = 20 * DAY_S

    def __init__(self):
        self.objects, self.wall_s = LockedObjects(), WALL_S
        self.capacity_bytes = 10 * context_bytes()
        self.nodes = [self._open(), self._open()]
        self.acknowledged_s = {}
        self._seeds = itertools.count(1_000)

    def _open(self):
        node = BoundedStore(self.objects, self.capacity_bytes, durable_s=self.KEEP_S)
        node.wall_s = self.wall_s
        return node

    def plain(self, at, contexts):
        for _ in range(contexts):
            self.nodes[at].save(next(self._seeds))
        leave_all(self.nodes[at].store)

    def durable(self, at, seed):
        if self.nodes[at].save_durable(seed, deadline_s=2.0):
            self.acknowledged_s[seed] = self.wall_s
        leave_all(self.nodes[at].store)

    def restart(self, at, _):
        """Restart a node, and let its former writer count as dead."""
        self.nodes[at].store.close()
        self.nodes[at] = self._open()
        self._await_listings()
        for node in self.nodes:
            node.clock.advance(2 * DEAD_S)

    def fail_puts(self, _, number):
        self.objects.failing_puts = number

    def lock(self, _, number):
        self.objects.locked = {*sorted(segments(self.objects))[:number]}

    def days(self, _, number):
        self.wall_s += number * DAY_S
        for node in self.nodes:
            node.wall_s = self.wall_s
        self._await_listings()

    def _await_listings(self):
        until = self.objects.count("list") + 8
        self.nodes[0].view.wait_until(
            lambda: self.objects.count("list") > until, "both nodes have listed"
        )

    def missing(self):
        """Return the contexts within their time that a new node does not load."""
        self._await_listings()
        with BoundedStore(self.objects, 0) as reader:
            return [
                seed
                for seed, at_s in self.acknowledged_s.items()
                if self.wall_s < at_s + self.KEEP_S and not reader.loads(seed)
            ]

    def close(self):
        for node in self.nodes:
            node.store.close()


STEPS = st.tuples(
    st.sampled_from(
        ["plain", "plain", "durable", "durable", "restart", "fail_puts", "lock", "days"]
    ),
    st.integers(0, 1),
    st.integers(1, 4),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEPS, min_size=6, max_size=20))
def test_what_was_acknowledged_is_loaded_within_its_time_whatever_happens(steps):
    fleet = Fleet()
    try:
        for what, at, number in steps:
            getattr(fleet, what)(at, number)
        assert fleet.missing() == []
    finally:
        fleet.close()
