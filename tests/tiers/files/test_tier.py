"""The files tier keeps the contract of shared tiers, and its blocks come right or not at all."""

import itertools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from holdfast.byte_size import Size
from holdfast.codec.coded import check_reported
from holdfast.errors import ConfigError, Outcome
from holdfast.limits import GIB, MIB
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.shared_tier_contract import SharedTierContract
from holdfast.tiers.files.kind import FilesOptions, check_files, examine_files, open_files
from holdfast.tiers.kind import TierContext
from holdfast_bench.harness.pause import pause, resume
from holdfast_bench.peers.shared_mounts import JuiceFs

CONTEXT = TierContext("tiers.1", "files", 512)
PATIENT = {"deadline_s": 60.0, "write_s": 60.0, "ask_s": 60.0}
"""Limits that a busy machine keeps."""


def options(folder, **more):
    # A process has to start before the first listing, on a machine that is busy.
    given = {"capacity": Size(GIB), "write_s": 5.0, "ask_s": 2.0, "poll_s": 1.0, **more}
    options = FilesOptions(path=str(folder), **given)
    check_files(options, "tiers.1")
    return options


def open_tier(folder, **more):
    return open_files(options(folder, **more), CONTEXT)


class Folder:
    """A folder that is unmounted, and whose calls hang: what `RemoteSide` asks for."""

    def __init__(self, folder):
        self.mount, self.aside = folder / "mount", folder / "aside"
        self.mount.mkdir(parents=True)
        self.tiers = []
        self.paused = []

    def open(self):
        self.tiers.append(open_tier(self.mount / "shared", write_s=2.0))
        return self.tiers[-1]

    def kill(self):
        self.mount.rename(self.aside)

    def restart(self):
        self.aside.rename(self.mount)

    def stall(self):
        processes = [tier.describe()["medium"]["process"] for tier in self.tiers]
        self.paused = [pid for pid in processes if pid]
        for pid in self.paused:
            pause(pid)

    def wake(self):
        for pid in self.paused:
            resume(pid)

    def close(self):
        pass


class TestFilesTier(SharedTierContract):
    answers_locally = True

    def make_remote_side(self, folder):
        return Folder(folder / "side")

    def make_tier(self, remote_side):
        return remote_side.open()


@pytest.mark.soak
@pytest.mark.usefixtures("_juicefs")
class TestFilesTierOnJuiceFs(SharedTierContract):
    answers_locally = True

    def make_remote_side(self, folder):
        mounts = JuiceFs(folder / "juicefs")
        mounts.start()
        self.paths = itertools.cycle(mounts.paths)
        return mounts

    def make_tier(self, remote_side):
        path = next(self.paths) / "shared"
        return open_tier(path, filesystem=remote_side.filesystem, write_s=2.0)


def until(condition, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.fixture(params=["folder", "juicefs", "seaweedfs"])
def pair(request, tmp_path):
    """Two tiers on one shared folder, each on a mount of its own if the file system has two."""
    if request.param == "folder":
        paths = [tmp_path, tmp_path]
    else:
        paths = request.getfixturevalue(request.param).paths
    with ExitStack() as stack:
        folders = [path / tmp_path.name for path in paths]
        tiers = [open_tier(folder, write_s=60.0) for folder in folders]
        yield [stack.enter_context(closing(tier)) for tier in tiers]


def load_verified(tier, blocks, numbers):
    """Read blocks, and verify them as a store does; return how many passed, all of them right."""
    gets = blocks.gets(numbers)
    passed = 0
    for get, outcome in zip(gets, tier.read(gets), strict=True):
        if outcome is Outcome.OK:
            if check_reported(get.into, get.key, get.namespace) is Outcome.CORRUPT:
                continue
            assert blocks.is_right(get.into, get.key)
            passed += 1
    return passed


def test_what_one_host_writes_another_reads_right_or_not_at_all(pair):
    writer, reader = pair
    blocks = ChainedBlocks(200_000)
    with ThreadPoolExecutor(2) as pool:
        saving = pool.submit(
            lambda: [writer.write(blocks.puts(range(4 * n, 4 * n + 4))) for n in range(8)]
        )
        while not saving.done():
            load_verified(reader, blocks, range(32))
        assert {outcome for batch in saving.result() for outcome in batch} == {Outcome.OK}
    until(lambda: load_verified(reader, blocks, range(32)) == 32)
    assert reader.held(blocks.namespace, blocks.keys(40), 0) == 32


def test_a_tier_that_opens_finds_what_others_wrote(tmp_path):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(tmp_path / "shared")) as tier:
        assert blocks.save(tier, range(8)) == [Outcome.OK] * 8
    with closing(open_tier(tmp_path / "shared")) as tier:
        assert tier.ask(blocks.namespace, blocks.keys(9), 0, 20.0).outcome is not Outcome.GONE
        until(lambda: tier.held(blocks.namespace, blocks.keys(9), 0) == 8)
        assert blocks.load(tier, range(8)) == [Outcome.OK] * 8


def segments(folder):
    return [path for path in (folder / "7d").rglob("*") if path.is_file()]


def damage(folder, how):
    """Damage all segments below a folder."""
    files = segments(folder)
    for path in files:
        match how:
            case "truncated":
                os.truncate(path, path.stat().st_size // 2)
            case "longer":
                with path.open("ab") as file:
                    file.write(os.urandom(MIB))
            case "garbage":
                path.write_bytes(os.urandom(path.stat().st_size))
            case "empty":
                path.write_bytes(b"")
            case "gone":
                path.unlink()
            case "folder":
                path.unlink()
                path.mkdir()
            case "flipped":
                data = bytearray(path.read_bytes())
                data[random.randrange(4_300, len(data))] ^= 1  # behind the first header
                path.write_bytes(data)
    if how == "swapped":
        first, second = files[0], files[1]
        aside = folder / "aside"
        first.rename(aside)
        second.rename(first)
        aside.rename(second)


DAMAGES = ["truncated", "longer", "garbage", "empty", "gone", "folder", "flipped", "swapped"]


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_segments_are_misses_and_are_written_again(tmp_path, how):
    folder = tmp_path / "shared"
    one, other = ChainedBlocks(65_000), ChainedBlocks(65_000)
    with closing(open_tier(folder)) as tier:
        assert one.save(tier, range(6)) == other.save(tier, range(6)) == [Outcome.OK] * 6
        damage(folder, how)
        for blocks in (one, other):
            load_verified(tier, blocks, range(6))
            outcomes = tier.read(blocks.gets(range(6)))
            assert set(outcomes) <= {Outcome.OK, Outcome.MISS, Outcome.GONE}
        until(lambda: one.save(tier, range(6)) == [Outcome.OK] * 6)
        until(lambda: load_verified(tier, one, range(6)) == 6)


@pytest.mark.parametrize("restarts", [False, True])
def test_an_earlier_segment_under_a_live_name_is_a_miss(tmp_path, restarts):
    """A snapshot of the folder, or a client's cache, has valid records of other blocks there."""
    folder, earlier, live = tmp_path / "shared", ChainedBlocks(65_000), ChainedBlocks(65_000)
    with closing(open_tier(folder, **PATIENT)) as tier:
        assert earlier.save(tier, range(6)) == [Outcome.OK] * 6
        [old] = segments(folder)
        assert live.save(tier, range(6)) == [Outcome.OK] * 6
        [new] = set(segments(folder)) - {old}
        assert new.stat().st_size == old.stat().st_size
        new.write_bytes(old.read_bytes())
        if not restarts:
            assert live.load(tier, range(6)) == [Outcome.MISS] * 6
    with closing(open_tier(folder, **PATIENT)) as tier:
        until(lambda: tier.held(live.namespace, live.keys(6), 0) == 6)
        assert live.load(tier, range(6)) == [Outcome.MISS] * 6
        assert tier.held(live.namespace, live.keys(6), 0) == 0
        assert earlier.load(tier, range(6)) == [Outcome.OK] * 6
        until(lambda: live.save(tier, range(6)) == [Outcome.OK] * 6)
        assert live.load(tier, range(6)) == [Outcome.OK] * 6


def test_garbage_among_the_index_files_is_ignored(tmp_path):
    folder, blocks = tmp_path / "shared", ChainedBlocks(65_000)
    with closing(open_tier(folder)) as tier:
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
    [index] = {path.parent for path in (folder / "index").rglob("*") if path.is_file()}
    names = sorted(path.name for path in index.iterdir())
    (index / names[0]).with_name("0" * len(names[0])).write_bytes(os.urandom(5_000))
    (index / "no-number").write_bytes(b"x")
    (index / ".tmp-half").write_bytes(b"x")
    with closing(open_tier(folder)) as tier:
        until(lambda: tier.held(blocks.namespace, blocks.keys(4), 0) == 4)
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4


def test_a_full_file_system_refuses_saves_and_serves_loads(small_folder):
    blocks = ChainedBlocks(MIB)
    with closing(open_tier(small_folder / "shared", write_s=3.0)) as tier:
        outcomes = [blocks.save(tier, [number])[0] for number in range(10)]
        held = outcomes.index(Outcome.FULL)
        assert held >= 4
        assert outcomes[:held] == [Outcome.OK] * held
        assert blocks.load(tier, range(held)) == [Outcome.OK] * held
        assert tier.reachable()
        assert "ENOSPC" in tier.usage().writes_stopped


def test_doctor_names_the_mount_and_what_the_file_system_does(tmp_path):
    findings = list(examine_files(options(tmp_path / "shared"), CONTEXT))
    assert findings[0].found == f"files in {tmp_path / 'shared'}"
    assert findings[0].ok
    assert [each.what for each in findings if each.warning] == ["tiers.1 mount"]  # it is local
    [absent] = examine_files(options(tmp_path / "none" / "shared"), CONTEXT)
    assert absent.ok is False
    assert "is it mounted?" in absent.why
    [other] = examine_files(options(tmp_path / "shared", filesystem="nfs4"), CONTEXT)
    assert "not nfs4: is it mounted?" in other.why


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"capacity": Size(MIB)}, r"tiers\.1\.capacity: 1 MiB is less than 256 MiB; raise it"),
        ({"deadline_s": 0.0}, r"tiers\.1\.deadline_s: 0 s is not above 0"),
        ({"write_s": 601.0}, r"tiers\.1\.write_s: 601 s is not above 0 and at most 600 s"),
        ({"poll_s": 0.5}, r"tiers\.1\.poll_s: 0\.5 s is less than 1 s"),
    ],
)
def test_values_out_of_range_are_refused_with_the_limit(given, text):
    with pytest.raises(ConfigError, match=text):
        options("/mnt/shared", **given)
    with pytest.raises(ConfigError, match=r"tiers\.1\.path: 'mnt' is no absolute path"):
        options("mnt")
