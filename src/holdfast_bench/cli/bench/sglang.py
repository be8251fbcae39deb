"""`holdfast bench sglang`: SGLang's first token with Holdfast as its storage, and with its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

from holdfast import report
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.measure import sglang
from holdfast_bench.peers import sglang_environment

ALSO = ("cold_s", "warm_s", "file_s", "rounds", "why")
LENGTHS = (4096, 8192)
QUICK_LENGTHS = (1024,)
GOAL = 1.1
"""Largest time to first token from the storage, relative to SGLang's storage `file`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_duration(parser, "11 minutes on two cores")
    measuring.add_rounds_argument(parser, 7, "contexts per length")
    measuring.add_model_argument(parser, "small")
    measuring.add_folder_argument(parser, "logs and stores")
    measuring.add_quick_argument(parser, "one short context")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    if not sglang_environment.installed():
        why = sglang_environment.WHY_NOT.format(folder=sglang_environment.folder())
        yield report.not_measured("sglang.warm", why)
        return
    made, shape = model.make(args.model), model.SHAPES[args.model]
    with measuring.scratch(args.folder) as folder:
        race = sglang.SglangRace(made, shape.vocabulary, lengths, args.rounds, folder)
        for length, times in sglang.measure(race, steps.update):
            yield from measuring.print_rows(_rows(length, times), steps)


def _rows(length: int, times: dict[str, sglang.SglangTimes]) -> Iterator[Row]:
    ours, file = times[sglang.HOLDFAST], times[sglang.FILE]
    cold_s, warm_s, file_s = median(ours.cold), median(ours.warm), median(file.warm)
    more = {"cold_s": cold_s, "warm_s": warm_s, "file_s": file_s, "rounds": len(ours.warm)}
    yield report.at_least(f"sglang.warm.{length}", cold_s / warm_s, "x", **more)
    yield report.at_most(f"sglang.beside_file.{length}", warm_s / file_s, "x", GOAL, **more)
