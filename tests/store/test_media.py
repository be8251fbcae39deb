"""A store whose disk goes away and is replaced: blocks elsewhere stay, no byte is ever wrong."""

import shutil

import pytest

from holdfast.errors import BlockError, ConfigError
from holdfast.policy.retention import Retention
from holdfast.store import media
from holdfast.store.marks_file import MarksFile
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.replaceable import REOPEN_MAX_S, ReplaceableDisk

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A disk whose drive is looked at when a test says so; the store closes it."""
    config = DiskConfig(path=str(tmp_path / "drive"), capacity_bytes=16 * MIB)
    return ReplaceableDisk(config, watch_s=0.0001 + REOPEN_MAX_S)


@pytest.fixture
def one(harness, disk):
    made = harness(4 * MIB, disk)
    assert made.store.recovery.wait(60)
    return made


def disk_status(one):
    return one.store.status().tiers[-1]


def housekeep(one):
    """Do what the store's housekeeping does about media."""
    one.store.housekeep()
    one.store.recovery.recover_replaced()
    while one.store.recovery.is_running:
        pass


def lose(one, disk, tmp_path):
    shutil.move(tmp_path / "drive", tmp_path / "pulled")
    disk.look()
    assert disk_status(one).away


def bring_back(disk):
    disk.replace()


def test_a_lost_drive_takes_its_blocks_and_no_others(one, disk, tmp_path) -> None:
    below, both = one.chain(1, 3), one.chain(2, 3)
    one.save(below)
    one.save(both)
    one.leave_memory(below)
    one.flush()
    lose(one, disk, tmp_path)
    assert one.read(below) == 0, "before the store has forgotten them"
    housekeep(one)
    assert one.store.cover(one.namespace, below.keys).blocks == 0
    assert one.read(both) == 3
    assert one.save(below) == 3, "the node serves without the tier"
    assert one.read(below) == 3
    assert one.nothing_is_left_over()


def test_durable_blocks_that_are_lost_with_a_drive_are_counted(one, disk, tmp_path) -> None:
    below, both, plain = one.chain(1, 3), one.chain(2, 2), one.chain(3, 2)
    one.save(below, retention=Retention.DURABLE)
    one.save(both, retention=Retention.DURABLE)
    one.save(plain)
    one.leave_memory(below)
    one.leave_memory(plain)
    one.flush()
    lose(one, disk, tmp_path)
    housekeep(one)
    assert one.store.status().durable.evicted == 3


def test_blocks_in_memory_are_written_to_the_new_drive(one, disk, tmp_path) -> None:
    chain = one.chain(1, 3)
    one.save(chain)
    one.flush()
    lose(one, disk, tmp_path)
    housekeep(one)
    bring_back(disk)
    housekeep(one)
    one.flush()
    assert disk_status(one).records == 3
    assert "replaced" in disk_status(one).conditions
    one.leave_memory(chain)
    assert one.read(chain) == 3


def test_a_drive_that_comes_back_has_its_blocks_again(one, disk, tmp_path) -> None:
    chain = one.chain(1, 3)
    one.save(chain)
    one.leave_memory(chain)
    one.flush()
    lose(one, disk, tmp_path)
    housekeep(one)
    assert one.read(chain) == 0
    shutil.move(tmp_path / "pulled", tmp_path / "drive")
    bring_back(disk)
    housekeep(one)
    assert one.read(chain) == 3
    assert not disk_status(one).conditions


def test_a_new_drive_gets_the_names_of_the_durable_blocks(harness, disk, tmp_path) -> None:
    one = harness(4 * MIB, disk, marks_file=tmp_path / "drive" / "durable.log")
    chain = one.chain(1, 3)
    one.save(chain, retention=Retention.DURABLE)
    assert one.store.sync(one.namespace, chain.keys, 60.0) == 3
    lose(one, disk, tmp_path)
    bring_back(disk)
    one.store.housekeep()
    media.restore_files(one.store)
    one.store.recovery.recover_replaced()
    assert one.store.sync(one.namespace, chain.keys, 60.0) == 3
    marks = MarksFile(tmp_path / "drive" / "durable.log").load()
    assert [run.keys for run in marks] == [b"".join(chain.keys)]


def test_blocks_that_were_dropped_while_a_drive_was_away_stay_dropped(one, disk, tmp_path) -> None:
    chain = one.chain(1, 3)
    one.save(chain)
    one.leave_memory(chain)
    lose(one, disk, tmp_path)
    housekeep(one)
    one.store.drop("*")
    shutil.move(tmp_path / "pulled", tmp_path / "drive")
    bring_back(disk)
    housekeep(one)
    assert one.read(chain) == 0
    assert disk_status(one).records == 0


def test_a_drop_that_a_drive_has_recorded_leaves_what_was_saved_after_it(
    one, disk, tmp_path
) -> None:
    old, chain = one.chain(1, 2), one.chain(2, 3)
    one.save(old)
    one.flush()
    one.store.drop("*")
    one.save(chain, retention=Retention.DURABLE)
    assert one.store.sync(one.namespace, chain.keys, 60.0) == 3
    one.leave_memory(chain)
    for _ in range(2):
        lose(one, disk, tmp_path)
        housekeep(one)
        shutil.move(tmp_path / "pulled", tmp_path / "drive")
        bring_back(disk)
        housekeep(one)
        assert disk_status(one).records == 3
    assert one.read(chain) == 3
    assert one.store.cover(one.namespace, old.keys).blocks == 0


def test_a_drop_applies_to_a_drive_that_was_away_though_another_one_recorded_it(
    one, disk, tmp_path
) -> None:
    gone, chain = one.chain(1, 3), one.chain(2, 2)
    one.save(gone)
    one.leave_memory(gone)
    lose(one, disk, tmp_path)
    bring_back(disk)  # another drive: the folder was moved away
    housekeep(one)
    one.store.drop("*")
    one.save(chain)
    one.leave_memory(chain)
    shutil.move(tmp_path / "drive", tmp_path / "second")
    shutil.move(tmp_path / "pulled", tmp_path / "drive")
    disk.look()
    bring_back(disk)
    housekeep(one)
    assert one.read(gone) == 0
    assert disk_status(one).records == 0
    shutil.move(tmp_path / "drive", tmp_path / "pulled")
    shutil.move(tmp_path / "second", tmp_path / "drive")
    disk.look()
    bring_back(disk)
    housekeep(one)
    assert one.read(chain) == 2, "the second drive had recorded the drop"


def test_an_operator_learns_what_a_replacement_forgets(one, tmp_path) -> None:
    below, both = one.chain(1, 2), one.chain(2, 3)
    one.save(below)
    one.save(both)
    one.leave_memory(below)
    one.flush()
    found = one.store.would_lose("disk")
    assert (found["blocks"], found["lost"]) == (5, 2)
    assert one.store.replace_medium("disk", str(tmp_path / "new")) == found
    housekeep(one)
    assert one.read(below) == 0
    assert one.read(both) == 3


def test_a_tier_without_a_drive_is_refused_by_name(one) -> None:
    with pytest.raises(ConfigError, match=r"'host' has no drive.*that have: disk"):
        one.store.detach_medium("host")
    with pytest.raises(BlockError, match="'new' is not absolute"):
        one.store.replace_medium("disk", "new")
