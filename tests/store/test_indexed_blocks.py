"""A store whose shared tier has an index in memory answers other nodes about any of its blocks."""

from contextlib import contextmanager

import pytest

from holdfast import Retention
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import FINGERPRINT, blocks_for, tokens_for
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.testing.store_view import StoreView
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

MIB = 1 << 20
COUNT = 8
LIMITS = SegmentTierLimits(read_s=60.0, write_s=60.0, ask_s=60.0, poll_s=3_600.0)


@contextmanager
def target(objects):
    """A target above a segment tier, which has listed what is there."""
    tier = SegmentTier(MemoryMedium(objects), SegmentWriter("7d"), LIMITS, "bucket")
    options = StoreOptions(serves_peers=True)
    with Store(16 * MIB, [tier], {"default": b"k" * 32}, options) as store:
        store.start()
        session = store.session(FINGERPRINT)
        tier.held(session.namespace, [b"k" * 16], 0)  # waits for the first listing
        yield store, session


@pytest.fixture
def objects():
    """The objects of a bucket with one context."""
    shared = MemoryObjects()
    with target(shared) as (store, session):
        session.save(tokens_for(1, COUNT), blocks_for(1, COUNT), Retention.SESSION)
        StoreView(store).wait_until_written()
    return shared


def chain(session):
    return list(session.chain(tokens_for(1, COUNT)).keys)


def test_a_target_that_restarted_holds_every_other_block_of_a_chain_without_a_request(objects):
    with target(objects) as (store, session):
        keys, asked = chain(session)[1::2], len(objects.calls)
        assert store.held(session.namespace, [*keys, b"x" * 16]) == bytes([1] * len(keys) + [0])
        assert len(objects.calls) == asked


def test_a_target_that_restarted_sends_blocks_that_it_was_not_asked_about_before(objects):
    with target(objects) as (store, session):
        keys = chain(session)[1::2]
        store.note_indexed(session.namespace, keys)
        fetched = store.fetch_unverified(session.namespace, keys, 60.0)
        assert len(fetched.places) == len(keys)
        store.release(fetched.lease)
        assert StoreView(store).held(session.namespace, keys) == len(keys)


def test_a_block_that_another_node_deletes_leaves_the_shared_tier_too(objects):
    with target(objects) as (store, session):
        keys = chain(session)
        assert store.forget(session.namespace, keys[2:4]) == 2
        assert store.held(session.namespace, keys) == bytes([1, 1, 0, 0, 1, 1, 1, 1])
    with target(objects) as (store, session):
        assert store.held(session.namespace, keys) == bytes([1, 1, 0, 0, 1, 1, 1, 1])
