"""Files of a shared folder: descriptors of an earlier mount, temporary files that lost a writer."""

import errno
import os
import stat

import pytest

from holdfast.tiers.files import shared_folder as module
from holdfast.tiers.files.shared_folder import (
    DRAFT_AGE_S,
    FolderDraft,
    FolderReader,
    SharedFolder,
)


@pytest.fixture
def folder(tmp_path):
    return SharedFolder(str(tmp_path / "shared"), "", "ab12")


def publish(folder, name, data=b"bytes"):
    draft = FolderDraft(folder)
    draft.write(name, 0, memoryview(data))
    draft.publish(name)


def read(folder, name):
    into = memoryview(bytearray(5))
    return bytes(into[: FolderReader(folder).read(name, 0, into)])


def fail_reads(monkeypatch, number, times):
    """Let the next reads of files fail with an error; return the errors that are left."""
    left, real = [number] * times, os.preadv

    def preadv(*arguments):
        if left:
            raise OSError(left.pop(), "injected")
        return real(*arguments)

    monkeypatch.setattr(module.os, "preadv", preadv)
    return left


@pytest.mark.parametrize("number", sorted(module.REOPEN))
def test_a_stale_descriptor_is_opened_again_once(folder, monkeypatch, number):
    publish(folder, "a/1")
    fail_reads(monkeypatch, number, 1)
    assert read(folder, "a/1") == b"bytes"
    fail_reads(monkeypatch, number, 2)
    with pytest.raises(OSError, match="injected"):
        read(folder, "a/1")


def test_another_error_is_not_tried_again(folder, monkeypatch):
    publish(folder, "a/1")
    left = fail_reads(monkeypatch, errno.EACCES, 2)
    with pytest.raises(PermissionError):
        read(folder, "a/1")
    assert left == [errno.EACCES]


def test_no_file_stays_open_after_the_last_range(folder):
    publish(folder, "a/1")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # no folder of a test
    reader = FolderReader(folder)
    into = memoryview(bytearray(2))
    assert reader.read("a/1", 0, into, 3) == 2
    assert len(os.listdir("/proc/self/fd")) == before + 1  # noqa: PTH208
    assert reader.read("a/1", 4, into, 1) == 1  # short: it ends here
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_no_absent_name_is_asked_for(folder, monkeypatch):
    """NFS remembers for a minute that a name did not exist."""
    publish(folder, "index/ab/1")
    asked = []
    for name in ("stat", "open", "scandir"):
        real = getattr(os, name)

        def spy(path, *arguments, real=real, **options):
            try:
                return real(path, *arguments, **options)
            except FileNotFoundError:
                asked.append(path)
                raise

        monkeypatch.setattr(module.os, name, spy)
    assert folder.list_names("none") == []
    assert folder.list_names("index/none/0") == []
    publish(folder, "7d/new/1")
    assert folder.list_names("7d") == ["7d/new/1"]
    assert asked == []


def test_a_temporary_file_that_lost_its_writer_is_deleted_after_a_while(folder, monkeypatch):
    publish(folder, "a/1")
    draft = FolderDraft(folder)
    draft.write("a/2", 0, memoryview(b"half"))
    left = [path for path in os.listdir(f"{folder.path}/a") if path.startswith(".tmp")]  # noqa: PTH208
    assert len(left) == 1
    now_s = module.time.monotonic()
    for passed_s, remain in ((0, 1), (DRAFT_AGE_S - 1, 1), (DRAFT_AGE_S + 1, 0)):
        monkeypatch.setattr(module.time, "monotonic", lambda s=passed_s: now_s + s)
        assert folder.list_names("") == ["a/1"]
        found = os.listdir(f"{folder.path}/a")  # noqa: PTH208
        assert sum(name.startswith(".tmp") for name in found) == remain


def test_the_age_of_a_temporary_file_starts_anew_if_a_listing_lacks_it(folder, monkeypatch):
    publish(folder, "a/1")
    other, now_s = f"{folder.path}/a/.tmp-of-another-process", module.time.monotonic()
    for passed_s, is_there in ((0, True), (10, False), (DRAFT_AGE_S + 1, True)):
        monkeypatch.setattr(module.time, "monotonic", lambda s=passed_s: now_s + s)
        if is_there:
            module.write_whole(other, b"half")
        else:
            os.unlink(other)  # noqa: PTH108
        assert folder.list_names("7d") == []
        assert folder.list_names("") == ["a/1"]
        assert os.path.exists(other) == is_there  # noqa: PTH110


def test_a_write_that_fails_leaves_no_temporary_file(folder, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "injected")

    publish(folder, "a/1")
    monkeypatch.setattr(module.os, "fsync", fail)  # where NFS says that there is no room
    with pytest.raises(OSError, match="injected"):
        publish(folder, "a/2")
    assert os.listdir(f"{folder.path}/a") == ["1"]  # noqa: PTH208


def fail_folder_flush(monkeypatch):
    """Let the next flush of a folder fail."""
    left, real = [errno.EIO], os.fsync

    def fsync(fd):
        if left and stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(left.pop(), "injected")
        real(fd)

    monkeypatch.setattr(module.os, "fsync", fsync)


def flushed_folders(monkeypatch):
    """Return the folders that are flushed from now on."""
    found, real = [], os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        real(fd)

    monkeypatch.setattr(module.os, "fsync", fsync)
    return found


def test_a_name_whose_folder_could_not_be_flushed_is_not_found(folder, monkeypatch):
    publish(folder, "a/1")
    fail_folder_flush(monkeypatch)
    with pytest.raises(OSError, match="injected"):
        publish(folder, "a/2")
    assert folder.list_names("") == ["a/1"]


def test_a_folder_whose_entry_could_not_be_flushed_is_made_again(folder, monkeypatch):
    publish(folder, "a/1")
    fail_folder_flush(monkeypatch)
    with pytest.raises(OSError, match="injected"):
        publish(folder, "b/1")
    assert "b" not in os.listdir(folder.path)  # noqa: PTH208
    flushed = flushed_folders(monkeypatch)
    publish(folder, "b/1")
    assert folder.path in flushed


def test_the_entry_of_a_folder_that_another_process_made_is_flushed_too(folder, monkeypatch):
    publish(folder, "a/1")
    os.mkdir(f"{folder.path}/b")  # noqa: PTH102  # its maker may crash before it flushes
    flushed = flushed_folders(monkeypatch)
    publish(folder, "b/1")
    publish(folder, "b/2")
    assert flushed.count(folder.path) == 1


def test_the_entry_of_a_new_root_is_flushed(folder, monkeypatch, tmp_path):
    flushed = flushed_folders(monkeypatch)
    publish(folder, "a/1")
    assert str(tmp_path) in flushed
