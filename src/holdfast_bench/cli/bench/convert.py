"""`holdfast bench convert`: the conversion of pages and portable blocks, beside plain copies."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.convert import device_rows, thread_rows

ALSO = ("cpu_s_per_gb", "limit_is")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_quick_argument(parser, "without the devices")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    steps.plan(1 if args.quick else 2)
    steps.begin("a thread beside a plain copy")
    yield from thread_rows(args.rounds)
    if not args.quick:
        steps.begin("a device that converts beside one that copies")
        yield from device_rows(args.rounds)
