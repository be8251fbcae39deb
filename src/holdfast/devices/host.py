"""A device for pages in host memory: a batched copy inside this process.

`process_vm_readv` on this process copies between two lists of ranges, and releases the GIL once for
up to 1,024 ranges. Beside a busy Python thread it copies gigabytes per second; one call per page
reaches a hundredth of that. Two threads share a batch: the caller's and one of the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from holdfast.buffers import SharedMapping
from holdfast.devices.base import DirectDevice, LockedRanges, Move, Pages, rows
from holdfast.devices.registry import DeviceKind, DeviceOptions
from holdfast.limits import GIB, MIB
from holdfast.workers import workers

RANGES_MAX = 1023
"""Maximum ranges of one call, on either side: the kernel takes 1,024, and one may be a flag."""

BYTES_MAX = GIB
"""Maximum bytes of one call; the kernel copies less than 2 GiB without reporting an error."""

SPLIT_BYTES_MIN = 1 * MIB
"""Size below which a batch is not worth a second thread."""

OWN_SHARE = 0.65
"""The caller's share of a batch that is split. The helper starts late beside a busy thread.

Measured on two cores, idle and beside a busy thread: 0.5 copied 9.4 and 3.4 GB/s, 0.65 copied 7.5
and 3.4, 0.8 copied 6.1 and 3.7.
"""

_LOOK_S = 50e-6
_ONE = array("q", [1])
_log = logging.getLogger(__name__)


Row: TypeAlias = tuple[int, int, int]
"""A copy inside this process: the address to write, the address to read, and the bytes."""


class CopyPart(NamedTuple):
    """The ranges of one system call: addresses and lengths in turn, to write and to read.

    The lengths of either list add up to `nbytes`.
    """

    to: array[int]
    source: array[int]
    nbytes: int


class HostTransfer:
    """A batch whose caller's part has ended, while the helper's may still be in progress.

    The last range that the helper copies sets a flag, so that its end is visible before the helper
    has the GIL again, which takes another 5 ms beside a busy thread.
    """

    def __init__(self, own: bool, rest: Future[bool] | None, flag: array[int]) -> None:  # noqa: FBT001  # a result
        self._own = own
        self._rest = rest
        self._flag = flag

    def done(self) -> bool:
        return self._rest is None or bool(self._flag[0]) or self._rest.done()

    def result(self) -> bool:
        # Wait for the helper also if the caller's part failed: no copy may continue afterwards.
        while not self.done():
            time.sleep(_LOOK_S)
        if self._rest is None or self._flag[0]:
            return self._own
        return self._rest.result() and self._own


THREADS = 2
"""Threads that share a batch: the caller's and the helper."""


class HostDevice:
    """Pages at fixed addresses of this process. Holds a reference to `keep`, their owner."""

    def __init__(self, pages: Pages, keep: Any = None) -> None:
        self.pages = pages
        self._keep = keep
        self._helper = workers(THREADS - 1, "holdfast-copy", run_anywhere)
        self._batched = batched_copy_works()
        if not self._batched:
            warn_of_single_copies()

    @property
    def failure(self) -> str:
        """Always empty: memory of the host does not fail."""
        return ""

    def mark(self) -> Any:
        """Return None: host work is synchronous, so earlier calls have ended."""
        return None

    def scatter(
        self,
        arena: SharedMapping,
        moves: Sequence[Move],
        after: Any = None,
        locks: LockedRanges | None = None,
        proceed: Callable[[], bool] | None = None,
    ) -> HostTransfer:
        del after, locks, proceed
        return self._move(rows(self.pages, arena, moves), moves)

    def gather(
        self, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
    ) -> HostTransfer:
        del locks
        to_arena = ((memory, page, size) for page, memory, size in rows(self.pages, arena, moves))
        transfer = self._move(to_arena, moves)
        transfer.result()  # the caller may overwrite these pages after this call
        return transfer

    def close(self) -> None:
        self._helper.shutdown(wait=True)

    def _move(self, plan: Iterator[Row], moves: Sequence[Move]) -> HostTransfer:
        flag = array("q", [0])
        if not self._batched:
            return HostTransfer(own=_copy_each(plan), rest=None, flag=flag)
        numbers = sum(len(move.pages) for move in moves)
        count = numbers * sum(len(group.bases) for group in self.pages.groups)
        whole = numbers * self.pages.bytes_of_page < SPLIT_BYTES_MIN
        own = pieces(itertools.islice(plan, count if whole else int(count * OWN_SHARE)))
        helpers = pieces(plan)
        rest = self._helper.submit(_copy_and_flag, helpers, flag) if helpers else None
        try:
            return HostTransfer(_copy_batched(own), rest, flag)
        except BaseException:
            HostTransfer(own=False, rest=rest, flag=flag).result()
            raise


def _open(pages: Pages, tensors: Sequence[Any], options: DeviceOptions) -> DirectDevice:
    if options.portable is None:
        return HostDevice(pages, keep=tensors)
    from holdfast.devices.portable_host import open_portable  # it uses this module's copies

    return open_portable(pages, options.portable, tensors)


KIND = DeviceKind(_open, converts=True)


def run_anywhere() -> None:
    """Let the calling thread run on every core that a thread of this process may run on.

    An engine on CPUs binds each thread to a core, and a new thread inherits the binding of the one
    that starts it; two threads on one core copy no faster than one. If the system call is refused
    (seccomp), the binding stays.
    """
    with contextlib.suppress(OSError):
        cores = os.sched_getaffinity(0)
        for task in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                cores |= os.sched_getaffinity(int(task.name))
        os.sched_setaffinity(0, cores)


def pieces(plan: Iterable[Row]) -> list[CopyPart]:
    """Return the system calls for rows, (to, source, bytes), with neighbours merged."""
    found: list[tuple[list[int], list[int]]] = []
    to: list[int] = []
    source: list[int] = []
    to_end = source_end = left = 0
    for to_row, source_row, size in plan:
        if left < size or len(to) == 2 * RANGES_MAX or len(source) == 2 * RANGES_MAX:
            found.append((to := [], source := []))
            to_end = source_end = -1
            left = max(BYTES_MAX, size)
        left -= size
        if to_row == to_end:
            to[-1] += size
        else:
            to += (to_row, size)
        if source_row == source_end:
            source[-1] += size
        else:
            source += (source_row, size)
        to_end, source_end = to_row + size, source_row + size
    return [CopyPart(array("q", to), array("q", source), sum(to[1::2])) for to, source in found]


def copier() -> Callable[[Iterable[Row]], bool]:
    """Return what copies rows with few system calls, or one by one where the kernel refuses these.

    It returns whether every byte was copied.
    """
    if batched_copy_works():
        return lambda plan: _copy_batched(pieces(plan))
    warn_of_single_copies()
    return _copy_each


def warn_of_single_copies() -> None:
    """Log that pages are copied one by one on this machine."""
    _log.warning(
        "process_vm_readv is refused here (seccomp?): pages are copied one by one, "
        "many times slower beside a busy thread; allow this system call"
    )


def _copy_each(plan: Iterable[Row]) -> bool:
    for to, source, size in plan:
        ctypes.memmove(to, source, size)
    return True


_libc = ctypes.CDLL(None, use_errno=True)


def _copy_batched(plan: Sequence[CopyPart]) -> bool:
    """Copy each part with one system call; return False at the first incomplete one."""
    for piece in plan:
        moved = _call(piece.to, piece.source)
        if moved != piece.nbytes:
            reason = os.strerror(ctypes.get_errno()) if moved < 0 else "incomplete"
            _log.error("copied %d of %d bytes: %s", moved, piece.nbytes, reason)
            return False
    return True


def _copy_and_flag(plan: Sequence[CopyPart], flag: array[int]) -> bool:
    """Copy the batch, and then 1 into the flag with the same call, to show that it is done."""
    last = plan[-1]
    size = flag.itemsize
    to, source = last.to[:], last.source[:]
    to.extend((flag.buffer_info()[0], size))
    source.extend((_ONE.buffer_info()[0], size))
    return _copy_batched([*plan[:-1], CopyPart(to, source, last.nbytes + size)])


def _call(to: array[int], source: array[int]) -> int:
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    return int(
        _libc.process_vm_readv(
            os.getpid(),
            pointer(to.buffer_info()[0]), number(len(to) // 2),
            pointer(source.buffer_info()[0]), number(len(source) // 2),
            number(0),
        )
    )  # fmt: skip


def batched_copy_works() -> bool:
    """Return whether a test copy of a few bytes succeeds; if not, `ctypes.get_errno` says why."""
    try:
        _libc.process_vm_readv.restype = ctypes.c_ssize_t
    except AttributeError:
        return False
    source, to = array("q", [1, 2, 3]), array("q", [0, 0, 0])
    size = source.itemsize * len(source)
    moved = _call(
        array("q", [to.buffer_info()[0], size]), array("q", [source.buffer_info()[0], size])
    )
    return moved == size and to == source
