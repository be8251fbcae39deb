"""`holdfast bench pool`: a target over loopback TCP, beside plain sockets and other stores."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli import measuring
from holdfast.rig import measure_peers, measure_pool, measure_trouble
from holdfast.rig.report import Row

if TYPE_CHECKING:
    from rich.status import Status

ALSO = ("near_s_per_gb", "far_s_per_gb", "plain_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_folder_argument(parser, "logs and certificates")
    measuring.add_quick_argument(parser, "plain sockets and TLS only: no trouble, no other stores")


def measure(args: argparse.Namespace, status: Status) -> Iterator[Row]:
    """Yield the figures. Takes 6 GiB of memory."""
    with measuring.scratch(args.folder) as scratch:
        status.update("a target beside plain sockets")
        yield from measure_pool.pool_rows(scratch, args.rounds)
        status.update("the same under TLS")
        yield from measure_pool.sealed_rows(scratch, args.rounds)
        if args.quick:
            return
        status.update("the same over NIXL")
        yield from measure_pool.nixl_rows(scratch, args.rounds)
        status.update("a join, and a target that is late")
        yield from measure_trouble.trouble_rows(scratch)
        rounds = max(measuring.ROUNDS_MIN, args.rounds // 3)
        yield from measure_peers.peer_rows(scratch, rounds, status.update)
