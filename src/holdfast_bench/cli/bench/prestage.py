"""`holdfast bench prestage`: contexts that only a pool holds, announced before they are used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.prestage import prestage_rows

ALSO = ("pool_s", "queued_s", "limit_is", "why")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 20, "contexts")
    measuring.add_folder_argument(parser, "logs and keys")
    measuring.add_quick_argument(parser, f"{measuring.ROUNDS_MIN} contexts")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures. Takes 2 GiB of memory."""
    steps.plan(1)
    steps.begin("a node and a target on a limited link")
    with measuring.scratch(args.folder) as scratch:
        yield from prestage_rows(scratch, measuring.ROUNDS_MIN if args.quick else args.rounds)
