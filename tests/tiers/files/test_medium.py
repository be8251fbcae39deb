"""A shared folder keeps the contract of a segment medium, and its faults are outcomes."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing

import pytest

from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.testing.medium_contract import MediumContract
from holdfast.tiers.files import medium as module
from holdfast.tiers.files.medium import FilesMedium
from holdfast.tiers.files.shared_folder import MARKER
from holdfast.wire.remote.stream import Deadline
from holdfast_bench.harness.pause import pause, resume
from holdfast_bench.peers.shared_mounts import JuiceFs

BYTES = os.urandom(3 * MIB)


class TestFilesMedium(MediumContract):
    def make_medium(self, folder):
        return FilesMedium(str(folder / "shared"))


@pytest.fixture
def medium(tmp_path):
    with closing(FilesMedium(str(tmp_path / "shared"))) as medium:
        yield medium


def put(medium, name, data=BYTES, within_s=60.0):
    return medium.put(name, [memoryview(data)], Deadline.within(within_s)).outcome


def read(medium, name, within_s=60.0):
    """Return the outcome of a read, after a check of what it says was read."""
    into = memoryview(bytearray(len(BYTES)))
    answer = medium.read(name, 0, [into], Deadline.within(within_s))
    assert answer.outcome is not Outcome.OK or bytes(into) == BYTES
    return answer.outcome


def has_been_read(medium, name):
    into = memoryview(bytearray(len(BYTES)))
    answer = medium.read(name, 0, [into], Deadline.within(60.0))
    return answer.outcome is Outcome.OK and bytes(into) == BYTES


def names(medium):
    return list(medium.list("", Deadline.within(60.0)).names)


def drafts(folder):
    return list(folder.rglob(".tmp-*"))


def test_a_full_file_system_stops_writes_but_not_reads(small_folder):
    with closing(FilesMedium(str(small_folder / "shared"))) as medium:
        assert [put(medium, f"a/{n}") for n in range(3)] == [Outcome.OK, Outcome.OK, Outcome.FULL]
        assert drafts(small_folder) == []
        assert names(medium) == ["a/0", "a/1"]
        assert [read(medium, f"a/{n}") for n in range(2)] == [Outcome.OK] * 2
        medium.delete(["a/0"], Deadline.within(60.0))
        assert put(medium, "a/3") is Outcome.OK


def test_a_read_only_file_system_stops_writes_but_not_reads(small_folder):
    with closing(FilesMedium(str(small_folder / "shared"))) as medium:
        assert put(medium, "a/0") is Outcome.OK
        subprocess.run(["mount", "-o", "remount,ro", str(small_folder)], check=True)
        answer = medium.put("a/1", [memoryview(BYTES)], Deadline.within(60.0))
        assert answer.outcome is Outcome.FULL
        assert "EROFS" in answer.why
        assert read(medium, "a/0") is Outcome.OK


def test_a_mount_point_without_its_file_system_is_not_written_to(medium, tmp_path):
    assert put(medium, "a/0") is Outcome.OK
    shared, aside = tmp_path / "shared", tmp_path / "aside"
    shared.rename(aside)
    shared.mkdir()
    assert put(medium, "a/1") is Outcome.GONE
    assert read(medium, "a/0") is Outcome.GONE
    assert medium.list("", Deadline.within(60.0)).outcome is Outcome.GONE
    assert list(shared.iterdir()) == []
    shared.rmdir()
    aside.rename(shared)
    assert read(medium, "a/0") is Outcome.OK
    assert put(medium, "a/1") is Outcome.OK


def test_a_folder_on_another_type_of_file_system_is_not_used(tmp_path):
    with closing(FilesMedium(str(tmp_path / "shared"), "nfs4")) as medium:
        answer = medium.list("", Deadline.within(60.0))
        assert answer.outcome is Outcome.GONE
        assert "not nfs4" in answer.why
        assert not (tmp_path / "shared").exists()


def test_an_absent_folder_is_gone_and_used_once_it_is_there(tmp_path):
    with closing(FilesMedium(str(tmp_path / "mount" / "shared"))) as medium:
        assert put(medium, "a/0") is Outcome.GONE
        assert read(medium, "a/0") is Outcome.GONE
        (tmp_path / "mount").mkdir()
        assert put(medium, "a/0") is Outcome.OK


def test_files_of_others_are_ignored(medium, tmp_path):
    assert put(medium, "a/0") is Outcome.OK
    folder = tmp_path / "shared" / "a"
    (folder / ".tmp-of-another-writer").write_bytes(b"half a file")
    (folder / "Thumbs.db").touch()
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "fifo")
    (folder / ("n" * 70)).touch()
    assert names(medium) == ["a/0"]
    assert read(medium, "a/link") is Outcome.GONE
    assert (tmp_path / "shared" / MARKER).exists()


def test_a_truncated_file_is_read_short(medium, tmp_path):
    assert put(medium, "a/0") is Outcome.OK
    os.truncate(tmp_path / "shared" / "a" / "0", 2 * MIB + 5)
    into = memoryview(bytearray(len(BYTES)))
    answer = medium.read("a/0", 0, [into], Deadline.within(60.0))
    assert answer[:2] == (Outcome.OK, 2 * MIB + 5)


def test_a_process_that_is_killed_in_a_write_leaves_no_name_and_is_replaced(medium, tmp_path):
    assert put(medium, "a/0") is Outcome.OK
    pid = medium.describe()["process"]
    pause(pid)
    assert put(medium, "a/1", within_s=0.5) is Outcome.LATE
    os.killpg(pid, signal.SIGKILL)
    end_s = time.monotonic() + 30
    while put(medium, "a/2") is not Outcome.OK:
        assert time.monotonic() < end_s
    assert names(medium) == ["a/0", "a/2"]
    assert read(medium, "a/0") is Outcome.OK


def test_a_hung_process_is_late_and_works_on_when_it_is_back(medium):
    assert put(medium, "a/0") is Outcome.OK
    pid = medium.describe()["process"]
    pause(pid)
    begun_s = time.monotonic()
    assert read(medium, "a/0", within_s=0.3) is Outcome.LATE
    assert put(medium, "a/1", within_s=0.3) is Outcome.LATE
    assert medium.list("", Deadline.within(0.3)).outcome is Outcome.LATE
    assert time.monotonic() < begun_s + 30
    resume(pid)
    assert read(medium, "a/0") is Outcome.OK
    assert medium.describe()["process"] == pid


def test_a_process_that_hangs_for_long_is_replaced(medium, monkeypatch):
    monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(hung_s=0.5))
    assert put(medium, "a/0") is Outcome.OK
    pid = medium.describe()["process"]
    pause(pid)
    assert read(medium, "a/0", within_s=0.2) is Outcome.LATE
    time.sleep(0.5)
    end_s = time.monotonic() + 30
    while read(medium, "a/0") is not Outcome.OK:
        assert time.monotonic() < end_s
    assert medium.describe()["process"] != pid


@pytest.mark.usefixtures("_juicefs")
def test_a_program_ends_although_the_server_of_its_folder_hangs(tmp_path):
    mounts = JuiceFs(tmp_path / "juicefs")
    with closing(mounts):
        mounts.start()
        program = f"""
            import sys
            from holdfast.tiers.files.medium import FilesMedium
            from holdfast.wire.remote.stream import Deadline
            medium = FilesMedium({str(mounts.paths[0] / "shared")!r})
            print(medium.put("a/0", [memoryview(b"x" * 100)], Deadline.within(60.0)).outcome)
            sys.stdout.flush()
            sys.stdin.readline()
            into = [memoryview(bytearray(100))]
            print(medium.read("a/0", 0, into, Deadline.within(0.5)).outcome)
            print(medium.put("a/1", into, Deadline.within(0.5)).outcome)
            medium.close()
        """
        argv = [sys.executable, "-c", textwrap.dedent(program)]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "ok\n"
            mounts.stall()
            out, _ = running.communicate("go\n", timeout=60)
            assert out.splitlines() == ["late", "late"]
            assert running.returncode == 0
        mounts.wake()


class _OnTwoMounts(MediumContract):
    """The contract on a file system that is mounted twice: media use the mounts in turns."""

    @pytest.fixture(autouse=True)
    def _each(self, mounts, request):
        name = request.node.name.replace("[", "-")[:60]
        self.paths = itertools.cycle(path / name for path in mounts.paths)

    def make_medium(self, folder):
        return FilesMedium(str(next(self.paths)))


class TestFilesMediumOnJuiceFs(_OnTwoMounts):
    @pytest.fixture
    def mounts(self, juicefs):
        return juicefs


class TestFilesMediumOnSeaweedFs(_OnTwoMounts):
    @pytest.fixture
    def mounts(self, seaweedfs):
        return seaweedfs

    def test_another_medium_sees_what_was_put(self, medium, tmp_path):
        """This file system lists a new name, and shows its content, some time later."""
        assert put(medium, "a/1") is Outcome.OK
        with closing(self.make_medium(tmp_path)) as other:
            end_s = time.monotonic() + 30
            while names(other) != ["a/1"] or not has_been_read(other, "a/1"):
                assert time.monotonic() < end_s
