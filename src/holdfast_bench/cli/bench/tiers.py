"""`holdfast bench tiers`: host, disk, names, index and recovery, each beside its limit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast.limits import GIB
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure import disk, durable, index, node

ALSO = ("cpu_s_per_gb", "mixed_us")

SCRATCH_BYTES = 4 * GIB
RECOVERY_BYTES = 9 * GIB
QUICK_RECOVERY_BYTES = 2 * GIB
INDEX_BLOCKS = 1_000_000
QUICK_INDEX_BLOCKS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_folder_argument(parser, "scratch files, 16 GiB at most")
    measuring.add_quick_argument(parser, "a small disk and index: minutes become seconds")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    rounds, disk_bytes, blocks = args.rounds, RECOVERY_BYTES, INDEX_BLOCKS
    if args.quick:
        disk_bytes, blocks = QUICK_RECOVERY_BYTES, QUICK_INDEX_BLOCKS
    steps.plan(5)
    steps.begin("names, coverage and a plan of 128K tokens")
    yield index.coverage_row(rounds)
    yield index.plan_row(rounds)
    with measuring.scratch(args.folder) as scratch:
        steps.begin("disk beside plain direct I/O")
        (scratch / "disk").mkdir()
        yield from disk.disk_rows(scratch / "disk", SCRATCH_BYTES, rounds)
        steps.begin("a node: coverage, pages, kill -9")
        yield from node.node_rows(scratch / "node", rounds, disk_bytes)
        steps.begin("saves until the disk has acknowledged them")
        yield from durable.durable_rows(scratch / "durable", rounds)
    steps.begin(f"the index at {blocks:,} blocks")
    yield index.index_row(blocks)
