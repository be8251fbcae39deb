"""Phase 5: what loads and saves cost an engine that decodes.

The stand-in for a step of decoding is a graph of matrix-vector products that reads 16 GB of
weights, with a copy of 4 KiB to the GPU before it and one back after it. `.half` copies for half
the time. The small copy's delay is the time from its call to its end; `.pieces` has it beside long
copies in pieces of some blocks, with a tiny kernel between them, and without one (`.plain`).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

import torch

from holdfast.devices.base import Move
from holdfast.limits import KIB, MIB
from holdfast.report import Row, at_most, not_measured
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.measure.gpu.accelerator import HostAccelerator
from holdfast_bench.measure.gpu.block_copies import BlockCopies
from holdfast_bench.measure.gpu.pieces import PiecedCopy
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import LLAMA_8B, TOY

WEIGHT_BYTES, TOY_WEIGHT_BYTES = 16_000_000_000, MIB
COLUMNS, TOY_COLUMNS = 4096, 64
MATRICES = 32
SMALL_BYTES = 4 * KIB
BLOCKS, TOY_BLOCKS = 64, 4
HALF_GOAL, LINE_GOAL = 0.97, 0.94
SMALL_COPY_GOAL_MS = 1.2
SLICE_S, TOY_SLICE_S = 1.0, 0.05
"""Length of a measurement; those alone and beside copies take turns."""

PIECES = (1, 2, 4, 8, 64)
"""Blocks of 16 MiB in the pieces of a long copy; the number is in the name of the row."""

PIECED_BLOCKS = 64

ROUNDS_PER_PAIR = 3
"""Rounds of other figures for one pair of these."""


class DecodeSpeed(NamedTuple):
    """Steps a second, and the delay of the small copy before a step that 1 % of them exceed."""

    steps_per_s: float
    small_copy_p99_ms: float


class DecodeLoop:
    """A loop of decoding steps."""

    def __init__(self, gpu: HostAccelerator, weight_bytes: int, columns: int) -> None:
        self._gpu = gpu
        rows = weight_bytes // 2 // MATRICES // columns
        weights = [
            torch.zeros(rows, columns, dtype=torch.bfloat16, device=gpu.kind)
            for _ in range(MATRICES)
        ]
        vector = torch.zeros(columns, dtype=torch.bfloat16, device=gpu.kind)
        results = [torch.zeros(rows, dtype=torch.bfloat16, device=gpu.kind) for _ in weights]

        def step() -> None:
            for matrix, result in zip(weights, results, strict=True):
                torch.mv(matrix, vector, out=result)

        self._replay = gpu.graph(step)
        self._locked, self._on_gpu = gpu.pinned(SMALL_BYTES), gpu.bytes(SMALL_BYTES)

    def run(self, seconds: float) -> DecodeSpeed:
        """Run steps for some time."""
        begun_s, small_copies_s = time.perf_counter(), list[float]()
        while (now_s := time.perf_counter()) < begun_s + seconds:
            self._on_gpu.copy_(self._locked, non_blocking=True)
            self._gpu.wait_for_stream()
            small_copies_s.append(time.perf_counter() - now_s)
            self._replay()
            self._locked.copy_(self._on_gpu, non_blocking=True)
            self._gpu.wait_for_stream()
        speed = len(small_copies_s) / (time.perf_counter() - begun_s)
        slow = sorted(small_copies_s)[int(0.99 * len(small_copies_s))]
        return DecodeSpeed(speed, 1e3 * slow)


def rows(setting: Setting) -> Iterator[Row]:
    """Yield decoding speed alone, and beside copies as a share of it."""
    toy, gpu = setting.rehearse, setting.gpu
    weight_bytes, columns = (TOY_WEIGHT_BYTES, TOY_COLUMNS) if toy else (WEIGHT_BYTES, COLUMNS)
    loop = DecodeLoop(gpu, weight_bytes, columns)
    slice_s, blocks = (TOY_SLICE_S, TOY_BLOCKS) if toy else (SLICE_S, BLOCKS)
    loop.run(slice_s)  # libraries load their kernels
    alone = loop.run(slice_s)
    yield Row("gpu.decode.alone", alone.steps_per_s, "steps/s", {"gpu": gpu.name()})
    yield at_most("gpu.decode.small_copy.alone", alone.small_copy_p99_ms, "ms")
    with closing(BlockCopies(gpu, TOY if toy else LLAMA_8B, blocks)) as copies:
        copies.verify(blocks)
        for verb, copy in (("load", copies.load), ("save", copies.save)):
            work = partial(_copy_batch, copies, copy, blocks)
            for ending, busy_share, goal in (("", 1.0, LINE_GOAL), (".half", 0.5, HALF_GOAL)):
                name = f"gpu.decode.{verb}{ending}"
                pairs = max(1, setting.rounds // ROUNDS_PER_PAIR)
                if setting.left_s() < 2 * pairs * slice_s + 1:
                    yield not_measured(name, "no time was left")
                    continue
                beside, ratios, speed = _beside(loop, (work, busy_share), pairs, slice_s)
                copied = speed * blocks * copies.shape.block_bytes / GB
                steps = statistics.median(each.steps_per_s for each in beside)
                more: dict[str, object] = {"copied_gb_per_s": copied, "blocks": blocks}
                ratio = statistics.median(ratios)
                yield Row(
                    name, steps, "steps/s", more, alone.steps_per_s, ratio, goal, ratio >= goal
                )
                if verb == "load" and not ending:
                    p99_ms = statistics.median(each.small_copy_p99_ms for each in beside)
                    yield at_most("gpu.decode.small_copy.load", p99_ms, "ms", SMALL_COPY_GOAL_MS)
    yield from _piece_rows(setting, loop, slice_s)


def _piece_rows(setting: Setting, loop: DecodeLoop, slice_s: float) -> Iterator[Row]:
    """Yield the delay of the small copy beside long copies, by the size of their pieces."""
    block = TOY.block_bytes if setting.rehearse else LLAMA_8B.block_bytes
    with closing(PiecedCopy(setting.gpu, PIECED_BLOCKS * block, block)) as copy:
        for blocks in PIECES[-1:] if setting.rehearse else PIECES:
            for ending, pause in (("", True), (".plain", False)):
                name = f"gpu.decode.small_copy.pieces.{blocks}{ending}"
                if setting.left_s() < slice_s + 1:
                    yield not_measured(name, "no time was left")
                    continue
                work = partial(copy.copy, blocks * block, pause=pause)
                work()
                with _repeated(work, 1.0) as ended:
                    speed = loop.run(slice_s)
                copied = len(ended) * copy.nbytes / slice_s / GB
                yield at_most(name, speed.small_copy_p99_ms, "ms", copied_gb_per_s=copied)


def _copy_batch(copies: BlockCopies, copy: Callable[[Sequence[Move]], None], blocks: int) -> None:
    copy(copies.moves(blocks))


def _beside(
    loop: DecodeLoop, other: tuple[Callable[[], None], float], pairs: int, slice_s: float
) -> tuple[list[DecodeSpeed], list[float], float]:
    """Decode beside a thread that repeats other work, and alone, in turns.

    `other`: the work, and the share of the time in which it is done. Returns the speeds beside it,
    each as a share of the speed alone just after, and how often a second the work was done.
    """
    beside, ratios, done, copying_s = list[DecodeSpeed](), list[float](), 0, 0.0
    for _ in range(pairs):
        with _repeated(*other) as ended:
            begun_s = time.perf_counter()
            beside.append(loop.run(slice_s))
            copying_s += time.perf_counter() - begun_s
        done += len(ended)
        ratios.append(beside[-1].steps_per_s / loop.run(slice_s).steps_per_s)
    return beside, ratios, done / copying_s


@contextmanager
def _repeated(work: Callable[[], None], busy_share: float) -> Iterator[list[float]]:
    """Repeat work on a thread, which rests for the rest of the time; yield when each has ended.

    Raises what the work raised.
    """
    stop, ended, failures = threading.Event(), list[float](), list[BaseException]()

    def repeat() -> None:
        try:
            while not stop.is_set():
                begun_s = time.perf_counter()
                work()
                ended.append(time.perf_counter())
                stop.wait((ended[-1] - begun_s) * (1 / busy_share - 1))
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
