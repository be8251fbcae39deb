"""Pages in host memory: one batched copy inside this process for a whole plan.

`process_vm_readv` on our own process takes two lists of ranges and copies between them, with the
GIL released once for up to 1,024 ranges. With a busy Python thread beside, this moves gigabytes
per second where a call per page moves hundredths of one. Two threads share a plan, the caller's and
one of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.devices.base import Memory, Move, Pages, rows
from holdfast.limits import GIB, MIB
from holdfast.workers import workers

RANGES_MAX = 1023
"""Most ranges of one call, on either side: the kernel takes 1,024, and one may be a flag."""

BYTES_MAX = GIB
"""Most bytes of one call; the kernel stops short of 2 GiB without an error."""

SPLIT_BYTES_MIN = 1 * MIB
OWN_SHARE = 0.65
"""The caller's part of a plan that is split: beside a busy thread the helper starts late. On two
cores 0.5 moved 9.4 GB/s alone and 3.4 busy, 0.65 moved 7.5 and 3.4, 0.8 moved 6.1 and 3.7."""
"""A smaller plan is not worth a second thread."""

_LOOK_S = 50e-6
_ONE = array("q", [1])
_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """One call: where to write and where to read, as address, length, address, length ...

    Both lists have the same sum of lengths, `nbytes`.
    """

    to: array[int]
    source: array[int]
    nbytes: int


class HostTransfer:
    """A plan: the caller's half has ended, the helper's may still be moving.

    The last range that the helper copies sets a flag, so that its end is seen without waiting
    until the helper has the interpreter back: beside a busy thread that takes another 5 ms.
    """

    def __init__(self, own: bool, rest: Future[bool] | None, flag: array[int]) -> None:  # noqa: FBT001  # a result
        self._own = own
        self._rest = rest
        self._flag = flag

    def done(self) -> bool:
        return self._rest is None or bool(self._flag[0]) or self._rest.done()

    def wait(self) -> bool:
        # The helper's half too, also when ours failed: nothing may be moving afterwards.
        while not self.done():
            time.sleep(_LOOK_S)
        if self._rest is None or self._flag[0]:
            return self._own
        return self._rest.result() and self._own


THREADS = 2
"""Share a copy: the caller's and one more."""


class HostDevice:
    """Pages at fixed addresses of this process. `keep` is held so that they stay mapped."""

    def __init__(self, pages: Pages, keep: Any = None) -> None:
        self.pages = pages
        self._keep = keep
        self._helper = workers(THREADS - 1, "holdfast-copy", run_anywhere)
        self._copy = _copy_batched
        if not _batched_works():
            self._copy = _copy_each
            _log.warning(
                "process_vm_readv is refused here (seccomp?): pages are copied one by one, "
                "many times slower beside a busy thread; allow that system call"
            )

    def mark(self) -> Any:
        """Return None: on a host, what was called before has ended."""
        return None

    def scatter(self, arena: Memory, moves: Sequence[Move], after: Any = None) -> HostTransfer:
        del after
        return self._move(rows(self.pages, arena, moves), moves)

    def gather(self, arena: Memory, moves: Sequence[Move]) -> HostTransfer:
        turned = ((far, near) for near, far in rows(self.pages, arena, moves))
        transfer = self._move(turned, moves)
        transfer.wait()  # the caller may overwrite these pages as soon as we return
        return transfer

    def close(self) -> None:
        self._helper.shutdown(wait=True)

    def _move(self, plan: Iterator[tuple[int, int]], moves: Sequence[Move]) -> HostTransfer:
        size = self.pages.page_bytes
        count = len(self.pages.bases) * sum(len(move.pages) for move in moves)
        middle = count if count * size < SPLIT_BYTES_MIN else int(count * OWN_SHARE)
        mine = pieces(itertools.islice(plan, middle), size)
        others = pieces(plan, size)
        flag = array("q", [0])
        rest = self._helper.submit(self._copy_and_flag, others, flag) if others else None
        try:
            return HostTransfer(self._copy(mine), rest, flag)
        except BaseException:
            HostTransfer(own=False, rest=rest, flag=flag).wait()
            raise

    def _copy_and_flag(self, plan: Sequence[Piece], flag: array[int]) -> bool:
        """Copy, and let the copy of one more number say that everything before it is there."""
        last = plan[-1]
        size = flag.itemsize
        to, source = last.to[:], last.source[:]
        to.extend((flag.buffer_info()[0], size))
        source.extend((_ONE.buffer_info()[0], size))
        return self._copy([*plan[:-1], Piece(to, source, last.nbytes + size)])


def run_anywhere() -> None:
    """Let the calling thread run on every core that a thread of this process may run on.

    An engine on CPUs binds its threads to a core each, and a new one inherits the core of whoever
    starts it: two threads of one core share a copy to no use. Where that is refused (seccomp) it
    stays where it is.
    """
    with contextlib.suppress(OSError):
        cores = os.sched_getaffinity(0)
        for task in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                cores |= os.sched_getaffinity(int(task.name))
        os.sched_setaffinity(0, cores)


def pieces(plan: Iterable[tuple[int, int]], size: int) -> list[Piece]:
    """Turn rows of `size` bytes, (to, source), into calls the kernel takes, neighbours joined."""
    found: list[tuple[list[int], list[int]]] = []
    to: list[int] = []
    source: list[int] = []
    to_end = source_end = rows_left = 0
    for near, far in plan:
        if not rows_left or len(to) == 2 * RANGES_MAX or len(source) == 2 * RANGES_MAX:
            found.append((to := [], source := []))
            to_end = source_end = -1
            rows_left = max(1, BYTES_MAX // size)
        rows_left -= 1
        if near == to_end:
            to[-1] += size
        else:
            to += (near, size)
        if far == source_end:
            source[-1] += size
        else:
            source += (far, size)
        to_end, source_end = near + size, far + size
    return [Piece(array("q", to), array("q", source), sum(to[1::2])) for to, source in found]


_libc = ctypes.CDLL(None, use_errno=True)


def _copy_batched(plan: Sequence[Piece]) -> bool:
    """Copy every piece with one system call; False as soon as one falls short."""
    for piece in plan:
        moved = _call(piece.to, piece.source)
        if moved != piece.nbytes:
            reason = os.strerror(ctypes.get_errno()) if moved < 0 else "cut short"
            _log.error("copied %d of %d bytes: %s", moved, piece.nbytes, reason)
            return False
    return True


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


def _copy_each(plan: Sequence[Piece]) -> bool:
    """Copy range by range; for machines that refuse the batched call."""
    for piece in plan:
        to, source = list(_ranges(piece.to)), list(_ranges(piece.source))
        while to:
            (near, near_bytes), (far, far_bytes) = to.pop(), source.pop()
            size = min(near_bytes, far_bytes)
            ctypes.memmove(near, far, size)
            if near_bytes > size:
                to.append((near + size, near_bytes - size))
            if far_bytes > size:
                source.append((far + size, far_bytes - size))
    return True


def _ranges(flat: array[int]) -> Iterator[tuple[int, int]]:
    """Yield (address, length), the last first."""
    return zip(flat[-2::-2], flat[::-2], strict=True)


def _batched_works() -> bool:
    """Try the call on a few bytes of our own."""
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
