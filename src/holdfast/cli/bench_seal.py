"""`holdfast bench seal`: what sealing costs a core, and a disk tier."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.rig import measure_seal, report
from holdfast.rig.report import Report

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
        help="where to put scratch files, 4 GiB (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if every goal was met, else 1."""
    if args.rounds < ROUNDS_MIN:
        raise ConfigError(f"--rounds: {args.rounds} is fewer than {ROUNDS_MIN}; raise it")
    measure_seal.need_cipher()
    console = report.console(args.json)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=args.folder) as scratch,
        console.status("a core beside plain AES-256-GCM") as status,
    ):
        rows = measure_seal.core_rows(args.rounds)
        status.update("a disk tier, sealed beside not sealed")
        rows += measure_seal.disk_rows(Path(scratch), args.rounds)
    found = Report("bench seal", rows)
    console.print(report.table(found, also=("cpu_s_per_gb",)))
    if args.json:
        report.write(found, args.json)
    return 0 if found.ok else 1
