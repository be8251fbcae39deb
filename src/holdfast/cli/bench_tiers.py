"""`holdfast bench tiers`: host, disk, names, index and recovery, each beside its limit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.limits import GIB
from holdfast.rig import measure_disk, measure_index, measure_node, report
from holdfast.rig.report import Report, Row

ROUNDS_MIN = 5
"""Medians of fewer say little on a shared machine."""

SCRATCH_BYTES = 5 * GIB
RECOVERY_BYTES = 9 * GIB
INDEX_BLOCKS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="paired rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/var/tmp"),  # noqa: S108  # a scratch folder is made inside it
        help="where to put scratch files, 16 GiB at most (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small disk and index: minutes become seconds"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if every goal was met, else 1."""
    if args.rounds < ROUNDS_MIN:
        raise ConfigError(f"--rounds: {args.rounds} is fewer than {ROUNDS_MIN}; raise it")
    console = report.console(args.json)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=args.folder) as scratch,
        console.status("") as status,
    ):
        for about, measure in _steps(Path(scratch), args):
            status.update(about)
            rows += measure()
    found = Report("bench tiers", rows)
    console.print(report.table(found, also=("cpu_s_per_gb", "mixed_us")))
    if args.json:
        report.write(found, args.json)
    return 0 if found.ok else 1


def _steps(
    scratch: Path, args: argparse.Namespace
) -> Sequence[tuple[str, Callable[[], list[Row]]]]:
    rounds = args.rounds
    disk_bytes, blocks = (
        (2 * GIB, INDEX_BLOCKS // 10) if args.quick else (RECOVERY_BYTES, INDEX_BLOCKS)
    )
    return [
        (
            "names, coverage and a plan of 128K tokens",
            lambda: [measure_index.coverage_row(rounds), measure_index.plan_row(rounds)],
        ),
        ("disk beside plain direct I/O", lambda: _disk(scratch / "disk", rounds)),
        (
            "a node: coverage, pages, kill -9",
            lambda: measure_node.node_rows(scratch / "node", rounds, disk_bytes),
        ),
        (f"the index at {blocks:,} blocks", lambda: [measure_index.index_row(blocks)]),
    ]


def _disk(folder: Path, rounds: int) -> list[Row]:
    folder.mkdir()
    return measure_disk.disk_rows(folder, SCRATCH_BYTES - GIB, rounds)
