"""A disk tier whose drive fails, goes away and is replaced: never wrong bytes, and no restart."""

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import threading
import time

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import ConfigError, Outcome
from holdfast.limits import MIB
from holdfast.testing.tier_contract import Blocks, TierContract
from holdfast.tiers.base import NOWHERE, TierPut, takes_writes
from holdfast.tiers.disk.calls_in_progress import HANG_S
from holdfast.tiers.disk.file import DiskConfig, open_file
from holdfast.tiers.disk.kind import FILE_NAME
from holdfast.tiers.disk.region import SECTOR, SUPERBLOCKS, RegionGeometry, region_bytes_for
from holdfast.tiers.disk.replaceable import REOPEN_MAX_S, ReplaceableDisk
from holdfast.tiers.disk.tier import UNREAD_MAX
from holdfast.tiers.reported import tier_status

BLOCKS = Blocks(5 * SECTOR - 144)
CAPACITY = 8 * MIB
REGIONS_AT = RegionGeometry.within(CAPACITY, region_bytes_for(CAPACITY)).regions_at


class TestReplaceableDisk(TierContract):
    durable = True

    def make_tier(self, folder, capacity_bytes):
        return ReplaceableDisk(DiskConfig(path=str(folder), capacity_bytes=capacity_bytes))


class FailingExtents:
    """The extents of a file, whose calls raise EIO or EROFS while `fails` says so."""

    def __init__(self, inner, fails):
        self._inner, self._fails = inner, fails
        self.size, self.direct = inner.size, inner.direct
        self.flush, self.close = inner.flush, inner.close

    def read(self, offset, views):
        self._fails("read", offset)
        self._inner.read(offset, views)

    def write(self, offset, views):
        self._fails("write", offset)
        self._inner.write(offset, views)


class Drive:
    """A tier in a folder, with a clock and failures that a test controls."""

    def __init__(self, folder, **options):
        self.folder, self.clock = folder, ManualClock()
        self.error = {}
        self.before = lambda what, offset: None
        """Called before each read and write of the drive."""
        self.config = DiskConfig(path=str(folder), capacity_bytes=CAPACITY, **options)
        self.tier = ReplaceableDisk(self.config, self.clock, self._open, watch_s=3600.0)

    def _open(self, config):
        return FailingExtents(open_file(config), self._fail)

    def _fail(self, what, offset):
        self.before(what, offset)
        found = self.error.get(what)
        if found and (found != errno.EIO or offset >= self.error.get("from", 0)):
            raise OSError(found, os.strerror(found))

    def look(self):
        """Look at the drive as the tier's thread does, after any pause."""
        self.clock.advance(REOPEN_MAX_S + 3600.0)
        self.tier.look()

    def away(self):
        return tier_status(self.tier).away


@pytest.fixture
def drive(tmp_path):
    made = Drive(tmp_path / "drive")
    with contextlib.closing(made.tier):
        yield made


@pytest.fixture
def mounted(tmp_path):
    """Mount file systems in memory at a folder, and unmount them at the end."""
    folder = tmp_path / "mount"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=False).returncode
    ):
        pytest.skip("mounting a file system needs root and the permission to mount")

    class Mounts:
        path = folder

        def unmount(self):
            subprocess.run(["umount", "--lazy", folder], check=True)

        def mount(self, size="64m"):
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True
            )

    yield Mounts()
    while os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", folder], check=True)


def save(tier, numbers):
    """Write blocks; return their outcomes."""
    places = [BLOCKS.reserve(tier).places[0] for _ in numbers]
    return tier.write([TierPut(p, BLOCKS.record(n)) for p, n in zip(places, numbers, strict=True)])


def test_a_deleted_folder_is_away_and_a_new_one_is_made_and_used(drive):
    places = BLOCKS.save(drive.tier, range(4))
    shutil.rmtree(drive.folder)
    drive.look()
    assert "No such file" in drive.away()
    assert not takes_writes(drive.tier)
    assert BLOCKS.reserve(drive.tier).places == [NOWHERE]
    assert set(BLOCKS.load(drive.tier, range(4), places)) == {Outcome.GONE}
    drive.look()
    assert not drive.away()
    assert str(drive.folder) in tier_status(drive.tier).replaced
    assert tier_status(drive.tier).losses == 1


def test_a_place_on_a_former_medium_is_a_miss_on_the_next_one(drive):
    old = BLOCKS.save(drive.tier, range(4))
    shutil.rmtree(drive.folder)
    drive.look()
    drive.look()
    new = BLOCKS.save(drive.tier, range(4))
    assert not set(old) & set(new)
    assert set(BLOCKS.load(drive.tier, range(4), old)) == {Outcome.MISS}
    drive.tier.free(old)
    assert BLOCKS.load(drive.tier, range(4), new) == [Outcome.OK] * 4


def test_a_write_to_a_place_of_a_former_medium_is_gone(drive):
    place = BLOCKS.reserve(drive.tier).places[0]
    shutil.rmtree(drive.folder)
    drive.look()
    drive.look()
    assert drive.tier.write([TierPut(place, BLOCKS.record(1))]) == [Outcome.GONE]


def test_a_loss_is_told_once_and_names_the_places_of_former_media_only(drive):
    old = BLOCKS.save(drive.tier, range(2))
    assert drive.tier.lost() is None
    shutil.rmtree(drive.folder)
    drive.look()
    drive.look()
    new = BLOCKS.save(drive.tier, range(2))
    lost = drive.tier.lost()
    assert lost is not None
    assert all(map(lost, old))
    assert not any(map(lost, new))
    assert drive.tier.lost() is None


def test_a_medium_has_one_identity_whenever_it_is_in_use(drive):
    first = drive.tier.medium()
    assert first
    drive.tier.detach()
    assert drive.tier.medium() == b""
    drive.tier.replace()
    assert drive.tier.medium() == first
    drive.folder.rename(drive.folder.with_name("pulled"))
    drive.look()
    drive.tier.replace()
    assert drive.tier.medium() not in (b"", first)


def test_a_flush_makes_no_record_of_a_former_medium_safe(drive):
    old = BLOCKS.save(drive.tier, range(2))
    assert drive.tier.flush(old) == [True] * 2
    shutil.rmtree(drive.folder)
    drive.look()
    assert drive.tier.flush(old) == [False] * 2
    drive.look()
    new = BLOCKS.save(drive.tier, range(2))
    assert drive.tier.flush([*old, *new]) == [False] * 2 + [True] * 2


def test_survivors_are_announced_after_the_loss_was_told(drive):
    assert not drive.tier.has_survivors()
    shutil.rmtree(drive.folder)
    drive.look()
    drive.look()
    assert not drive.tier.has_survivors()
    drive.tier.lost()
    assert drive.tier.has_survivors()
    assert not list(drive.tier.survivors())
    assert not drive.tier.has_survivors()


def test_a_read_only_file_system_stops_writes_and_is_not_away(drive):
    places = BLOCKS.save(drive.tier, range(3))
    drive.error["write"] = errno.EROFS
    while takes_writes(drive.tier):
        assert set(save(drive.tier, range(9, 12))) == {Outcome.GONE}
    drive.look()
    assert "Read-only file system" in tier_status(drive.tier).writes_stopped
    assert not drive.away()
    assert BLOCKS.load(drive.tier, range(3), places) == [Outcome.OK] * 3


def test_an_error_of_every_read_is_away_until_the_drive_can_be_read(drive):
    places = BLOCKS.save(drive.tier, range(3))
    drive.error["read"] = errno.EIO
    assert set(BLOCKS.load(drive.tier, range(3), places)) == {Outcome.GONE}
    drive.look()
    assert "Input/output error" in drive.away()
    drive.look()
    assert drive.away(), "its superblocks cannot be read"
    drive.error.clear()
    drive.look()
    assert not drive.away()
    assert not tier_status(drive.tier).replaced, "it is the same drive"
    drive.tier.lost()
    assert len(list(drive.tier.survivors())) == 3


def test_a_drive_whose_records_cannot_be_read_is_away_though_its_superblocks_can(drive):
    places = BLOCKS.save(drive.tier, range(3))
    drive.error.update({"read": errno.EIO, "from": SUPERBLOCKS * SECTOR})
    for _ in range(UNREAD_MAX):
        BLOCKS.load(drive.tier, range(3), places)
    drive.look()
    assert "reads of records failed" in drive.away()


def test_a_file_that_was_overwritten_is_away(drive):
    other = Drive(drive.folder.with_name("other"))
    other.tier.close()
    image = (other.folder / FILE_NAME).read_bytes()
    with (drive.folder / FILE_NAME).open("r+b") as file:
        file.write(image)
    drive.look()
    assert "overwritten" in drive.away()


def test_a_foreign_folder_is_refused_with_its_content_and_a_remedy(drive):
    shutil.rmtree(drive.folder)
    drive.folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (drive.folder / name).touch()
    drive.look()
    drive.look()
    assert "a.txt, b.txt, c.txt and 1 more" in drive.away()
    assert "holdfast tier replace NAME --path" in drive.away()
    names = sorted(each.name for each in drive.folder.iterdir())
    assert names == ["a.txt", "b.txt", "c.txt", "d.txt"]
    with pytest.raises(ConfigError, match=r"a\.txt.*--path"):
        drive.tier.replace()
    for each in list(drive.folder.iterdir()):
        each.unlink()
    drive.look()
    assert not drive.away()


def test_files_that_a_node_keeps_beside_its_blocks_do_not_make_a_folder_foreign(drive):
    shutil.rmtree(drive.folder)
    drive.folder.mkdir()
    for name in (
        "learnt.json", "default.key", "audit.jsonl", "durable.log", ".durable.log.new-x1",
        "lost+found",
    ):  # fmt: skip
        (drive.folder / name).touch()
    drive.look()
    drive.look()
    assert not drive.away()


def test_an_unmounted_path_is_away_and_nothing_is_written_below_it(mounted):
    drive = Drive(mounted.path)
    with contextlib.closing(drive.tier):
        BLOCKS.save(drive.tier, range(3))
        mounted.unmount()
        drive.look()
        drive.look()
        assert f'nothing is mounted at "{mounted.path}"' in drive.away()
        assert not list(mounted.path.iterdir())
        mounted.mount()
        drive.look()
        assert not drive.away()
        assert (mounted.path / FILE_NAME).exists()
        assert save(drive.tier, range(3)) == [Outcome.OK] * 3


def test_a_drive_mounted_over_the_path_is_used_while_the_old_one_is_open(mounted):
    drive = Drive(mounted.path)
    with contextlib.closing(drive.tier):
        old = BLOCKS.save(drive.tier, range(3))
        mounted.mount()
        drive.look()
        assert "on another device" in drive.away() or "No such file" in drive.away()
        drive.look()
        assert not drive.away()
        assert set(BLOCKS.load(drive.tier, range(3), old)) == {Outcome.MISS}
        new = BLOCKS.save(drive.tier, range(3))
        assert BLOCKS.load(drive.tier, range(3), new) == [Outcome.OK] * 3


def test_a_drive_that_is_too_small_is_refused_with_its_size(mounted):
    drive = Drive(mounted.path)
    with contextlib.closing(drive.tier):
        mounted.unmount()
        mounted.mount("4m")
        drive.look()
        drive.look()
        assert "requested" in drive.away()
        assert "lower it" in drive.away()


def test_a_detached_drive_can_be_unmounted_and_is_not_used_again_by_itself(mounted):
    drive = Drive(mounted.path)
    with contextlib.closing(drive.tier):
        BLOCKS.save(drive.tier, range(3))
        drive.tier.detach()
        drive.look()
        assert "detached" in drive.away()
        subprocess.run(["umount", mounted.path], check=True)
        drive.look()
        assert "detached" in drive.away()
        mounted.mount()
        drive.look()
        assert not drive.away(), "another drive is mounted there"


def test_a_detached_or_replaced_drive_is_no_error_in_the_log(drive, caplog):
    with caplog.at_level(logging.INFO, "holdfast.tiers.disk"):
        drive.tier.detach()
        drive.tier.replace()
        drive.tier.replace()
        levels = {each.levelname for each in caplog.records if "away, because" in each.message}
        assert levels == {"INFO"}
        shutil.rmtree(drive.folder)
        drive.look()
    lost = [each.levelname for each in caplog.records if "away, because" in each.message]
    assert lost[-1] == "ERROR"


def test_a_detached_drive_is_used_again_by_replace(drive):
    BLOCKS.save(drive.tier, range(3))
    drive.tier.detach()
    drive.look()
    assert drive.away()
    drive.tier.replace()
    assert not drive.away()
    drive.tier.lost()
    assert len(list(drive.tier.survivors())) == 3


def test_a_replacement_by_another_path_serves_from_there(drive, tmp_path):
    old = BLOCKS.save(drive.tier, range(3))
    drive.tier.replace(str(tmp_path / "new"))
    assert (tmp_path / "new" / FILE_NAME).exists()
    assert set(BLOCKS.load(drive.tier, range(3), old)) == {Outcome.MISS}
    assert save(drive.tier, range(3)) == [Outcome.OK] * 3
    shutil.rmtree(drive.folder)
    drive.look()
    assert not drive.away(), "the former folder does not matter any more"


def test_a_replacement_that_is_refused_changes_nothing(drive, tmp_path):
    places = BLOCKS.save(drive.tier, range(3))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").touch()
    with pytest.raises(ConfigError, match=r"photo\.jpg"):
        drive.tier.replace(str(tmp_path / "foreign"))
    assert not drive.away()
    assert BLOCKS.load(drive.tier, range(3), places) == [Outcome.OK] * 3


def test_counters_go_on_over_a_replacement(drive):
    BLOCKS.save(drive.tier, range(4))
    written = drive.tier.usage().written_bytes
    shutil.rmtree(drive.folder)
    drive.look()
    assert drive.tier.usage().written_bytes == written
    assert drive.tier.usage().records == 0
    drive.look()
    BLOCKS.save(drive.tier, range(4))
    assert drive.tier.usage().written_bytes == 2 * written


def test_a_drive_pulled_in_the_middle_of_a_write_serves_no_part_of_it(drive):
    began, goes_on = threading.Event(), threading.Event()

    def pull(what, offset):
        if what == "write" and offset >= REGIONS_AT:
            began.set()
            goes_on.wait(60)
            raise OSError(errno.EIO, "pulled")

    drive._fail = pull
    drive.tier.replace(str(drive.folder.with_name("slow")))
    place = BLOCKS.reserve(drive.tier).places[0]
    outcomes = []
    put = TierPut(place, BLOCKS.record(1))
    writer = threading.Thread(target=lambda: outcomes.extend(drive.tier.write([put])))
    writer.start()
    assert began.wait(60)
    shutil.rmtree(drive.folder.with_name("slow"))
    looker = threading.Thread(target=drive.look)
    looker.start()
    while not drive.away():
        time.sleep(0.001)
    assert BLOCKS.load(drive.tier, [1], [place]) == [Outcome.GONE]
    goes_on.set()
    writer.join(60)
    looker.join(60)
    assert outcomes == [Outcome.GONE]
    del drive._fail
    drive.look()
    assert BLOCKS.load(drive.tier, [1], [place]) == [Outcome.MISS]


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_drive_that_hangs_is_away_and_is_used_again_when_its_calls_end(drive, kind):
    places = BLOCKS.save(drive.tier, range(2))
    began, goes_on = threading.Event(), threading.Event()

    def hang(what, offset):
        del offset
        if what == kind:
            began.set()
            goes_on.wait(60)

    drive.before = hang
    calls = {
        "read": lambda: BLOCKS.load(drive.tier, [0], places[:1]),
        "write": lambda: save(drive.tier, [5]),
    }
    caller = threading.Thread(target=calls[kind])
    caller.start()
    assert began.wait(60)
    drive.clock.advance(HANG_S - 1.0)
    drive.tier.look()
    drive.clock.advance(2.0)
    drive.tier.look()
    assert "has not returned" in drive.away()
    assert BLOCKS.load(drive.tier, [1], places[1:]) == [Outcome.GONE]
    assert not takes_writes(drive.tier)
    drive.look()
    assert "its I/O has not ended" in drive.away(), "it is not opened beside the call"
    goes_on.set()
    caller.join(60)
    while drive.away():
        drive.look()
    again = {survivor.header.key: survivor.place for survivor in drive.tier.survivors()}
    assert BLOCKS.load(drive.tier, [1], [again[BLOCKS.key(1)]]) == [Outcome.OK]


def test_the_watch_finds_a_loss_by_itself(tmp_path):
    config = DiskConfig(path=str(tmp_path / "drive"), capacity_bytes=CAPACITY)
    with contextlib.closing(ReplaceableDisk(config, watch_s=0.01)) as tier:
        # At once: the watch would make a new file in a folder whose deletion goes on.
        (tmp_path / "drive").rename(tmp_path / "gone")
        until = time.monotonic() + 60
        while not tier_status(tier).replaced and time.monotonic() < until:
            time.sleep(0.01)
        assert tier_status(tier).losses == 1


def test_a_look_at_a_drive_that_goes_on_failing_is_logged_once(tmp_path, monkeypatch, caplog):
    looks, seen = [], threading.Event()

    def fails(_):
        looks.append(None)
        if len(looks) == 3:
            seen.set()
        raise ValueError("a mistake")

    monkeypatch.setattr(ReplaceableDisk, "look", fails)
    config = DiskConfig(path=str(tmp_path / "watched"), capacity_bytes=CAPACITY)
    with contextlib.closing(ReplaceableDisk(config, watch_s=0.01)):
        assert seen.wait(60)
    assert caplog.text.count("the look at its drive failed") == 1
