"""The phases of a measurement: each runs in a process of its own, for a limited time.

An error of a GPU ends every later call of its process, and a copy that hangs cannot be interrupted.
So a phase that fails or is late costs its own figures only. What it measured before is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.report import Row
from holdfast_bench.harness.process import POLL_S, ChildProcess

PROCESS = "holdfast_bench.measure.gpu.phase_process"
WHY_CHARS_MAX = 400


class Phase(NamedTuple):
    """A phase: the module whose `rows` measures it, and its share of the time."""

    name: str
    module: str
    limit_s: float
    about: str
    needs_gpu: bool = True


PHASES = (
    Phase(
        "hardware", "holdfast_bench.measure.gpu.hardware", 12, "the GPU, its driver and its link"
    ),
    Phase("bus", "holdfast_bench.measure.gpu.bus", 16, "page-locked copies: the bus's limit"),
    Phase("locking", "holdfast_bench.measure.gpu.locking", 35, "locking memory, and its stalls"),
    Phase("kernels", "holdfast_bench.measure.gpu.kernels", 55, "kernels between pages and a stage"),
    Phase("copies", "holdfast_bench.measure.gpu.copies", 55, "loads and saves of blocks"),
    Phase("submission", "holdfast_bench.measure.gpu.submission", 25, "the calls for copies"),
    Phase("conversion", "holdfast_bench.measure.gpu.conversion", 40, "portable blocks"),
    Phase("decode", "holdfast_bench.measure.gpu.decode", 40, "decoding beside loads and saves"),
    Phase(
        "correctness", "holdfast_bench.measure.gpu.correctness", 45, "a real model's cache; tests"
    ),
    Phase("first_token", "holdfast_bench.measure.gpu.first_token", 92, "the first token"),
    Phase("recall", "holdfast_bench.measure.gpu.recall", 40, "memory asked back", needs_gpu=False),
    Phase("sanitizer", "holdfast_bench.measure.gpu.sanitizer", 40, "kernels under the sanitizer"),
)
"""At most 500 seconds in all."""


class PhaseRun(NamedTuple):
    """How phases are run: the folder for their files, rounds of a figure, and toy sizes or not."""

    folder: Path
    rounds: int
    rehearse: bool


class PhaseEnd(msgspec.Struct, frozen=True):
    """The last line of a phase's file; `failure` is empty if it measured everything."""

    failure: str


class PhaseLine(msgspec.Struct, frozen=True):
    """A line of a phase's file: a row, or the end."""

    row: Row | None = None
    end: PhaseEnd | None = None


def run_phases(phases: Sequence[Phase], run: PhaseRun) -> Iterator[tuple[Phase, list[Row]]]:
    """Run phases one after another, and yield the rows of each, with one about the phase itself.

    Time that a phase does not need is left to the later ones.
    """
    until_s = time.monotonic()
    for phase in phases:
        until_s += phase.limit_s
        begun_s = time.monotonic()
        found, failure = run_phase(phase, run, until_s - begun_s)
        took_s = time.monotonic() - begun_s
        more: dict[str, object] = {"limit_s": until_s - begun_s}
        if failure:
            more["why"] = failure
        end = Row(f"gpu.phase.{phase.name}", took_s, "s", more, ok=not failure)
        yield phase, [*found, end]


def run_phase(phase: Phase, run: PhaseRun, limit_s: float) -> tuple[list[Row], str]:
    """Run one phase in a process; return its rows, and why it did not end in time, if so."""
    file, log = (run.folder / f"{phase.name}{suffix}" for suffix in (".jsonl", ".log"))
    flags = {"--rehearse": run.rehearse, "--no-gpu": not phase.needs_gpu}
    options = [str(run.rounds), *(flag for flag, is_set in flags.items() if is_set)]
    argv = [sys.executable, "-m", PROCESS, phase.module, str(file), f"{limit_s:.1f}", *options]
    until_s = time.monotonic() + limit_s
    with ChildProcess(f"phase {phase.name}", argv, log, {}) as child:
        while child.running and time.monotonic() < until_s:
            time.sleep(POLL_S)
        late = child.running
        if late:
            child.kill()
        lines = _lines(file)
        found = [line.row for line in lines if line.row is not None]
        if lines and lines[-1].end is not None:
            return found, lines[-1].end.failure
        if late:
            return found, f"took longer than {limit_s:.0f} s"
        return found, f"the process ended: {child.tail()[-WHY_CHARS_MAX:]}"


def _lines(file: Path) -> list[PhaseLine]:
    """Return the whole lines of a phase's file."""
    if not file.exists():
        return []
    whole = file.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=PhaseLine) for line in whole if line.endswith(b"\n")]
