"""Phase 4: loads and saves of blocks, beside one page-locked copy of as many bytes.

`.bounce`: without locked memory. `.busy`: beside a thread that holds the interpreter, and so is its
limit; `.busy.quiet`: its limit is the copy without that thread. `.call`: how long a save keeps the
engine's thread. Before and after, blocks are saved, cleared and loaded, and each byte is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from holdfast.devices.base import Move
from holdfast.limits import MIB
from holdfast.report import Row, at_most, not_measured
from holdfast_bench.harness.paired_runs import Speed, busy_thread, paired, speed_row, timed
from holdfast_bench.measure.gpu.block_copies import BlockCopies
from holdfast_bench.measure.gpu.bus import BLOCKS, BusLimit
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import LLAMA_8B, SHAPES, TOY, PageShape

GOALS = {64: 0.90, 8: 0.75, 1: 0.50}
OTHER_GOALS = {64: 0.88, 8: 0.70}
"""Goals of models with smaller pages, as a share of one page-locked copy."""

BUSY_GOAL = 0.5
BUSY_BLOCKS = (8, 64)
BUSY_ROUNDS = 3
CALL_GOAL_MS = 0.1
CALLS = 20
BUSY_CALLS = 5
ROW_S = 3.0
"""Time that a row needs at most, if its copies are not many times slower than the bus."""


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the rows of every shape; then those beside a busy thread and without locks."""
    shapes = (TOY,) if setting.rehearse else SHAPES
    for shape in shapes:
        limit = BusLimit(setting.gpu, BLOCKS[-1] * shape.block_bytes)
        with closing(BlockCopies(setting.gpu, shape, BLOCKS[-1])) as copies:
            for blocks in BLOCKS:
                copies.verify(blocks)
            goals = GOALS if shape in (LLAMA_8B, TOY) else OTHER_GOALS
            for blocks in reversed(BLOCKS):
                for verb in ("load", "save"):
                    yield _speed(setting, (copies, limit), verb, blocks, goals.get(blocks))
            if shape is shapes[0]:
                yield from _call_rows(setting, copies, "quiet", CALLS)
                yield from _busy_rows(setting, copies, limit)
            copies.verify(BLOCKS[-1])
    shape = shapes[0]
    limit = BusLimit(setting.gpu, BLOCKS[-1] * shape.block_bytes)
    with closing(BlockCopies(setting.gpu, shape, BLOCKS[-1], lock=False)) as copies:
        copies.verify(BLOCKS[-1])
        for verb in ("load", "save"):
            yield _speed(setting, (copies, limit), verb, BLOCKS[-1], None, ".bounce")


def _busy_rows(setting: Setting, copies: BlockCopies, limit: BusLimit) -> Iterator[Row]:
    """Yield the rows beside a thread that holds the interpreter."""
    small, large = BUSY_BLOCKS
    nbytes = large * copies.shape.block_bytes
    quiet = {
        verb: statistics.median(
            limit.gb_per_s(nbytes, to_gpu=verb == "load") for _ in range(BUSY_ROUNDS)
        )
        for verb in ("load", "save")
    }
    with busy_thread():
        for verb in ("load", "save"):
            yield _speed(setting, (copies, limit), verb, small, BUSY_GOAL, ".busy")
            if setting.left_s() < ROW_S:
                yield not_measured(_name(copies.shape, verb, large, ".busy.quiet"), "no time left")
                continue
            ours = [_batch(copies, verb, large)().gb_per_s for _ in range(BUSY_ROUNDS)]
            speed = statistics.median(ours)
            ratio = speed / quiet[verb]
            name = _name(copies.shape, verb, large, ".busy.quiet")
            yield Row(
                name, speed, "GB/s", _more(copies, large), quiet[verb], ratio, BUSY_GOAL,
                ratio >= BUSY_GOAL,
            )  # fmt: skip
        yield from _call_rows(setting, copies, "busy", BUSY_CALLS)


def _call_rows(setting: Setting, copies: BlockCopies, name: str, calls: int) -> Iterator[Row]:
    """Yield how long a save of 8 blocks keeps the engine's thread: the median of some calls."""
    copies.call_s.clear()
    for _ in range(calls):
        copies.save(copies.moves(BUSY_BLOCKS[0]))
        if setting.left_s() < ROW_S:
            break
    called_ms = 1e3 * statistics.median(copies.call_s)
    more = {"worst_ms": 1e3 * max(copies.call_s), **_more(copies, BUSY_BLOCKS[0])}
    yield at_most(f"gpu.save.call.{name}", called_ms, "ms", CALL_GOAL_MS, **more)


def _speed(
    setting: Setting,
    sides: tuple[BlockCopies, BusLimit],
    verb: str,
    blocks: int,
    goal: float | None,
    ending: str = "",
) -> Row:
    """Return the row of one kind of batch and its limit, measured in turns."""
    copies, limit = sides
    name = _name(copies.shape, verb, blocks, ending)
    if setting.left_s() < ROW_S:
        return not_measured(name, "no time was left")
    nbytes = blocks * copies.shape.block_bytes
    bus = partial(limit.gb_per_s, nbytes, to_gpu=verb == "load")
    rounds = min(BUSY_ROUNDS, setting.rounds) if ending == ".busy" else setting.rounds
    pairs = paired(rounds, _batch(copies, verb, blocks), bus)
    return speed_row(name, pairs, goal, **_more(copies, blocks))


def _batch(copies: BlockCopies, verb: str, blocks: int) -> Callable[[], Speed]:
    work: Callable[[Sequence[Move]], None] = copies.load if verb == "load" else copies.save
    nbytes = blocks * copies.shape.block_bytes
    return lambda: timed(nbytes, partial(work, copies.moves(blocks)))


def _name(shape: PageShape, verb: str, blocks: int, ending: str) -> str:
    return f"gpu.{verb}.{shape.model}.{blocks}{ending}"


def _more(copies: BlockCopies, blocks: int) -> dict[str, object]:
    mib = copies.shape.block_bytes / MIB
    return {"blocks": blocks, "block_mib": mib, "gpu": copies.gpu.name()}
