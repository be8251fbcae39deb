"""Read and write extents of one preallocated, locked file; direct I/O where it is to be had."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.buffers import ALIGNMENT, align_up, aligned_buffer
from holdfast.errors import BusyError, ConfigError
from holdfast.failpoints import reach
from holdfast.limits import GIB, KIB, MIB

CALL_BYTES_MIN = 512 * KIB
CALL_BYTES_MAX = 4 * MIB
"""Neighbours are joined and long records split to between these: few, large system calls, and
still two for every thread where there are several and a batch has enough."""

VECTORS_MAX = 512
"""Most buffers in one system call; Linux allows 1,024."""

_log = logging.getLogger(__name__)


class Extents(Protocol):
    """A row of bytes on a medium. Offsets and lengths are multiples of 4 KiB; any thread may call.

    `size` is its length in bytes. `direct` says whether reads and writes pass by the page cache,
    `why` says it in words.
    """

    size: int
    direct: bool
    why: str

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all the views from `offset` on; raise OSError if that fails or ends early."""
        ...

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all the views from `offset` on; raise OSError if that fails or ends early."""
        ...

    def flush(self) -> None:
        """Make what was written survive a power cut; raise OSError."""
        ...

    def close(self) -> None:
        """Let go of the medium."""
        ...


class Span(NamedTuple):
    """One buffer and its offset on the medium; `owner` is the caller's number for it."""

    offset: int
    view: memoryview
    owner: int


class Piece(NamedTuple):
    """Neighbouring spans that one system call covers."""

    offset: int
    spans: list[Span]


class FileExtents:
    """A file opened for direct I/O, or through the page cache where the file system refuses.

    Owns the descriptor of the lock from here on, and lets it go last. Raises OSError.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self._fd, self.direct, self.why = _open(path)
        self._lock_fd = lock_fd
        self.size = os.fstat(self._fd).st_size
        if not self.direct:
            _log.warning("disk tier %s works through the page cache: %s", path, self.why)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        _whole(self._aligned(os.preadv, offset, views), views)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        reach("extent_write")
        _whole(self._aligned(os.pwritev, offset, views), views)

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._lock_fd)

    def _aligned(
        self, call: Callable[[int, Sequence[memoryview], int], int], offset: int,
        views: Sequence[memoryview],
    ) -> int:  # fmt: skip
        """Call with the views themselves; through aligned memory if the device refuses them."""
        try:
            return call(self._fd, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        bounce = aligned_buffer(sum(len(view) for view in views))
        if call is os.pwritev:
            at = 0
            for view in views:
                bounce[at : at + len(view)] = view
                at += len(view)
            return call(self._fd, [bounce], offset)
        done = call(self._fd, [bounce], offset)
        at = 0
        for view in views:
            view[:] = bounce[at : at + len(view)]
            at += len(view)
        return done


def call_bytes_for(total: int, threads: int) -> int:
    """Return how much of `total` bytes one system call should move: equal parts, no scrap."""
    parts = min(max(total // CALL_BYTES_MIN, 1), 2 * threads) if threads > 1 else 1
    return min(max(align_up(-(-total // parts)), CALL_BYTES_MIN), CALL_BYTES_MAX)


def pieces(spans: Sequence[Span], call_bytes: int) -> list[Piece]:
    """Join neighbours and split long spans, so that each piece has at most `call_bytes`."""
    joined: list[Piece] = []
    end, room = -1, 0
    for offset, view, owner in sorted(spans, key=lambda span: span.offset):
        for start in range(0, len(view), call_bytes):
            part = Span(offset + start, view[start : start + call_bytes], owner)
            size = len(part.view)
            if part.offset != end or size > room or len(joined[-1].spans) == VECTORS_MAX:
                joined.append(Piece(part.offset, []))
                room = call_bytes
            joined[-1].spans.append(part)
            room -= size
            end = part.offset + size
    return joined


def spread(
    pool: ThreadPoolExecutor, threads: int, spans: Sequence[Span],
    do: Callable[[int, Sequence[memoryview]], None],
) -> dict[int, OSError]:  # fmt: skip
    """Do all spans, on this thread and `threads - 1` of the pool; return what failed, by owner.

    A joined piece that fails is done again span by span: one bad sector fails one record.
    """
    total = sum(len(span.view) for span in spans)
    work = pieces(spans, call_bytes_for(total, threads))
    failed: dict[int, OSError] = {}
    queue = iter(work)
    others: list[Future[None]] = []

    def drain() -> None:
        # Taking the next of a shared list iterator is atomic under the interpreter's lock.
        for piece in queue:
            _do(piece, do, failed)

    try:
        others += (pool.submit(drain) for _ in range(min(threads, len(work)) - 1))
        drain()
    finally:
        # Threads busy with other batches have not begun on this one: there is nothing left for
        # them, so don't wait. Those that have begun still use the caller's buffers.
        wait([other for other in others if not other.cancel()])
    for other in others:
        if not other.cancelled():
            other.result()
    return failed


def _do(
    piece: Piece, do: Callable[[int, Sequence[memoryview]], None], failed: dict[int, OSError]
) -> None:
    try:
        do(piece.offset, [span.view for span in piece.spans])
        return
    except OSError as error:
        if len(piece.spans) == 1:
            failed[piece.spans[0].owner] = error
            return
    for span in piece.spans:
        _do(Piece(span.offset, [span]), do, failed)


def lock_folder(folder: Path) -> int:
    """Make `folder` this process's own; return the descriptor that holds the lock.

    The lock goes with the process, however it ends. Raises BusyError or ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f'disk tier "{folder}": {error.strerror}; give it a folder this user may write to'
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise ConfigError(
                f'disk tier "{folder}" can not be locked: {error.strerror}; give it a folder on a '
                "local file system"
            ) from error
        raise BusyError(
            f'disk tier "{folder}" is in use by process {holder}; '
            "stop that, or give this node another folder"
        ) from error
    with contextlib.suppress(OSError):  # on a full disk whoever comes next is not told our number
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def preallocate(path: Path, nbytes: int, setting: str, first: bytes) -> None:
    """Create `path` with all its blocks, `first` at its start, or not at all; raise ConfigError.

    `setting` is the tier's key path in the configuration. The file appears whole: it is
    made under another name, flushed and renamed.
    """
    made = path.with_name(path.name + ".new")
    made.unlink(missing_ok=True)
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    if nbytes > free:
        raise _too_large(path, nbytes, free, setting)
    fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, first, 0)
        os.fsync(fd)
        made.rename(path)
    except OSError as error:
        made.unlink(missing_ok=True)
        if error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
            raise _too_large(path, nbytes, free, setting) from error
        raise ConfigError(f'disk tier "{path.parent}": {error.strerror}') from error
    finally:
        os.close(fd)


def _too_large(path: Path, asked: int, free: int, setting: str) -> ConfigError:
    return ConfigError(
        f'{setting}.capacity: disk tier "{path.parent}": {asked / GIB:.2f} GiB asked, '
        f"{free / GIB:.2f} GiB free; lower it"
    )


def _open(path: Path) -> tuple[int, bool, str]:
    """Return descriptor, whether I/O is direct, and why; one sector is read to be sure.

    A sector that can not be read says nothing of direct I/O: there are two superblocks.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR), False, f"direct I/O refused: {error.strerror}"
    try:
        os.preadv(fd, [aligned_buffer(ALIGNMENT)], 0)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            return fd, True, "direct I/O"
        os.close(fd)
        return os.open(path, os.O_RDWR), False, f"direct read refused: {error.strerror}"
    return fd, True, "direct I/O"


def _whole(done: int, views: Sequence[memoryview]) -> None:
    asked = sum(len(view) for view in views)
    if done != asked:
        raise OSError(errno.EIO, f"{done} of {asked} bytes")
