"""`holdfast bench seal`: what sealing costs a core, a disk and a pool."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure import seal

ALSO = ("cpu_s_per_gb", "plain_cpu_s_per_gb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_folder_argument(parser, "scratch files, 4 GiB")
    measuring.add_quick_argument(parser, "a core only")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    seal.need_cipher()
    steps.plan(1 if args.quick else 4)
    steps.begin("a core beside plain AES-256-GCM")
    yield from seal.core_rows(args.rounds)
    if args.quick:
        return
    steps.begin("a disk tier, sealed beside not sealed")
    with measuring.scratch(args.folder) as scratch:
        yield from seal.disk_rows(scratch, args.rounds)
        steps.begin("a target over TCP, sealed beside not sealed")
        yield from seal.pool_rows(scratch, args.rounds)
        steps.begin(f"a target behind {seal.GBIT_PER_S} Gbit/s, sealed beside not sealed")
        yield from seal.link_rows(scratch, args.rounds)
