"""Blocks of a sealed domain on their way down: group by group, a few groups at once."""

import threading
import time

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.namespace import namespace_of
from holdfast.codec.seal import Sealer
from holdfast.keys.keyring import KeyRing
from holdfast.store import tier_writer
from holdfast.store.write_batches import ParallelSeal
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import leave, leave_all, write_through
from holdfast.tiers.base import Queryable, SharedTier
from holdfast.workers import submit_or_run

MIB = 1 << 20
AT_ONCE = 4
BLOCKS = 2 * AT_ONCE


class TogetherTier(MemoryTier):
    """A write ends once so many are under way."""

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.met = threading.Barrier(AT_ONCE)

    def write(self, batch):
        self.met.wait(60)
        return super().write(batch)


class FailsOnceTier(MemoryTier):
    """Its first write ends in an error, as no tier's should."""

    failed = False

    def write(self, batch):
        if not self.failed:
            self.failed = True
            raise RuntimeError("the first write fails")
        return super().write(batch)


class AskedTier(SharedMemoryTier):
    """A shared tier that is asked what it has; what is written to it is counted."""

    def __init__(self, records):
        super().__init__(records)
        self.writes = 0

    def known(self, batch):
        headers = [read_header(put.record)[0] for put in batch]
        return [(namespace_of(header), header.key) in self.records for header in headers]

    def write(self, batch):
        self.writes += len(batch)
        return super().write(batch)


@pytest.fixture
def sealed(harness, monkeypatch):
    """Make a store whose blocks go down sealed, each a group of its own."""
    monkeypatch.setattr(tier_writer, "LOCAL_SEAL", ParallelSeal(AT_ONCE, 1, 1, 1))

    def make(tier):
        ring = KeyRing(None, derives=isinstance(tier, SharedTier))
        ring.enrol("default", b"s" * 32)
        return harness(2 * MIB, tier, ring=ring, writes_behind=False)

    return make


def save(one, chain):
    """Save blocks, and have all of them written in one batch."""
    assert one.save(chain) == BLOCKS
    write_through(one.store, one.namespace, chain.keys)
    one.flush()


def test_a_batch_makes_two_groups_for_each_thread_within_bounds():
    parallel = ParallelSeal(4, 1, 10, 80)
    assert [parallel.group_bytes(nbytes) for nbytes in (1, 80, 400, 640, 9_999)] == [
        10, 10, 50, 80, 80,
    ]  # fmt: skip


def check_written_together(one):
    chain = one.chain(1, BLOCKS)
    save(one, chain)
    assert not one.tier.met.broken
    leave_all(one.store)
    assert one.read(chain) == BLOCKS


def test_groups_are_written_while_others_are_sealed(sealed):
    check_written_together(sealed(TogetherTier()))


def test_the_writer_seals_groups_itself_if_the_thread_pool_is_busy(sealed, monkeypatch):
    submitted = []

    def refused_while_all_are_busy(pool, work, group):
        submitted.append(group)
        return submit_or_run(pool if len(submitted) % AT_ONCE else None, work, group)

    monkeypatch.setattr(tier_writer, "LOCAL_SEAL", ParallelSeal(AT_ONCE - 1, 1, 1, 1))
    monkeypatch.setattr(tier_writer, "submit_or_run", refused_while_all_are_busy)
    check_written_together(sealed(TogetherTier()))


def test_groups_are_sealed_one_at_a_time(sealed, monkeypatch):
    under_way, most = [], []
    seal = Sealer.seal

    def watched(*args):
        under_way.append(args)
        most.append(len(under_way))
        time.sleep(0.005)
        under_way.pop()
        return seal(*args)

    monkeypatch.setattr(Sealer, "seal", watched)
    one = sealed(MemoryTier(64 * MIB))
    save(one, one.chain(1, BLOCKS))
    assert most == [1] * BLOCKS


def test_a_group_that_cannot_be_written_loses_only_its_own_blocks(sealed):
    one = sealed(FailsOnceTier(64 * MIB))
    first, second = one.chain(1, BLOCKS), one.chain(2, BLOCKS)
    save(one, first)
    assert one.tier.failed
    assert one.tier.usage().records == BLOCKS - 1, "each group is one block"
    assert one.read(first) == BLOCKS, "and memory still has it"
    save(one, second)
    assert one.tier.usage().records == 2 * BLOCKS - 1
    leave_all(one.store)
    assert one.read(second) == BLOCKS


def test_blocks_held_by_a_shared_tier_are_neither_sealed_nor_written(sealed, monkeypatch):
    records, sealings = {}, []
    seal = Sealer.seal
    monkeypatch.setattr(Sealer, "seal", lambda *a: sealings.append(a) or seal(*a))
    assert isinstance(AskedTier(records), Queryable)
    first = sealed(AskedTier(records))
    chain = first.chain(1, BLOCKS)
    save(first, chain)
    assert (len(sealings), first.tier.writes) == (BLOCKS, BLOCKS)
    for key in chain.keys[:2]:
        del records[first.namespace, key]
    second = sealed(AskedTier(records))
    save(second, chain)
    assert (len(sealings), second.tier.writes) == (BLOCKS + 2, 2)
    assert all(second.view.is_saved(second.namespace, key) for key in chain.keys)
    leave_all(second.store)
    assert second.read(chain) == BLOCKS


def test_a_batch_that_a_shared_tier_holds_completely_is_not_written(sealed):
    records = {}
    for writes in (BLOCKS, 0):
        one = sealed(AskedTier(records))
        save(one, one.chain(1, BLOCKS))
        assert one.tier.writes == writes


def test_a_block_dropped_while_a_shared_tier_is_queried_stays_dropped(sealed):
    records = {}
    save(one := sealed(AskedTier(records)), chain := one.chain(1, BLOCKS))
    two = sealed(AskedTier(records))
    key, known = chain.keys[3], two.tier.known

    def dropping(batch):
        leave(two.store, two.namespace, [key])
        return known(batch)

    two.tier.known = dropping
    save(two, chain)
    assert two.view.tiers(two.namespace, key) == []
