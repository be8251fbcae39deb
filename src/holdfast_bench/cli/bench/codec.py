"""`holdfast bench codec`: how far KV shrinks, and how fast, beside a copy and other compressors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.codec import auto_rows, codec_rows, disk_rows, other_rows

ALSO = ("limit_is", "encodes", "tier_gb_per_s", "decode_gb_per_s", "why")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_folder_argument(parser, "scratch files, 4 GiB")
    measuring.add_quick_argument(parser, "a core only, without other compressors")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    steps.plan(1 if args.quick else 4)
    steps.begin("a core beside a plain copy")
    yield from codec_rows(args.rounds)
    if args.quick:
        return
    steps.begin("other compressors")
    yield from other_rows(args.rounds)
    with measuring.scratch(args.folder) as scratch:
        steps.begin("a disk that reads 1 GB/s, encoded beside raw")
        yield from disk_rows(scratch, args.rounds)
        steps.begin("fast tiers, which choose, beside raw records")
        yield from auto_rows(scratch, args.rounds)
