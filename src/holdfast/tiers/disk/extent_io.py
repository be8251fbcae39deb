"""Read and write extents of one preallocated, locked file, with direct I/O if possible."""

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
from holdfast.limits import GIB, MIB
from holdfast.regular_file import make_folder, replacing

CALL_BYTES_MIN = 2 * MIB
CALL_BYTES_MAX = 4 * MIB
"""Bounds of one system call: adjacent records are joined and long records split to this size, for
few, large calls. With several threads, a large enough batch makes two calls per thread. A call of
2 MiB is not split: a drive works on its parts at once, and each further call costs a thread."""

VECTORS_MAX = 512
"""Most buffers in one system call; Linux allows 1,024."""

_log = logging.getLogger(__name__)


class Extents(Protocol):
    """A byte range on a medium. Offsets and lengths are multiples of 4 KiB. Thread-safe.

    `size` is its length in bytes, `direct` whether reads and writes bypass the page cache.
    """

    size: int
    direct: bool

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all views from `offset` on; raise OSError on an error or a short read."""
        ...

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all views from `offset` on; raise OSError on an error or a short write."""
        ...

    def flush(self) -> None:
        """Make earlier writes survive a power cut; raise OSError on failure."""
        ...

    def close(self) -> None:
        """Release the medium."""
        ...


class ByteSpan(NamedTuple):
    """One buffer and its offset on the medium; `owner` is a number that the caller chooses."""

    offset: int
    view: memoryview
    owner: int


class FileExtents:
    """A file opened for direct I/O, or through the page cache if the file system refuses that.

    Takes ownership of the lock's descriptor and closes it last. Raises OSError.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self._fd, refusal = _open(path)
        self.direct = not refusal
        self._lock_fd = lock_fd
        self._opened_in = os.getpid()
        self.size = os.fstat(self._fd).st_size
        if refusal:
            _log.warning("disk tier %s uses the page cache: %s", path, refusal)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        _check_complete(self._aligned(os.preadv, offset, views), views)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        reach("extent_write")
        _check_complete(self._aligned(os.pwritev, offset, views), views)

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def drop_cache(self) -> None:
        """Have reads come from the medium, not from the page cache; best effort.

        After a failed flush the cache may have content that the medium does not have.
        """
        if not self.direct:
            with contextlib.suppress(OSError):  # the next flush fails, too, if this matters
                os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # an error of earlier writes; the descriptor is closed
            os.close(self._fd)
        # A child that was just forked still has the descriptor, and must not keep the folder. A
        # child's own close must not end its parent's lock.
        if os.getpid() == self._opened_in:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        os.close(self._lock_fd)

    def _aligned(
        self, call: Callable[[int, Sequence[memoryview], int], int], offset: int,
        views: Sequence[memoryview],
    ) -> int:  # fmt: skip
        """Transfer the views directly, or through an aligned buffer if the device refuses them."""
        try:
            return call(self._fd, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        bounce = aligned_buffer(sum(len(view) for view in views))
        if call is os.pwritev:
            bounce[:] = b"".join(views)
            return call(self._fd, [bounce], offset)
        done = call(self._fd, [bounce], offset)
        at = 0
        for view in views:
            view[:] = bounce[at : at + len(view)]
            at += len(view)
        return done


def call_bytes_for(total: int, threads: int) -> int:
    """Return the bytes per system call for a batch of `total` bytes, so that calls are equal."""
    parts = min(max(total // CALL_BYTES_MIN, 1), 2 * threads) if threads > 1 else 1
    return min(max(align_up(-(-total // parts)), CALL_BYTES_MIN), CALL_BYTES_MAX)


def pieces(spans: Sequence[ByteSpan], call_bytes: int) -> list[list[ByteSpan]]:
    """Join adjacent spans and split long ones into pieces of at most `call_bytes`.

    One system call transfers a piece.
    """
    joined: list[list[ByteSpan]] = []
    end, room = -1, 0
    for offset, view, owner in sorted(spans, key=lambda span: span.offset):
        for start in range(0, len(view), call_bytes):
            part = ByteSpan(offset + start, view[start : start + call_bytes], owner)
            size = len(part.view)
            if part.offset != end or size > room or len(joined[-1]) == VECTORS_MAX:
                joined.append([])
                room = call_bytes
            joined[-1].append(part)
            room -= size
            end = part.offset + size
    return joined


def transfer(
    pool: ThreadPoolExecutor, threads: int, spans: Sequence[ByteSpan],
    call: Callable[[int, Sequence[memoryview]], None], call_bytes: int = 0,
    helps: Callable[[], bool] = lambda: True,
) -> dict[int, OSError]:  # fmt: skip
    """Read or write all spans with this thread and `threads - 1` of the pool; return the errors.

    A thread makes two calls at least, if there are as many. `call_bytes`: the most bytes of one
    call; by default as `call_bytes_for` says. `helps`: whether threads of the pool go on; each asks
    before a call. Errors are by owner. A joined piece that fails is repeated span by span, so that
    one bad sector fails only one record.
    """
    total = sum(len(span.view) for span in spans)
    work = pieces(spans, call_bytes or call_bytes_for(total, threads))
    threads = min(threads, -(-len(work) // 2))
    failed: dict[int, OSError] = {}
    queue = iter(work)
    workers: list[Future[None]] = []

    def drain() -> None:
        # Taking the next item of a shared list iterator is atomic under the GIL.
        for piece in queue:
            _transfer_piece(piece, call, failed)

    def help_drain() -> None:
        while helps() and (piece := next(queue, None)) is not None:
            _transfer_piece(piece, call, failed)

    try:
        with contextlib.suppress(RuntimeError):  # at interpreter exit pools accept no more work
            workers += (pool.submit(help_drain) for _ in range(threads - 1))
        drain()
    finally:
        # Do not wait for workers that are still busy with other batches: no work is left for them.
        # Wait for those that have started, because they use the caller's buffers.
        wait([worker for worker in workers if not worker.cancel()])
    for worker in workers:
        if not worker.cancelled():
            worker.result()
    return failed


def _transfer_piece(
    piece: list[ByteSpan], call: Callable[[int, Sequence[memoryview]], None],
    failed: dict[int, OSError],
) -> None:  # fmt: skip
    try:
        call(piece[0].offset, [span.view for span in piece])
        return
    except OSError as error:
        if len(piece) == 1:
            failed[piece[0].owner] = error
            return
    for span in piece:
        _transfer_piece([span], call, failed)


def lock_folder(folder: Path) -> int:
    """Create and lock `folder` for this process; return the descriptor that holds the lock.

    The kernel releases the lock when the process ends. Raises BusyError or ConfigError.
    """
    try:
        make_folder(folder)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f'disk tier "{folder}": {error.strerror}; choose a folder that this user may write to'
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise ConfigError(
                f'disk tier "{folder}" cannot be locked: {error.strerror}; choose a folder on a '
                "local file system"
            ) from error
        raise BusyError(
            f'disk tier "{folder}" is in use by process {holder}; '
            "stop that process, or choose another folder for this node"
        ) from error
    with contextlib.suppress(OSError):  # on a full disk the lock works without the process id
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def preallocate(path: Path, nbytes: int, setting: str, first: bytes) -> None:
    """Create `path` with all its disk blocks allocated and `first` at its start, atomically.

    `setting` is the tier's key path in the configuration. Raises ConfigError.
    """
    try:
        path.with_name(f"{path.name}.new").unlink(missing_ok=True)  # left by an earlier version
        with replacing(path) as fd:  # it first removes what a crash has left, which may be as large
            if nbytes > _free_bytes(path.parent):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(fd, 0, nbytes)
            os.pwrite(fd, first, 0)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
            raise ConfigError(f'disk tier "{path.parent}": {error.strerror}') from error
        raise _no_space(path.parent, nbytes, setting) from error


def check_free(folder: Path, nbytes: int, setting: str) -> None:
    """Raise ConfigError if a file of `nbytes` cannot be created in an existing folder."""
    if nbytes > _free_bytes(folder):
        raise _no_space(folder, nbytes, setting)


def _no_space(folder: Path, nbytes: int, setting: str) -> ConfigError:
    return ConfigError(
        f'{setting}.capacity: disk tier "{folder}": {nbytes / GIB:.2f} GiB requested, '
        f"{_free_bytes(folder) / GIB:.2f} GiB free; lower it"
    )


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def _open(path: Path) -> tuple[int, str]:
    """Return the descriptor, and why I/O is not direct, if so; reads one sector as a test.

    An error in this sector is no evidence against direct I/O: there are two superblocks.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR), f"direct I/O refused: {error.strerror}"
    try:
        os.preadv(fd, [aligned_buffer(ALIGNMENT)], 0)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            os.close(fd)
            return os.open(path, os.O_RDWR), f"direct read refused: {error.strerror}"
    return fd, ""


def _check_complete(done: int, views: Sequence[memoryview]) -> None:
    requested = sum(len(view) for view in views)
    if done != requested:
        raise OSError(errno.EIO, f"{done} of {requested} bytes")
