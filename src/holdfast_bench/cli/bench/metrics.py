"""`holdfast bench metrics`: what counting a request and scraping a node cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure import metrics

ALSO = ("cpu_s_per_gb",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15, "how often each is measured", least=1)
    measuring.add_folder_argument(parser, "the files of the nodes")
    measuring.add_quick_argument(parser, "three rounds")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    rounds = min(3, args.rounds) if args.quick else args.rounds
    steps.plan(5)
    steps.begin("counting")
    yield metrics.counting_row(rounds)
    with measuring.scratch(args.folder) as scratch:
        steps.begin("fetches with and without scrapes")
        yield from metrics.node_rows(scratch / "node", rounds)
        steps.begin("saves with and without scrapes")
        yield metrics.save_row(scratch / "memory", rounds)
        steps.begin("fetches of sealed blocks with and without scrapes")
        yield metrics.sealed_row(scratch / "sealed", rounds)
        steps.begin("a target with and without scrapes")
        yield from metrics.target_rows(scratch / "target", rounds)
