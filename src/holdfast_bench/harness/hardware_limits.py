"""Hardware limits: the simplest code that moves the same bytes, as the reference for a bench."""

from __future__ import annotations

import errno
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from holdfast.buffers import aligned_buffer
from holdfast.errors import HoldfastError

GB = 1e9
THREADS = 4
SEED = 20_26


class CopyLimit:
    """Memory copy speed: blocks copied in random order from a pool larger than any CPU cache.

    `threads` is the number of threads of the code that it is compared with. The constructor writes
    source and destination once, so that page faults are not measured.
    """

    def __init__(
        self, pool_bytes: int, block_bytes: int, pages_bytes: int, threads: int = 1
    ) -> None:
        self._threads = ThreadPoolExecutor(threads)
        self._thread_count = threads
        self._block_bytes = block_bytes
        self._pool = np.frombuffer(aligned_buffer(pool_bytes), np.uint8)
        self._pages = np.frombuffer(aligned_buffer(pages_bytes), np.uint8)
        self._pool.fill(1)
        self._pages.fill(2)
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret

    def gb_per_s(self, blocks: int) -> float:
        sources = self._offsets(len(self._pool), blocks)
        targets = self._offsets(len(self._pages), blocks)
        moves = list(zip(targets, sources, strict=True))
        shares = [moves[thread :: self._thread_count] for thread in range(self._thread_count)]
        start_s = time.perf_counter()
        list(self._threads.map(self._copy, shares))
        return blocks * self._block_bytes / (time.perf_counter() - start_s) / GB

    def _copy(self, moves: Sequence[tuple[int, int]]) -> None:
        size = self._block_bytes
        for target, source in moves:
            np.copyto(self._pages[target : target + size], self._pool[source : source + size])

    def _offsets(self, nbytes: int, blocks: int) -> list[int]:
        slots = range(nbytes // self._block_bytes)
        return [slot * self._block_bytes for slot in self._random.choices(slots, k=blocks)]


class SyncedWriteLimit:
    """`blocks` whole blocks written one after the other over those of a file, then flushed.

    Owns a scratch file in `folder`; `close` removes it.
    """

    def __init__(self, folder: Path, blocks: int, block_bytes: int) -> None:
        self._path = folder / f".synced-write-limit-{os.getpid()}"
        self._memory = aligned_buffer(blocks * block_bytes)
        self._memory[:] = os.urandom(block_bytes) * blocks
        self._block_bytes = block_bytes
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, len(self._memory))

    def seconds(self) -> float:
        """Write and flush all blocks; return how long that took."""
        start_s = time.perf_counter()
        for at in range(0, len(self._memory), self._block_bytes):
            os.pwritev(self._file, [self._memory[at : at + self._block_bytes]], at)
        os.fdatasync(self._file)
        return time.perf_counter() - start_s

    def close(self) -> None:
        os.close(self._file)
        self._path.unlink(missing_ok=True)


class DirectIoLimit(AbstractContextManager["DirectIoLimit"]):
    """Direct I/O speed: `preadv` and `pwritev` of whole blocks, in random order, by a few threads.

    Passes rotate through `blocks_at_once` buffers, because a store also reads each block into
    memory of its own. A few reused buffers would stay in the CPU cache, and a virtual disk then
    reads an eighth faster than it can write to memory. Owns a scratch file of `file_bytes` in
    `folder`; the constructor writes it once and `close` removes it. Raises HoldfastError if the
    file system refuses direct I/O.
    """

    def __init__(
        self, folder: Path, file_bytes: int, block_bytes: int, blocks_at_once: int
    ) -> None:
        self._block_bytes = block_bytes
        self._blocks = file_bytes // block_bytes
        self._path = folder / f".direct-io-limit-{os.getpid()}"
        self._pool = ThreadPoolExecutor(THREADS)
        memory = aligned_buffer(blocks_at_once * block_bytes)
        self._buffers = [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(1 << 12) * (block_bytes >> 12)
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret
        self._file = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
            self._file = os.open(self._path, flags, 0o600)
            os.posix_fallocate(self._file, 0, self._blocks * block_bytes)
            self._run(os.pwritev, list(range(self._blocks)))
        except OSError as error:
            self.close()
            why = "refuses direct I/O" if error.errno == errno.EINVAL else error.strerror
            raise HoldfastError(f"{str(folder)!r}: {why}; name a folder on a disk") from error

    def read_gb_per_s(self, blocks: int) -> float:
        return self._run(os.preadv, self._order(blocks))

    def write_gb_per_s(self, blocks: int) -> float:
        return self._run(os.pwritev, self._order(blocks))

    def close(self) -> None:
        self._pool.shutdown()
        if self._file >= 0:
            os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _order(self, blocks: int) -> list[int]:
        return self._random.choices(range(self._blocks), k=blocks)

    def _run(self, call: Callable[[int, list[memoryview], int], int], order: list[int]) -> float:
        """Transfer the blocks on all threads, each block with the next buffer; return GB/s."""
        transfers = list(zip(order, itertools.cycle(self._buffers)))

        def work(thread: int) -> None:
            for block, buffer in transfers[thread::THREADS]:
                moved = call(self._file, [buffer], block * self._block_bytes)
                if moved != self._block_bytes:
                    raise OSError(errno.EIO, f"{moved} of {self._block_bytes} bytes moved")

        start_s = time.perf_counter()
        list(self._pool.map(work, range(THREADS)))
        return len(order) * self._block_bytes / (time.perf_counter() - start_s) / GB

    def __exit__(self, *_: object) -> None:
        self.close()
