"""`holdfast bench pool`: a target over loopback TCP, beside plain sockets and other stores."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.rig import measure_peers, measure_pool, measure_trouble, report
from holdfast.rig.report import Report, Row

ROUNDS_MIN = 5
"""Medians of fewer say little on a shared machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="paired rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/var/tmp"),  # noqa: S108  # a scratch folder is made inside it
        help="where to put logs and certificates (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if every goal was met, else 1. Takes 6 GiB of memory."""
    if args.rounds < ROUNDS_MIN:
        raise ConfigError(f"--rounds: {args.rounds} is fewer than {ROUNDS_MIN}; raise it")
    console = report.console(args.json)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=args.folder) as scratch,
        console.status("") as status,
    ):
        status.update("a target beside plain sockets")
        rows += measure_pool.pool_rows(Path(scratch), args.rounds)
        status.update("the same under TLS")
        rows += measure_pool.sealed_rows(Path(scratch), args.rounds)
        status.update("the same over NIXL")
        rows += measure_pool.nixl_rows(Path(scratch), args.rounds)
        status.update("a join, and a target that is late")
        rows += measure_trouble.trouble_rows(Path(scratch))
        rows += measure_peers.peer_rows(
            Path(scratch), max(ROUNDS_MIN, args.rounds // 3), status.update
        )
    found = Report("bench pool", rows)
    console.print(report.table(found, also=("near_s_per_gb", "far_s_per_gb", "plain_us")))
    if args.json:
        report.write(found, args.json)
    return 0 if found.ok else 1
