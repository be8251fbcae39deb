"""`holdfast bench saves`: what an engine saves with each `save` option, and what it computes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.scenarios.save_times import (
    QUICK_LOAD,
    SAVE_TIMES,
    SaveLoad,
    SaveTimeSettings,
    save_time_rows,
)

ALSO = (*(f"{save}_bytes" for save in SAVE_TIMES), *(f"{save}_tokens" for save in SAVE_TIMES))
MODEL = "small"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_duration(parser, "5 minutes on two cores, and 6 GiB of memory")
    measuring.add_rounds_argument(parser, 1, "loads of sessions", least=1)
    measuring.add_quick_argument(parser, "shorter and fewer sessions, and a smaller model")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    name, load = ("tiny", QUICK_LOAD) if args.quick else (MODEL, SaveLoad())
    with measuring.engines(args.keep) as folder:
        made = model.make(name)
        settings = SaveTimeSettings(made, model.SHAPES[name], args.rounds, load, steps.update)
        yield from measuring.print_rows(save_time_rows(folder, settings), steps)
