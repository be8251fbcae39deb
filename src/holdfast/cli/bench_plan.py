"""`holdfast bench plan`: plans on a real engine, against recomputing and every other cut."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from holdfast.cli.demo import need_engine
from holdfast.config import PRIVATE_PARENT
from holdfast.errors import ConfigError
from holdfast.rig import measure_plan, model, report
from holdfast.rig.report import Report

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
CUT_LENGTHS = (512, 2048, 8192)
QUICK_LENGTHS = (128, 512, 2048)
QUICK_CUT_LENGTHS = (512,)
ROUNDS_MIN = 3
"""Medians of fewer say little on a shared machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help=f"rounds per length, at least {ROUNDS_MIN} (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        choices=sorted(model.SHAPES),
        default="small",
        help="the model that is made (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="few and short contexts")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and store here")
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if every goal was met, else 1."""
    if args.rounds < ROUNDS_MIN:
        raise ConfigError(f"--rounds: {args.rounds} is fewer than {ROUNDS_MIN}; raise it")
    console = report.console(args.json)
    need_engine()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=PRIVATE_PARENT) as scratch,
        ExitStack() as stack,
        console.status("set-up: the model is made, the engines start ...") as status,
    ):
        course = measure_plan.Course(
            model=args.model,
            made=model.make(args.model),
            lengths=QUICK_LENGTHS if args.quick else LENGTHS,
            cut_lengths=QUICK_CUT_LENGTHS if args.quick else CUT_LENGTHS,
            rounds=args.rounds,
            tell=status.update,
        )
        folder = (args.keep or Path(scratch)).absolute()
        rows = []
        for row in measure_plan.plan_rows(stack, folder, course):
            rows.append(row)
            about = f"{row.more['source']} {row.more['tokens']}"
            console.print(f"{row.what} {about} {report.number(row.value)}")
    found = Report("bench plan", rows)
    also = ("source", "tokens", "planned_s", "recompute_s", "best_s")
    console.print(report.table(found, also=also))
    if args.json:
        report.write(found, args.json)
    return 0 if found.ok else 1
