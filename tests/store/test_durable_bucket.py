"""Durable contexts on a bucket: what its age class and other nodes delete is not acknowledged."""

import numpy as np

from holdfast import Retention
from holdfast.errors import Outcome
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.testing.store_view import StoreView
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

DAY_S = 86_400.0
MIB = 1 << 20
TOKENS = BLOCKS * LAYOUT.block_tokens


class SegmentStore:
    """A store with a segment tier on objects that stores share, and a clock of its own."""

    def __init__(self, objects, wall_s=1e9, poll_s=0.05, read_s=60.0):
        self.wall_s = wall_s
        writer = SegmentWriter("30d", wall_s=lambda: self.wall_s)
        limits = SegmentTierLimits(read_s=read_s, write_s=60.0, ask_s=60.0, poll_s=poll_s)
        self.tier = SegmentTier(MemoryMedium(objects), writer, limits, "object")
        self.store = Store(16 * MIB, [self.tier], {"default": b"k" * 32}, StoreOptions())
        self.store.start()
        self.session = self.store.session(FINGERPRINT)

    def save_durable(self, seed=1):
        self.session.save(tokens_for(seed), blocks_for(seed), Retention.DURABLE)
        StoreView(self.store).wait_until_written()

    def held(self):
        return self.tier.held(self.session.namespace, self.session.chain(tokens_for(1)).keys, 0)


def serves(store):
    """Return whether a store finds the whole context, with every byte right; close the store."""
    with store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(1))
        StoreView(store).wait_until(
            lambda: session.cover(tokens_for(1)) == TOKENS, "the context is found"
        )
        landed = session.fetch(tokens_for(1), into=found, deadline_s=60.0)
        return landed.tokens == TOKENS and (found == blocks_for(1)).all()


def segments(objects):
    return {name for name in objects.objects if not name.startswith("index/")}


def test_a_context_that_is_synced_again_stays_on_a_bucket_for_its_time_from_then_on():
    objects = MemoryObjects()
    one = SegmentStore(objects, read_s=0.2)  # so that it deletes soon what it has retired
    with one.store:
        one.save_durable()
        assert one.session.sync(tokens_for(1)) == TOKENS
        first = segments(objects)
        one.wall_s += 29.9 * DAY_S
        one.save_durable()
        assert one.session.sync(tokens_for(1)) == TOKENS
        one.wall_s += 22 * DAY_S
        StoreView(one.store).wait_until(
            lambda: not first & set(objects.objects), "the first segment is deleted"
        )
        assert serves(SegmentStore(objects, one.wall_s).store)


def test_a_context_that_is_synced_again_soon_is_not_written_to_a_bucket_again():
    objects = MemoryObjects()
    one = SegmentStore(objects)
    with one.store:
        one.save_durable()
        assert one.session.sync(tokens_for(1)) == TOKENS
        first = segments(objects)
        one.wall_s += 7 * DAY_S
        one.save_durable()
        assert one.session.sync(tokens_for(1)) == TOKENS
        assert first == segments(objects)


def test_what_another_node_has_deleted_from_a_bucket_is_written_again_before_it_is_acknowledged():
    objects = MemoryObjects()
    other = SegmentStore(objects)
    with other.store:
        other.save_durable()
        one = SegmentStore(objects, poll_s=3_600.0)
        with one.store:
            assert one.held() == BLOCKS
            one.save_durable()
            other.wall_s += 31 * DAY_S
            StoreView(other.store).wait_until(lambda: not other.held(), "its segment has ended")
            assert one.session.sync(tokens_for(1)) == TOKENS
            assert serves(SegmentStore(objects).store)


def test_blocks_of_another_node_are_not_acknowledged_while_a_bucket_does_not_answer():
    objects = MemoryObjects()
    other = SegmentStore(objects)
    with other.store:
        other.save_durable()
        one = SegmentStore(objects, poll_s=3_600.0)
        with one.store:
            one.save_durable()
            objects.fault = lambda verb, _: Outcome.GONE if verb == "list" else Outcome.OK
            assert one.session.sync(tokens_for(1), deadline_s=0.2) == 0
            objects.fault = None
            assert one.session.sync(tokens_for(1)) == TOKENS
