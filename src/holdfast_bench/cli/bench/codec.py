"""`holdfast bench codec`: how far KV shrinks, and how fast, beside a copy and other compressors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.codec import codec_rows, other_rows

ALSO = ("limit_is", "why")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_quick_argument(parser, "without other compressors")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    steps.plan(1 if args.quick else 2)
    steps.begin("a core beside a plain copy")
    yield from codec_rows(args.rounds)
    if not args.quick:
        steps.begin("other compressors")
        yield from other_rows(args.rounds)
