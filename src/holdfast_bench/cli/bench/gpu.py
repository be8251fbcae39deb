"""`holdfast bench gpu`: what blocks cost between an arena and a GPU, in phases with limits.

It takes at most 500 seconds, and needs PyTorch for CUDA and nothing else. Each phase runs in a
process of its own; one that fails or is late costs its own figures only. With `--json FILE`, what
was measured is in FILE.part after each phase. `--rehearse` runs every phase at toy sizes without a
GPU, so that none fails for an error of the program when a GPU is at hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from holdfast import report
from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast.report import Report, Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.gpu import collect
from holdfast_bench.measure.gpu.phases import PHASES, Phase, PhaseRun, run_phases

ALSO = ("folder", "blocks", "block_mib", "worst_ms", "gpu", "why")

ROUNDS = 9
QUICK = ("hardware", "bus", "copies")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, ROUNDS)
    measuring.add_folder_argument(parser, "logs and a disk tier, 25 GiB at most")
    measuring.add_quick_argument(parser, f"the phases {', '.join(QUICK)} only")
    known = ", ".join(phase.name for phase in PHASES)
    parser.add_argument(
        "--phases", metavar="NAMES", help=f"the phases to run, with commas (default: all: {known})"
    )
    parser.add_argument(
        "--collect",
        type=Path,
        metavar="FOLDER",
        help="measure nothing; fill a new folder with all that a machine without a network needs: "
        "copy it there, and run its file bench-gpu",
    )
    parser.add_argument(
        "--python",
        default=collect.PYTHON,
        metavar="VERSION",
        help="that machine's Python, for --collect (default: %(default)s)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="toy sizes, without a GPU: shows that every phase runs; its figures mean nothing",
    )


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the rows of each phase when it has ended."""
    if args.collect is not None:
        steps.update(f"packages for Python {args.python} ...")
        mib = collect.collect(args.collect, args.python) / MIB
        yield Row("gpu.collected", mib, "MiB", {"folder": str(args.collect)})
        return
    if find_spec("torch") is None:
        raise ConfigError("torch is not installed here; install the engine's build for CUDA")
    chosen = _chosen(args)
    if not args.rehearse and any(phase.needs_gpu for phase in chosen):
        from holdfast_bench.measure.gpu.accelerator import accelerator

        accelerator(rehearse=False)  # refused before the work
    steps.plan(len(chosen))
    rows: list[Row] = []
    part = f"{args.json}.part" if args.json and args.json != "-" else None
    with measuring.scratch(args.folder) as folder:
        run = PhaseRun(folder.absolute(), 1 if args.rehearse else args.rounds, args.rehearse)
        phases = run_phases(chosen, run)
        for phase in chosen:
            steps.begin(phase.about)
            _, found = next(phases)
            if args.rehearse:
                found = [_without_goal(row) for row in found]
            rows += found
            if part is not None:
                report.write(Report("bench gpu", rows, broken_off=True), part)
            yield from found
    if part is not None:
        Path(part).unlink()


def _chosen(args: argparse.Namespace) -> list[Phase]:
    """Return the phases to run, in their order; raise ConfigError for a name that is none."""
    if args.phases is None:
        return [phase for phase in PHASES if not args.quick or phase.name in QUICK]
    names = args.phases.split(",")
    known = [phase.name for phase in PHASES]
    for name in names:
        if name not in known:
            raise ConfigError(f"--phases: {name!r} is not one of {', '.join(known)}")
    return [phase for phase in PHASES if phase.name in names]


def _without_goal(row: Row) -> Row:
    """Return a row of a rehearsal: only whether its phase ran is a result."""
    if row.what.startswith("gpu.phase."):
        return row
    return msgspec.structs.replace(row, goal=None, ok=None)
