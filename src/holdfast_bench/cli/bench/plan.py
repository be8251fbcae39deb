"""`holdfast bench plan`: plans on a real engine, against recomputing and every other cut."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.measure import plan
from holdfast_bench.measure.engine_pair import EnginePairPlan

ALSO = ("source", "tokens", "planned_s", "recompute_s", "best_s")

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
CUT_LENGTHS = (512, 2048, 8192)
QUICK_LENGTHS = (128, 512, 2048)
QUICK_CUT_LENGTHS = (512,)
ROUNDS_MIN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    about = "rounds per length and node, 4 of long ones, two or five times as many of short ones"
    measuring.add_rounds_argument(parser, 8, about, ROUNDS_MIN)
    measuring.add_model_argument(parser, "small")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=plan.PARTS,
        default=plan.PARTS,
        metavar="PART",
        help="measure these alone: contexts from memory (host), from a disk, from a slow one, from "
        "a pool's target, from nowhere, what a connector costs: %(choices)s (default: all)",
    )
    measuring.add_quick_argument(parser, "few and short contexts")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    with measuring.engines(args.keep) as folder, ExitStack() as stack:
        plan_of_runs = EnginePairPlan(
            model=args.model,
            made=model.make(args.model),
            lengths=QUICK_LENGTHS if args.quick else LENGTHS,
            cut_lengths=QUICK_CUT_LENGTHS if args.quick else CUT_LENGTHS,
            rounds=args.rounds,
            tell=steps.update,
        )
        yield from measuring.print_rows(
            plan.plan_rows(stack, folder, plan_of_runs, args.only), steps
        )
