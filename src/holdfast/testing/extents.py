"""A disk tier on a medium in memory, for tests: the medium logs every write, fails on demand."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from holdfast.clock import Clock
from holdfast.testing.payloads import key_of
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SUPERBLOCKS, RegionGeometry, Superblock, pack_superblock
from holdfast.tiers.disk.tier import DiskTier

Fails = Callable[[str, int, int], bool]
"""Returns whether a "read" or "write", of an offset and a number of bytes, fails with EIO."""


class ExtentWrite(NamedTuple):
    """One write that reached the medium; a flush if `data` is empty."""

    offset: int
    data: bytes


class MemoryExtents:
    """An `Extents` over a bytearray: `image` is its content, `log` its writes and flushes."""

    direct = True

    def __init__(self, image: bytes | bytearray) -> None:
        self.image = bytearray(image)
        self.size = len(self.image)
        self.log: list[ExtentWrite] = []
        self.fails: Fails | None = None
        self._lock = threading.Lock()

    @classmethod
    def formatted(cls, region_bytes: int, region_count: int, seed: int = 0) -> Self:
        """Return a medium as the disk tier formats it."""
        geometry = RegionGeometry.of(region_bytes, region_count)
        block = pack_superblock(Superblock(key_of(seed), 0, geometry))
        return cls((block * SUPERBLOCKS).ljust(geometry.file_bytes, b"\0"))

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._check("read", offset, views)
        with self._lock:
            for view in views:
                view[:] = self.image[offset : offset + len(view)]
                offset += len(view)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        self._check("write", offset, views)
        with self._lock:
            data = b"".join(views)
            self.image[offset : offset + len(data)] = data
            self.log.append(ExtentWrite(offset, data))

    def flush(self) -> None:
        with self._lock:
            self.log.append(ExtentWrite(0, b""))

    def close(self) -> None:
        """Do nothing, so that a test can inspect the image or open another tier on it."""

    def _check(self, what: str, offset: int, views: Sequence[memoryview]) -> None:
        nbytes = sum(len(view) for view in views)
        if offset + nbytes > self.size:
            raise OSError(errno.EIO, f"{offset + nbytes} is past the end at {self.size}")
        if self.fails and self.fails(what, offset, nbytes):
            raise OSError(errno.EIO, "injected")


class BufferedExtents(MemoryExtents):
    """A medium behind a page cache, as of a file without direct I/O on Linux.

    `image` is the cache, which reads see; `safe` is what the medium has. A flush that fails loses
    what waits to be written: it stays in the cache, and the next flush says nothing of it.
    `failing_flushes`: how many flushes fail from now on.
    """

    direct = False

    def __init__(self, image: bytes | bytearray) -> None:
        super().__init__(image)
        self.safe = bytearray(image)
        self.failing_flushes = 0
        self._waiting: list[ExtentWrite] = []

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        super().write(offset, views)
        with self._lock:
            self._waiting.append(ExtentWrite(offset, b"".join(views)))

    def flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if self.failing_flushes:
                self.failing_flushes -= 1
                raise OSError(errno.EIO, "injected")
            for offset, data in waiting:
                self.safe[offset : offset + len(data)] = data
        super().flush()

    def after_power_cut(self) -> BufferedExtents:
        """Return the medium as the next start of the machine finds it."""
        with self._lock:
            return BufferedExtents(self.safe)


def tier_on(
    medium: MemoryExtents,
    clock: Clock | None = None,
    **options: Any,  # noqa: ANN401  # fields of DiskConfig have several types
) -> DiskTier:
    """Open a disk tier on a formatted medium; `options` are fields of `DiskConfig`."""
    config = DiskConfig(path="memory", capacity_bytes=medium.size, **options)
    return DiskTier(config, clock, lambda _: medium)


def crash_image(
    start: bytes | bytearray, log: Sequence[ExtentWrite], chosen: random.Random, sector: int = 512
) -> bytearray:
    """Return an image that a power cut may leave: a prefix of the log, without some sectors.

    Each sector that was written after the last flush of the prefix is present or missing at random.
    So a later write may be present without an earlier one, and every write may be torn.
    """
    image = bytearray(start)
    end = chosen.randrange(len(log) + 1)
    flushed = max((i for i in range(end) if not log[i].data), default=0)
    arrives = chosen.choice((0.1, 0.5, 0.9, 0.99))
    for i in range(end):
        offset, data = log[i]
        if i < flushed:
            image[offset : offset + len(data)] = data
            continue
        for at in range(0, len(data), sector):
            if chosen.random() < arrives:
                image[offset + at : offset + at + sector] = data[at : at + sector]
    return image
