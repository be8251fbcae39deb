"""The list of waiting durable blocks: what a full list leaves out, and how much one step reads."""

import pytest

from holdfast.index.residency import Residency
from holdfast.policy.retention import Retention
from holdfast.store import durable_blocks
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

MIB = 1 << 20
BLOCKS = 3


class Medium(MemoryTier):
    """A tier in memory that can flush; it takes writes once it is told so."""

    def __init__(self):
        super().__init__(64 * MIB, name="medium")
        self.writes = False

    def accepts_writes(self):
        return self.writes

    def flush(self, places):
        return [True] * len(places)


@pytest.fixture
def medium():
    return Medium()


def save(one, seeds):
    for seed in seeds:
        assert one.save(one.chain(seed, BLOCKS), retention=Retention.DURABLE) == BLOCKS


def waiting(one):
    return one.store.status().durable.waiting


@pytest.fixture
def looked_at(monkeypatch):
    """A list that gets an entry for each block that the index is asked for by name."""
    asked, find = [], Residency.find

    def count(index, namespace, key):
        asked.append(key)
        return find(index, namespace, key)

    monkeypatch.setattr(Residency, "find", count)
    return asked


def test_a_durable_save_does_not_look_at_the_blocks_of_a_full_list(
    harness, medium, monkeypatch, looked_at
):
    monkeypatch.setattr(durable_blocks, "WAITING_MAX", 20 * BLOCKS)
    one = harness(8 * MIB, medium)
    save(one, range(20))
    assert waiting(one) == 20 * BLOCKS
    looked_at.clear()
    save(one, [20])
    assert len(looked_at) < 20 * BLOCKS
    assert waiting(one) == 20 * BLOCKS
    medium.writes = True


def test_one_housekeeping_looks_at_a_part_of_a_long_list_and_the_next_one_goes_on(
    harness, medium, monkeypatch, looked_at
):
    monkeypatch.setattr(durable_blocks, "ROWS_AT_ONCE", 10)
    one = harness(8 * MIB, medium)
    save(one, range(20))
    assert one.store.status().durable.waiting_bytes == 20 * BLOCKS * one.namespace.slot_bytes
    looked_at.clear()
    one.store.housekeep()
    assert len(looked_at) < 20 * BLOCKS
    medium.writes = True
    one.store.housekeep()
    one.flush()
    assert waiting(one) == 20 * BLOCKS, "as long as no step has looked at them"
    for _ in range(2 * 20 * BLOCKS // 10):
        one.clock.advance(durable_blocks.AGAIN_S)
        one.store.housekeep()
    assert waiting(one) == one.store.status().durable.waiting_bytes == 0


def test_blocks_beyond_the_limit_of_the_list_are_copied_to_a_new_durable_tier(
    harness, medium, monkeypatch, tmp_path
):
    """They were on another tier before a restart."""
    disk, marks = DiskConfig(path=str(tmp_path), capacity_bytes=32 * MIB), tmp_path / "durable.log"
    before = harness(4 * MIB, DiskTier(disk), marks_file=marks)
    save(before, range(10))
    before.flush()
    before.store.close()
    monkeypatch.setattr("holdfast.store.store._HOUSEKEEPING_S", 0.02)
    monkeypatch.setattr(durable_blocks, "WAITING_MAX", 10)
    monkeypatch.setattr(durable_blocks, "AGAIN_S", 0.0)
    medium.writes = True
    one = harness(4 * MIB, DiskTier(disk), medium, marks_file=marks, durable="medium")
    one.view.wait_until(lambda: medium.usage().records == 10 * BLOCKS, "the medium holds all")
    one.view.wait_until(lambda: waiting(one) == 0, "nothing waits")
