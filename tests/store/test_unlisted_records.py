"""A copy is given up only for proof against its own record; others keep their places."""

import errno
import os

import pytest

from holdfast.errors import Outcome
from holdfast.policy.retention import Retention
from holdfast.store.unlisted_records import CONFIRM_S
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.tiers.disk.region import SECTOR

MIB = 1 << 20
BLOCKS = 3


class FailingReads(MemoryTier):
    """Answers reads of some keys, or of all, with an outcome other than OK."""

    def __init__(self, records=None, capacity_bytes=64 * MIB) -> None:
        super().__init__(capacity_bytes, records)
        self.outcome = Outcome.OK
        self.keys: list[bytes] = []

    def fail(self, outcome, keys=()) -> None:
        self.outcome, self.keys = outcome, list(keys)

    def read(self, batch):
        found = super().read(batch)
        return [
            self.outcome
            if self.outcome is not Outcome.OK and (not self.keys or get.key in self.keys)
            else outcome
            for get, outcome in zip(batch, found, strict=True)
        ]


class FailingMemory(MemoryExtents):
    """A medium whose reads fail while the machine is short of memory."""

    short = False

    def read(self, offset, views) -> None:
        if self.short:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        super().read(offset, views)


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_a_flipped_byte_in_memory_leaves_the_copies_below(harness, shared) -> None:
    tier = SharedMemoryTier({}) if shared else MemoryTier(64 * MIB)
    one = harness(2 * MIB, tier)
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.flush()
    one.view.record(one.namespace, chain.keys[0])[500] ^= 1
    assert one.read(chain) == 0, "the damaged copy is not served"
    assert one.store.cover(one.namespace, chain.keys).blocks == BLOCKS
    assert one.read(chain) == BLOCKS, "the tier below has an intact one"


def test_a_disk_keeps_a_block_whose_copy_in_memory_is_damaged(harness) -> None:
    medium = MemoryExtents.formatted(17 * SECTOR, 8)
    one = harness(2 * MIB, tier_on(medium))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.flush()
    one.view.record(one.namespace, chain.keys[0])[500] ^= 1
    assert one.store.verify()["bad"] == [{"tier": "host", "outcome": "corrupt"}]
    one.store.close()
    again = harness(2 * MIB, tier_on(MemoryExtents(medium.image)))
    assert again.store.recovery.wait(60)
    assert again.read(chain) == BLOCKS


def test_a_damaged_record_is_freed_and_the_block_is_written_again(harness) -> None:
    records: dict = {}
    one = harness(2 * MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    place = min(records)
    records[place] = records[place][:500] + b"\0\1\2" + records[place][503:]
    assert one.read(chain) == 0
    assert one.tier.usage().records == BLOCKS - 1
    assert one.save(chain) == 1
    one.leave_memory()
    assert one.read(chain) == BLOCKS


def test_a_disk_keeps_what_it_could_not_read_while_memory_was_short(harness) -> None:
    medium = FailingMemory(MemoryExtents.formatted(17 * SECTOR, 8).image)
    one = harness(2 * MIB, tier_on(medium))
    chain = one.chain(1, BLOCKS)
    one.save(chain, retention=Retention.DURABLE)
    assert one.store.sync(one.namespace, chain.keys, 60.0) == BLOCKS
    one.leave_memory()
    medium.short = True
    assert one.read(chain) == 0
    medium.short = False
    assert one.read(chain) == BLOCKS
    assert one.tier.usage().records == BLOCKS


@pytest.mark.parametrize("outcome", [Outcome.GONE, Outcome.LATE])
@pytest.mark.parametrize("look", ["fetch", "verify"])
def test_a_local_tier_keeps_every_copy_while_it_fails(harness, outcome, look) -> None:
    one = harness(2 * MIB, FailingReads())
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    one.tier.fail(outcome)
    for _ in range(3):
        if look == "verify":
            found = one.store.verify()["bad"]
            assert [bad["outcome"] for bad in found] == [str(outcome)] * BLOCKS
        else:
            assert one.read(chain) == 0
        one.clock.advance(CONFIRM_S)
    one.tier.fail(Outcome.OK)
    assert one.tier.usage().records == BLOCKS
    assert one.read(chain) == BLOCKS
    assert one.nothing_is_left_over()


def test_a_block_that_a_local_tier_fails_to_read_can_be_saved_to_memory(harness) -> None:
    one = harness(2 * MIB, FailingReads())
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    one.tier.fail(Outcome.GONE)
    assert one.read(chain) == 0
    assert one.save(chain) == BLOCKS
    assert one.read(chain) == BLOCKS
    one.leave_memory()
    one.tier.fail(Outcome.OK)
    one.clock.advance(CONFIRM_S)
    assert one.read(chain) == BLOCKS, "the tier has kept its copies"
    assert one.tier.usage().records == BLOCKS


def test_a_record_that_no_key_opens_is_saved_again_and_keeps_its_place(harness) -> None:
    records: dict = {}
    one = harness(2 * MIB, FailingReads(records))
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    one.tier.fail(Outcome.UNREADABLE, chain.keys[2:])
    assert one.read(chain) == BLOCKS - 1
    assert one.store.status().tiers[-1].unlisted_records == 1
    assert one.save(chain) == 1
    one.leave_memory()
    assert len(records) == BLOCKS + 1
    one.store.close()
    again = harness(2 * MIB, MemoryTier(64 * MIB, records))
    assert again.store.recovery.wait(60)
    assert again.read(chain) == BLOCKS


def with_one_bad_record(harness, tier):
    """Save a context whose second block cannot be read any more, unlike the rest of the tier."""
    one = harness(2 * MIB, tier)
    chain = one.chain(1, BLOCKS)
    one.save(chain)
    one.leave_memory()
    one.tier.fail(Outcome.GONE, chain.keys[1:2])
    for _ in range(2):
        assert one.read(chain) == 1
        one.leave_memory()
        one.clock.advance(CONFIRM_S)
    return one, chain


def test_a_record_that_fails_again_is_saved_again_and_keeps_its_place(harness) -> None:
    one, chain = with_one_bad_record(harness, FailingReads())
    assert one.store.cover(one.namespace, chain.keys).blocks == 1
    disk = one.store.status().tiers[-1]
    assert (disk.unlisted_records, disk.unlisted_bytes) == (1, one.namespace.slot_bytes)
    one.tier.fail(Outcome.OK)
    assert one.save(chain) == 1
    one.leave_memory()
    assert one.read(chain) == BLOCKS
    assert one.tier.usage().records == BLOCKS + 1


def test_the_next_start_finds_a_record_that_could_not_be_read(harness) -> None:
    records: dict = {}
    one, chain = with_one_bad_record(harness, FailingReads(records))
    one.store.close()
    again = harness(2 * MIB, MemoryTier(64 * MIB, records))
    assert again.store.recovery.wait(60)
    assert again.read(chain) == BLOCKS


@pytest.mark.parametrize("how", ["drop", "forget"])
def test_what_is_dropped_keeps_no_place_though_it_cannot_be_read(harness, how) -> None:
    one, chain = with_one_bad_record(harness, FailingReads())
    if how == "forget":
        one.store.forget(one.namespace, chain.keys)
    else:
        one.store.drop(one.namespace.fingerprint.hex())
    one.view.wait_until(lambda: one.tier.usage().records == 0, "every place is free")


def test_a_tier_evicts_a_record_that_could_not_be_read(harness) -> None:
    one, chain = with_one_bad_record(harness, FailingReads(capacity_bytes=MIB))
    one.tier.fail(Outcome.OK)
    for seed in range(2, 2 + MIB // one.namespace.slot_bytes):
        one.save(one.chain(seed, 1))
        one.leave_memory()
    assert one.store.cover(one.namespace, chain.keys).blocks == 0, "it is among the oldest"
    assert one.store.status().tiers[-1].unlisted_records == 0
    one.store.drop("*")
    one.view.wait_until(lambda: one.tier.usage().records == 0, "every place is free")
    assert one.view.used_bytes(1) == 0
