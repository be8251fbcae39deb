"""A `sync` after a flush that failed: the medium may have lost what can still be read."""

import random
from contextlib import closing

import numpy as np
import pytest

from holdfast import Retention
from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.keys.keyring import KeyRing
from holdfast.limits import MIB
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.extents import BufferedExtents, tier_on
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.tiers.disk.write_stop import PAUSE_MAX_S

TOKENS = BLOCKS * LAYOUT.block_tokens


@pytest.fixture
def medium():
    return BufferedExtents.formatted(MIB, 16)


@pytest.fixture
def store(medium):
    with opened(medium) as one:
        yield one


def opened(medium, ring=None, clock=None):
    options = StoreOptions() if ring is None else StoreOptions(ring=ring)
    one = Store(16 * MIB, [tier_on(medium, clock)], {"default": b"k" * 32}, options)
    one.start()
    one.recovery.wait(60)
    return one


def save(store, seed=1):
    session = store.session(FINGERPRINT)
    session.save(tokens_for(seed), blocks_for(seed), Retention.DURABLE)
    StoreView(store).wait_until_written()
    return session


def serves(store, seed=1):
    """Return whether a store has a context, with every byte right."""
    found = np.zeros_like(blocks_for(seed))
    landed = store.session(FINGERPRINT).fetch(tokens_for(seed), into=found)
    return landed.tokens == TOKENS and (found == blocks_for(seed)).all()


def survives_a_power_cut(medium, seed=1):
    with opened(medium.after_power_cut()) as after:
        return serves(after, seed)


def test_what_is_acknowledged_after_a_failed_flush_survives_a_loss_of_power(store, medium):
    session = save(store)
    medium.failing_flushes = 1
    assert session.sync(tokens_for(1)) == TOKENS
    assert survives_a_power_cut(medium)


def test_a_sync_after_one_that_failed_acknowledges_only_what_survives(store, medium):
    session = save(store)
    medium.failing_flushes = 1 << 30
    assert session.sync(tokens_for(1), deadline_s=0.1) == 0
    assert not survives_a_power_cut(medium)
    medium.failing_flushes = 0
    assert session.sync(tokens_for(1)) == TOKENS
    assert survives_a_power_cut(medium)


def test_a_context_that_left_memory_is_saved_from_what_can_still_be_read(store, medium):
    session = save(store)
    medium.failing_flushes = 1
    assert session.sync(tokens_for(1), deadline_s=0.0) == 0
    leave_all(store)
    assert session.sync(tokens_for(1)) == TOKENS
    assert survives_a_power_cut(medium)


def test_a_durable_context_waits_until_it_was_flushed_without_another_sync(store, medium):
    session = save(store)
    medium.failing_flushes = 1
    assert session.sync(tokens_for(1), deadline_s=0.0) == 0
    StoreView(store).wait_until(
        lambda: store.status().durable.waiting == 0, "it was written again by housekeeping"
    )
    assert survives_a_power_cut(medium)


def test_blocks_whose_flush_failed_are_counted_once_as_waiting(store, medium):
    session = save(store)
    medium.failing_flushes = 1 << 30
    for _ in range(3):
        session.sync(tokens_for(1), deadline_s=0.0)
        StoreView(store).wait_until(
            lambda: store.status().durable.waiting == BLOCKS, "the flush has failed"
        )
    assert (store.status().durable.lost, store.status().durable.evicted) == (0, 0)


def test_another_context_is_acknowledged_after_a_failed_flush(store, medium):
    medium.failing_flushes = 1
    assert save(store, 1).sync(tokens_for(1), deadline_s=0.0) == 0
    assert save(store, 2).sync(tokens_for(2)) == TOKENS
    assert survives_a_power_cut(medium, 2)


def test_what_the_medium_lost_is_not_acknowledged_by_the_next_process(store, medium):
    """Its footer may be on the medium without the records that it lists."""
    session = save(store)
    assert session.sync(tokens_for(1)) == TOKENS
    store.close()
    medium.flush()
    cut = medium.after_power_cut()
    record = cut.image.find(blocks_for(1)[1].tobytes()[:64])
    assert record > 0
    cut.image[record : record + 4096] = bytes(4096)
    with opened(cut) as after:
        session = after.session(FINGERPRINT)
        assert session.sync(tokens_for(1), deadline_s=60.0) == LAYOUT.block_tokens
        assert after.session(FINGERPRINT).cover(tokens_for(1)) == LAYOUT.block_tokens


def test_a_sync_without_time_verifies_nothing_of_an_earlier_process_and_writes_none_again(medium):
    with opened(medium) as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
    with opened(medium) as store:
        session = store.session(FINGERPRINT)
        assert session.sync(tokens_for(1), deadline_s=0.0) == 0
        assert session.sync(tokens_for(1)) == TOKENS
        assert not any(move.reason == "renewal" for move in store.status().moves)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_records_of_an_earlier_process_are_read_in_time_and_sealed_ones_not_whole(
    medium, is_sealed
):
    ring, read = KeyRing(None) if is_sealed else None, []
    if ring is not None:
        ring.enrol("default", b"k" * 32)
    with opened(medium, ring) as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
    with closing(tier_on(medium)) as tier:
        places = [survivor.place for survivor in tier.survivors()]
        assert len(places) == BLOCKS
        medium.fails = lambda what, _, nbytes: what == "read" and read.append(nbytes)
        assert (tier.verify_recovered(places, 0.0), read) == (0, [])
        assert tier.verify_recovered(places, 60.0) == BLOCKS
        assert (sum(read) > BLOCKS * LAYOUT.raw_bytes) != is_sealed
        assert tier.flush(places) == [not is_sealed] * BLOCKS
        read.clear()
        assert tier.verify_recovered(places, 0.0) == (0 if is_sealed else BLOCKS)


def test_sealed_blocks_of_an_earlier_process_are_written_again_and_acknowledged(medium):
    ring = KeyRing(None)
    ring.enrol("default", b"k" * 32)
    with opened(medium, ring) as store:
        assert save(store).sync(tokens_for(1)) == TOKENS
    with opened(medium, ring) as store:
        assert store.session(FINGERPRINT).sync(tokens_for(1)) == TOKENS
        assert any(move.reason == "renewal" for move in store.status().moves)
        leave_all(store)
        found = np.zeros_like(blocks_for(1))
        landed = store.session(FINGERPRINT).fetch(tokens_for(1), into=found)
        assert landed.outcome is Outcome.OK
        assert (found == blocks_for(1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_acknowledged_survives_a_loss_of_power_whichever_flushes_fail(seed):
    rng, clock, acknowledged = random.Random(seed), ManualClock(), set()
    medium = BufferedExtents.formatted(MIB, 16)
    for life in range(3):
        with opened(medium, clock=clock) as store:
            lost = [number for number in acknowledged if not serves(store, number)]
            assert not lost
            for step in range(6):
                clock.advance(PAUSE_MAX_S + 1)  # writes that were stopped are tried again
                save(store, 100 * life + step)
                medium.failing_flushes = rng.choice((0, 0, 1, 2))
                if rng.random() < 0.3:
                    leave_all(store)
                chosen = 100 * life + rng.randrange(step + 1)
                session, deadline_s = store.session(FINGERPRINT), rng.choice((0.0, 0.3))
                if session.sync(tokens_for(chosen), deadline_s) == TOKENS:
                    acknowledged.add(chosen)
        medium = medium.after_power_cut()
    assert acknowledged
