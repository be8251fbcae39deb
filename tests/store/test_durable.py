"""Durable contexts: `sync` counts what survives a crash, and the status what does not yet."""

import numpy as np
import pytest

import holdfast
from holdfast import Retention
from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError, ConfigError, Outcome
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, LAYOUT, blocks_for, tokens_for
from holdfast.testing.memory import MemoryTier
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

TOKENS = BLOCKS * LAYOUT.block_tokens
MIB = 1 << 20


class FlushableMedium(MemoryTier):
    """A tier in memory that can flush; each step fails if it is told to."""

    def __init__(self):
        super().__init__(64 * MIB, name="medium")
        self.writes, self.flushes, self.flushed = True, True, 0

    def accepts_writes(self):
        return self.writes

    def flush(self):
        self.flushed += 1
        return self.flushes


@pytest.fixture
def medium():
    return FlushableMedium()


@pytest.fixture
def store(medium):
    with Store(16 * MIB, [medium], {"default": b"k" * 32}, StoreOptions()) as one:
        one.start()
        yield one


def save(store, seed=1, retention=Retention.DURABLE):
    session = store.session(FINGERPRINT)
    session.save(tokens_for(seed), blocks_for(seed), retention)
    return session


def test_a_synced_context_is_on_the_medium_and_flushed(store, medium):
    assert save(store).sync(tokens_for(1)) == TOKENS
    assert medium.flushed == 1
    assert store.status().durable.waiting == 0


def test_a_synced_context_is_found_by_the_next_process_without_a_clean_close(tmp_path):
    config = DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB)
    first = DiskTier(config)
    store = Store(16 * MIB, [first], {"default": b"k" * 32})
    store.start()
    assert save(store).sync(tokens_for(1)) == TOKENS
    image = tmp_path.parent / "image"
    image.mkdir()
    for file in tmp_path.iterdir():
        (image / file.name).write_bytes(file.read_bytes())
    store.close()
    config = DiskConfig(path=str(image), capacity_bytes=32 * MIB)
    with Store(16 * MIB, [DiskTier(config)], {"default": b"k" * 32}) as again:
        again.start()
        again.recovery.wait(60)
        found = np.zeros_like(blocks_for(1))
        landed = again.session(FINGERPRINT).fetch(tokens_for(1), into=found)
        assert landed.tokens == TOKENS
        assert (found == blocks_for(1)).all()


def test_an_ephemeral_context_is_written_by_a_sync(store):
    session = save(store, retention=Retention.EPHEMERAL)
    assert session.sync(tokens_for(1)) == TOKENS


def test_only_leading_blocks_that_are_held_count(store):
    session = save(store)
    assert session.sync([*tokens_for(1), *tokens_for(9)]) == TOKENS
    assert session.sync(tokens_for(7)) == 0


def test_a_medium_that_takes_no_writes_acknowledges_nothing_at_the_deadline(store, medium):
    medium.writes = False
    session = save(store)
    assert session.sync(tokens_for(1), deadline_s=0.1) == 0
    status = store.status().durable
    assert (status.tier, status.waiting, status.lost) == ("medium", BLOCKS, 0)
    medium.writes = True
    assert session.sync(tokens_for(1)) == TOKENS


def test_a_flush_that_fails_acknowledges_nothing(store, medium):
    medium.flushes = False
    assert save(store).sync(tokens_for(1)) == 0


def test_a_durable_block_that_is_dropped_before_it_is_written_counts_as_lost(store, medium):
    medium.writes = False
    session = save(store)
    namespace = session.namespace
    assert isinstance(namespace, Namespace)
    store.forget(namespace, session.chain(tokens_for(1)).keys)
    status = store.status().durable
    assert (status.waiting, status.lost) == (0, BLOCKS)


def test_a_store_without_a_medium_refuses_a_sync():
    with holdfast.open(host="16 MiB") as store:
        session = store.session(FINGERPRINT)
        with pytest.raises(BlockError, match="sync: no tier of this store can flush"):
            session.sync(tokens_for(1))
        assert store.status().durable is None


def test_a_durable_tier_that_cannot_flush_is_refused_by_name(medium):
    lower = [MemoryTier(64 * MIB, name="plain"), medium]
    with pytest.raises(ConfigError, match=r"durable: 'plain' .*name one of: medium"):
        Store(16 * MIB, lower, {"default": b"k" * 32}, StoreOptions(durable="plain"))


def test_a_fetch_is_served_while_a_sync_waits(store, medium):
    medium.writes = False
    session = save(store)
    found = np.zeros_like(blocks_for(1))
    assert session.sync(tokens_for(1), deadline_s=0.05) == 0
    assert session.fetch(tokens_for(1), into=found).outcome is Outcome.OK


def test_a_context_that_was_synced_to_a_shared_medium_is_served_by_another_store():
    objects = MemoryObjects()

    def opened():
        limits = SegmentTierLimits(poll_s=0.05)
        tier = SegmentTier(MemoryMedium(objects), SegmentWriter("7d"), limits, "object")
        one = Store(16 * MIB, [tier], {"default": b"k" * 32})
        one.start()
        return one

    with opened() as first:
        assert save(first).sync(tokens_for(1)) == TOKENS
        with opened() as second:
            found = np.zeros_like(blocks_for(1))
            landed = second.session(FINGERPRINT).fetch(tokens_for(1), into=found)
            assert landed.tokens == TOKENS
            assert (found == blocks_for(1)).all()
