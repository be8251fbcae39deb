"""Measure a files tier and its medium, in turns with plain reads and writes in the same folder.

Segments of 64 MiB are written whole, and read in ranges of 8 MiB, by one and by several threads.
The plain side does what makes a file safe, too: a temporary name, a flush, a rename and a flush of
the folder. Unless a row says *cached*, the kernel's page cache holds nothing of the files.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from holdfast.blocks.key import KEY_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.byte_size import Size
from holdfast.codec.coded import check_reported
from holdfast.codec.pack import pack
from holdfast.errors import HoldfastError, Outcome
from holdfast.limits import GIB, MIB
from holdfast.regular_file import flush_folder
from holdfast.report import Row
from holdfast.testing.payloads import header_of
from holdfast.tiers.base import NOWHERE, Tier, TierGet, TierPut
from holdfast.tiers.files.kind import FilesOptions, open_files
from holdfast.tiers.files.medium import FilesMedium
from holdfast.tiers.kind import TierContext
from holdfast.tiers.option_checks import DEADLINE_S_MAX
from holdfast.wire.remote.stream import Deadline
from holdfast_bench.harness.paired_runs import PairedSpeeds, Speed, paired, speed_row, timed
from holdfast_bench.measure.disk import NAMESPACE

GOAL = 0.9
"""Speed through the process of a tier, as a share of plain reads and writes."""

SEGMENT_BYTES = 64 * MIB
RANGE_BYTES = 8 * MIB
BLOCK_BYTES = 2 * MIB
SEGMENTS = 8
TIER_SEGMENTS = 4
"""Segments of a pass through a tier, which writes new ones each time, and deletes them later."""

RECORDS = 31
"""Records of a segment: with their headers they fit into one file."""

THREADS = 4
_READS = (
    ("files.read.x1", 1, GOAL),
    (f"files.read.x{THREADS}", THREADS, GOAL),
    (f"files.read.x{THREADS}.cached", THREADS, None),
)
CALL_S = 120.0
"""Deadline of one call: a call that is late is no measurement."""


def files_rows(folder: Path, rounds: int, segments: int = SEGMENTS) -> Iterator[Row]:
    """Yield the speed of writes and reads below a folder, each beside the plain one."""
    with (
        closing(FilesMedium(str(folder / "tier"))) as medium,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        plain = PlainFiles(folder / "plain")
        ours = MediumFiles(medium, folder / "tier")
        sides: tuple[PlainFiles | MediumFiles, ...] = ours, plain

        def write(side: PlainFiles | MediumFiles, threads: int) -> Speed:
            def work() -> None:
                _run(pool, threads, side.write, range(segments))

            return timed(segments * SEGMENT_BYTES, work)

        def read(side: PlainFiles | MediumFiles, threads: int, cached: bool) -> Speed:  # noqa: FBT001
            ranges = list(itertools.product(range(segments), range(0, SEGMENT_BYTES, RANGE_BYTES)))
            random.shuffle(ranges)
            if not cached:
                side.drop_cache()
            return timed(
                segments * SEGMENT_BYTES,
                lambda: _run(pool, threads, lambda each: side.read(*each), ranges),
            )

        def pair(work: Callable[..., Speed], *options: object) -> PairedSpeeds:
            return paired(
                rounds, lambda: work(ours, *options), lambda: work(plain, *options).gb_per_s
            )

        for side in sides:
            write(side, THREADS)  # folders, and the process, are there before the first round
        for threads in (1, THREADS):
            pairs = pair(write, threads)
            what = f"files.write.x{threads}"
            yield speed_row(what, pairs, GOAL, threads=threads, bytes=SEGMENT_BYTES)
        for what, threads, goal in _READS:
            pairs = pair(read, threads, goal is None)
            yield speed_row(what, pairs, goal, threads=threads, bytes=RANGE_BYTES)


def tier_rows(folder: Path, rounds: int, segments: int = TIER_SEGMENTS) -> Iterator[Row]:
    """Yield the speed of a tier's writes and verified reads, each beside the plain one."""
    options = FilesOptions(
        path=str(folder / "tier"),
        capacity=Size(64 * GIB),
        deadline_s=DEADLINE_S_MAX,
        ask_s=DEADLINE_S_MAX,
        write_s=CALL_S,
    )
    opened = open_files(options, TierContext("bench", "files", 512))
    with closing(opened) as tier, ThreadPoolExecutor(THREADS) as pool:
        ours, plain = TierRecords(tier, folder / "tier", segments), PlainFiles(folder / "plain")
        nbytes = segments * RECORDS * NAMESPACE.slot_bytes
        ranges = list(itertools.product(range(segments), range(0, SEGMENT_BYTES, RANGE_BYTES)))

        def write() -> Speed:
            return timed(nbytes, lambda: _run(pool, THREADS, ours.write, range(segments)))

        def write_plain() -> float:
            work = functools.partial(_run, pool, THREADS, plain.write, range(segments))
            return timed(segments * SEGMENT_BYTES, work).gb_per_s

        def read() -> Speed:
            ours.drop_cache()
            return timed(nbytes, lambda: _run(pool, THREADS, ours.read, range(segments)))

        def read_plain() -> float:
            plain.drop_cache()
            work = functools.partial(_run, pool, THREADS, lambda each: plain.read(*each), ranges)
            return timed(segments * SEGMENT_BYTES, work).gb_per_s

        write()
        write_plain()
        for what, mine, limit in (
            ("files.tier.write", write, write_plain),
            ("files.tier.read", read, read_plain),
        ):
            pairs = paired(rounds, mine, limit)
            yield speed_row(what, pairs, GOAL, threads=THREADS, bytes=RECORDS * BLOCK_BYTES)


def _run(
    pool: ThreadPoolExecutor, threads: int, work: Callable[..., None], items: Sequence[object]
) -> None:
    """Call `work` for all items, on this thread or on all threads of the pool."""
    if threads == 1:
        for item in items:
            work(item)
        return
    for _ in pool.map(work, items):
        pass  # raises what a thread raised


class _Buffers:
    """Blocks to write, and buffers to read into; a thread uses those of its range."""

    def __init__(self) -> None:
        self.blocks = [aligned_buffer(BLOCK_BYTES) for _ in range(SEGMENT_BYTES // BLOCK_BYTES)]
        for block in self.blocks:
            block[:] = os.urandom(BLOCK_BYTES)
        count = RANGE_BYTES // BLOCK_BYTES
        self._into = [
            [aligned_buffer(BLOCK_BYTES) for _ in range(count)]
            for _ in range(SEGMENT_BYTES // RANGE_BYTES)
        ]

    def into(self, segment: int, start: int) -> list[memoryview]:
        """Return the buffers of a range."""
        return self._into[(segment + start // RANGE_BYTES) % len(self._into)]


class MediumFiles:
    """Segments through a medium, which keeps them below `folder`."""

    def __init__(self, medium: FilesMedium, folder: Path) -> None:
        self._medium = medium
        self._folder = folder
        self._buffers = _Buffers()

    def write(self, segment: int) -> None:
        answer = self._medium.put(f"a/{segment}", self._buffers.blocks, Deadline.within(CALL_S))
        if answer.outcome is not Outcome.OK:
            raise HoldfastError(f"a segment was not written: {answer.outcome} {answer.why}")

    def read(self, segment: int, start: int) -> None:
        into = self._buffers.into(segment, start)
        answer = self._medium.read(f"a/{segment}", start, into, Deadline.within(CALL_S))
        if answer.nbytes != RANGE_BYTES:
            raise HoldfastError(f"a range was not read: {answer.outcome} {answer.why}")

    def drop_cache(self) -> None:
        drop_cache(self._folder)


class TierRecords:
    """Packed records through a tier, which keeps them below `folder`; reads verify each."""

    def __init__(self, tier: Tier, folder: Path, segments: int) -> None:
        self._tier = tier
        self._folder = folder
        size = NAMESPACE.slot_bytes
        count = segments * RECORDS
        records, into = aligned_buffer(count * size), aligned_buffer(count * size)
        into[:: 1 << 12] = bytes(len(into) >> 12)  # page faults are not measured
        self._keys = [number.to_bytes(KEY_BYTES, "big") for number in range(count)]
        self._records = [records[at * size : (at + 1) * size] for at in range(count)]
        self._into = [into[at * size : (at + 1) * size] for at in range(count)]
        for key, record in zip(self._keys, self._records, strict=True):
            pack(record, header_of(NAMESPACE, key))

    def write(self, segment: int) -> None:
        puts = [TierPut(NOWHERE, self._records[number]) for number in self._numbers(segment)]
        if set(self._tier.write(puts)) != {Outcome.OK}:
            raise HoldfastError("a segment was not written; is there room in --folder?")

    def read(self, segment: int) -> None:
        gets = [
            TierGet(NOWHERE, self._keys[number], self._into[number], NAMESPACE)
            for number in self._numbers(segment)
        ]
        if set(self._tier.read(gets)) != {Outcome.OK}:
            raise HoldfastError("a segment was not read")
        for get in gets:
            if check_reported(get.into, get.key, NAMESPACE) is not Outcome.OK:
                raise HoldfastError("a record does not verify")

    def drop_cache(self) -> None:
        drop_cache(self._folder)

    @staticmethod
    def _numbers(segment: int) -> range:
        return range(segment * RECORDS, (segment + 1) * RECORDS)


class PlainFiles:
    """The plainest code that writes and reads the same files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._buffers = _Buffers()

    def write(self, segment: int) -> None:
        path = self._folder / str(segment)
        fd = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for number, block in enumerate(self._buffers.blocks):
                os.pwrite(fd, block, number * BLOCK_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
        Path(f"{path}.tmp").rename(path)
        flush_folder(str(self._folder))

    def read(self, segment: int, start: int) -> None:
        fd = os.open(self._folder / str(segment), os.O_RDONLY)
        try:
            moved = os.preadv(fd, self._buffers.into(segment, start), start)
        finally:
            os.close(fd)
        if moved != RANGE_BYTES:
            raise HoldfastError(f"a plain read returned {moved} of {RANGE_BYTES} bytes")

    def drop_cache(self) -> None:
        drop_cache(self._folder)


def drop_cache(folder: Path) -> None:
    """Drop the files below a folder from this machine's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
