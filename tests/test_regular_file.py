"""Small files are read whole or not at all, and replaced whole or not at all."""

import errno
import fcntl
import os
import resource
import socket
import stat
from pathlib import Path

import pytest

from holdfast.regular_file import (
    check_regular,
    make_folder,
    open_regular,
    read_regular,
    remove_file,
    replace_file,
    replacing,
)


def test_a_path_that_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        (tmp_path / "link").symlink_to("fifo")
        for path, kind in (
            (tmp_path / "fifo", "a FIFO"),
            (tmp_path / "link", "a FIFO"),
            (tmp_path / "socket", "a socket"),
            (tmp_path, "a directory"),
            (Path("/dev/null"), "a character device"),
            (Path("a\0b"), "not a path"),
            (Path("\ud800"), "not a path"),
        ):
            for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
                with pytest.raises(OSError, match=f"not a regular file, but {kind}|not a path"):
                    open_regular(path, flags)
            with pytest.raises(OSError, match=kind):
                check_regular(path)


def test_a_file_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    assert read_regular(tmp_path / "file", 4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes") as caught:
        read_regular(tmp_path / "file", 3)
    assert caught.value.errno == errno.EFBIG


def test_a_replaced_file_is_private_and_no_temporary_file_is_left(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o644)
    (tmp_path / ".file.new-left").write_bytes(b"by a process that crashed")
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_concurrent_replacements_of_a_file_do_not_mix(tmp_path):
    file = tmp_path / "file[1]"
    with replacing(file) as fd:
        os.write(fd, b"the slow ")
        replace_file(file, b"the quick one")
        assert file.read_bytes() == b"the quick one"
        os.write(fd, b"one")
    assert file.read_bytes() == b"the slow one"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    """Another process may take a new file for one that a crash has left."""
    file, removed = tmp_path / "file", []
    flock = fcntl.flock

    def remove_first(fd, operation):
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file] != removed


def test_replace_file_flushes_the_file_and_its_folder(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def flush(fd):
        flushed.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flush)
    replace_file(tmp_path / "file", b"new")
    assert flushed == [False, True]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_files_are_replaced_and_removed_where_a_folder_cannot_be_flushed(
    tmp_path, monkeypatch, code
):
    file, fsync = tmp_path / "new" / "file", os.fsync

    def flush(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flush)
    make_folder(file.parent)
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
    remove_file(file)
    assert not file.exists()


def test_a_failed_flush_of_a_folder_is_an_error(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        remove_file(tmp_path / "file")


def test_a_file_is_removed_if_its_folder_is_gone(tmp_path):
    remove_file(tmp_path / "gone" / "file")


def test_make_folder_flushes_the_parent_of_each_new_folder(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def flush(fd):
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flush)
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert flushed == [str(tmp_path), str(tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(flushed) == 2


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path):
    file = tmp_path / "file"
    replace_file(file, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(file, b"longer than the limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_flushed_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "file"
    replace_file(file, b"old")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
