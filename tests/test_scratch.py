"""A folder ends with its owner; one of an owner that was killed goes at the next start."""

import fcntl
import os
import subprocess
import sys
import time

from holdfast.scratch import RUN, scratch_folder

OWNER = """
import sys, time
from pathlib import Path
from holdfast.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1]), "holdfast-run") as folder:
    (folder / "file").write_text("content")
    print(folder, flush=True)
    time.sleep(600)
"""


def owner(parent):
    argv = [sys.executable, "-c", OWNER, str(parent)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_is_private_locked_and_removed_at_the_end(tmp_path):
    with scratch_folder(tmp_path, RUN) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(tmp_path.iterdir()) == [folder]
        other = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            raise AssertionError("it is not locked")
        finally:
            os.close(other)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_owner_is_removed_at_the_next_start(tmp_path):
    process, left = owner(tmp_path)
    end(process)
    assert os.path.exists(left)  # noqa: PTH110
    with scratch_folder(tmp_path, RUN) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_the_folder_of_a_living_owner_stays(tmp_path):
    process, living = owner(tmp_path)
    try:
        with scratch_folder(tmp_path, RUN) as folder:
            assert {str(each) for each in tmp_path.iterdir()} == {living, str(folder)}
    finally:
        end(process)


def test_a_folder_that_is_being_made_stays_and_one_that_was_never_finished_goes(tmp_path):
    young, old = (tmp_path / f".new-{RUN}-{os.geteuid()}-{name}" for name in ("young", "old"))
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    with scratch_folder(tmp_path, RUN):
        assert young.exists()
        assert not old.exists()


def test_folders_of_other_users_and_of_other_names_stay(tmp_path):
    theirs = tmp_path / f"{RUN}-{os.geteuid()}-x"
    theirs.mkdir()
    named = tmp_path / f"{RUN}-of-mine"
    named.mkdir()
    linked = tmp_path / f"{RUN}-{os.geteuid()}-link"
    linked.symlink_to(named)
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
    with scratch_folder(tmp_path, RUN):
        assert theirs.exists() == (os.geteuid() == 0)
        assert named.exists()
        assert linked.is_symlink()
