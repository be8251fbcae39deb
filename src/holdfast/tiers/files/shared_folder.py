"""File operations on a folder that several hosts mount, safe where they see it at different times.

A file is written under a temporary name, flushed, closed, renamed, and its folder flushed: a name
is written once, and what has a name is whole. No question names a file that may be absent, because
a client of NFS remembers for a minute that a name did not exist: folders are found in the listing
of their parent. No locks, no exclusive creation, no time stamps, no `mmap`: file systems differ in
them, or hang in them.

Every call may block without limit. Errors are OSError.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator

from holdfast.regular_file import flush_folder
from holdfast.tiers.files.mount import find_mount

MARKER = "holdfast.tier"
"""File in the root, the same on every host: a folder without it is not the shared one."""

_MARKER_TEXT = b"This folder belongs to tiers of kind `files` of Holdfast; see its documentation.\n"

_PART = re.compile(r"[0-9a-z-]{1,64}")
"""Names of files and folders that a tier writes; others are not its own, and are ignored."""

_DRAFT = ".tmp-"
"""Start of the names of temporary files."""

DRAFT_AGE_S = 3600.0
"""A temporary file that is seen again after this time has lost its writer, and is deleted."""

REOPEN = frozenset(
    {errno.ESTALE, errno.EBADF, errno.ENOTCONN, errno.ETIMEDOUT, errno.EIO, errno.EREMOTEIO}
)
"""Errors after which a file is opened again, once: its descriptor may be of an earlier mount."""

_NO_FOLDER = "this is a file, not a folder; name another path"
_FOLDER_DEPTH_MAX = 8
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class SharedFolder:
    """A root folder on a shared file system. Thread-safe; a reader or draft is of one thread.

    Before each use, the root is compared with the one of the first use: a mount point without its
    file system looks like an empty folder, and must not be filled.
    """

    def __init__(self, path: str, filesystem: str, process: str) -> None:
        self.path = path
        self._filesystem = filesystem
        self._process = process
        self._draft_numbers = itertools.count()
        self._root: tuple[int, int] | None = None
        self._folders: set[str] = set()
        """Folders that exist, because this process made them or wrote a file there."""
        self._drafts_seen_s: dict[str, float] = {}
        """By path: when a temporary file that the last listing has was seen first."""

    def check_root(self) -> None:
        """Raise OSError unless the root is the folder of the first call, or one like it.

        The first call makes the root if its parent exists, and marks it.
        """
        try:
            found = self._find_root()
        except FileNotFoundError as error:
            raise OSError(errno.ENODEV, "no such folder: is it mounted?", self.path) from error
        identity = found.st_dev, found.st_ino
        if identity == self._root:
            return
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, _NO_FOLDER, self.path)
        self._check_filesystem()
        if MARKER not in os.listdir(self.path):  # noqa: PTH208
            if self._root is not None:
                raise OSError(
                    errno.ENODEV, "not the folder that was opened: is it mounted?", self.path
                )
            self._mark_root()
        self._root = identity
        self._folders.clear()

    def existing_root(self) -> str:
        """Return the root; before it was made the folder in which `check_root` makes it.

        Changes nothing. Raises OSError if neither exists, or on another type of file system.
        """
        self._check_filesystem()
        if os.path.isdir(self.path):  # noqa: PTH112
            return self.path
        parent = os.path.dirname(self.path.rstrip("/"))  # noqa: PTH120
        for found in (self.path, parent):
            if os.path.exists(found) and not os.path.isdir(found):  # noqa: PTH110, PTH112
                raise NotADirectoryError(errno.ENOTDIR, _NO_FOLDER, found)
        if os.path.lexists(self.path) or not os.path.isdir(parent):  # noqa: PTH112
            raise OSError(errno.ENODEV, "no such folder: is it mounted?", self.path)
        return parent

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of all files below a folder, sorted; an absent folder is empty.

        Also deletes temporary files that have lost their writer.
        """
        self.check_root()
        path, parts = self.path, prefix.split("/") if prefix else []
        for part in parts:
            if part not in _entries(path):
                return []
            path = f"{path}/{part}"
        drafts: set[str] = set()
        names = sorted(self._names_below(path, prefix, _FOLDER_DEPTH_MAX - len(parts), drafts))
        for draft in list(self._drafts_seen_s):
            if draft.startswith(f"{path}/") and draft not in drafts:
                self._drafts_seen_s.pop(draft, None)
        return names

    def delete(self, name: str) -> None:
        """Delete a file; it may be deleted already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")  # noqa: PTH108

    def draft_path(self, name: str) -> str:
        """Return the path of a new temporary file beside the file to be, and make its folder."""
        self.check_root()
        folder = name.rpartition("/")[0]
        self._make_folder(folder)
        draft = self._draft_name()
        return "/".join(filter(None, (self.path, folder, draft)))

    def publish(self, draft: str, name: str) -> None:
        """Rename a flushed and closed temporary file, and flush its folder.

        If the flush fails, the name is removed: it could be found here, and be gone after a crash.
        """
        path = f"{self.path}/{name}"
        os.rename(draft, path)  # noqa: PTH104
        try:
            flush_folder(path.rpartition("/")[0])
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            raise

    def _draft_name(self) -> str:
        return f"{_DRAFT}{self._process}-{next(self._draft_numbers)}"

    def _names_below(self, path: str, prefix: str, depth: int, drafts: set[str]) -> Iterator[str]:
        """Yield the names of files; temporary files are added to `drafts`."""
        for entry in _entries(path).values():
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.name.startswith(_DRAFT):
                drafts.add(entry.path)
                self._see_draft(entry.path)
            elif not _PART.fullmatch(entry.name):
                continue
            elif entry.is_dir(follow_symlinks=False):
                if depth > 1:
                    yield from self._names_below(entry.path, name, depth - 1, drafts)
            elif entry.is_file(follow_symlinks=False):
                yield name

    def _see_draft(self, path: str) -> None:
        """Delete a temporary file that this process has seen for `DRAFT_AGE_S`."""
        now_s = time.monotonic()
        if now_s - self._drafts_seen_s.setdefault(path, now_s) >= DRAFT_AGE_S:
            self._drafts_seen_s.pop(path, None)
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    def _make_folder(self, folder: str) -> None:
        """Make a folder below the root, and its parents, if this process has not used it."""
        if not folder or folder in self._folders:
            return
        self._make_folder(folder.rpartition("/")[0])
        make_flushed_folder(f"{self.path}/{folder}")
        self._folders.add(folder)

    def _find_root(self) -> os.stat_result:
        try:
            return os.stat(self.path)  # noqa: PTH116  # one call, no object
        except FileNotFoundError:
            if self._root is not None:
                raise
            self._check_filesystem()
            make_flushed_folder(self.path.rstrip("/"))
            return os.stat(self.path)  # noqa: PTH116

    def _check_filesystem(self) -> None:
        """Raise OSError if the root lies on a file system of another type than it must."""
        mount = find_mount(os.path.abspath(self.path))  # noqa: PTH100  # resolves no link
        if self._filesystem and mount.filesystem != self._filesystem:
            raise OSError(
                errno.ENODEV,
                f"on {mount.filesystem}, not {self._filesystem}: is it mounted?",
                self.path,
            )

    def _mark_root(self) -> None:
        """Write the marker. Several hosts may do so at once: the file is the same."""
        draft = f"{self.path}/{self._draft_name()}"
        write_whole(draft, _MARKER_TEXT)
        os.rename(draft, f"{self.path}/{MARKER}")  # noqa: PTH104
        flush_folder(self.path)


class FolderReader:
    """Reads ranges of one file at a time; the file is open only until the last range of a call."""

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._name = ""
        self._fd = -1

    def read(self, name: str, start: int, into: memoryview, ahead: int = 0) -> int:
        """Return the number of bytes read, fewer than `into` has at the end of the file.

        `ahead`: bytes behind these that the next calls read; the file stays open for them. Raises
        FileNotFoundError only if the root is as it was, without this file.
        """
        if name != self._name:
            self.close()
        try:
            try:
                nbytes = self._read(name, start, into, ahead)
            except OSError as error:
                if error.errno not in REOPEN:
                    raise
                self.close()
                nbytes = self._read(name, start, into, ahead)
        except OSError as error:
            self.close()
            if error.errno == errno.ENOENT:
                self._folder.check_root()
            raise
        if not ahead or nbytes < len(into):
            self.close()
        return nbytes

    def close(self) -> None:
        """Close the file, if one is open."""
        fd, self._fd, self._name = self._fd, -1, ""
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _read(self, name: str, start: int, into: memoryview, ahead: int) -> int:
        if self._fd < 0:
            self._fd, self._name = os.open(f"{self._folder.path}/{name}", _READ_FLAGS), name
            # A server gets requests for all of the range at once, not for the first part of it.
            os.posix_fadvise(self._fd, start, len(into) + ahead, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(into):
            moved = os.preadv(self._fd, [into[done:]], start + done)
            if not moved:
                break
            done += moved
        return done


class FolderDraft:
    """Writes one file at a time: its bytes under a temporary name, then the name."""

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._path = ""
        self._fd = -1

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Write bytes of a file; `start` 0 begins a new one. After an error nothing is left."""
        if start == 0:
            self.discard()
            self._path = self._folder.draft_path(name)
            try:
                self._fd = os.open(self._path, _WRITE_FLAGS, 0o644)
            except OSError:
                self._path = ""
                raise
        if self._fd < 0:
            raise OSError(errno.EBADF, "an earlier part of the file was not written", name)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], start + done)
        except OSError:
            self.discard()
            raise

    def publish(self, name: str) -> None:
        """Flush, close and rename the file. After an error nothing is left."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "an earlier part of the file was not written", name)
        try:
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)  # NFS reports here what fsync did not
            self._folder.publish(self._path, name)
            self._path = ""
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Delete the temporary file, if there is one."""
        fd, self._fd = self._fd, -1
        path, self._path = self._path, ""
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108


def _entries(path: str) -> dict[str, os.DirEntry[str]]:
    """Return the entries of a folder by name; a folder that was removed meanwhile has none."""
    try:
        with os.scandir(path) as entries:
            return {entry.name: entry for entry in entries}
    except FileNotFoundError:
        return {}


def write_whole(path: str, data: bytes) -> None:
    """Write and flush a small file under its own name."""
    fd = os.open(path, _WRITE_FLAGS | os.O_TRUNC, 0o644)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def make_flushed_folder(path: str) -> None:
    """Make a folder and flush its entry in its parent, also if another process has just made it.

    A folder whose entry cannot be flushed is removed: a later flush might not tell.
    """
    is_new = True
    try:
        os.mkdir(path)  # noqa: PTH102
    except FileExistsError:
        is_new = False
    try:
        flush_folder(path.rpartition("/")[0] or "/")
    except OSError:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(path)  # noqa: PTH106
        raise
