"""`holdfast bench pool`: a target over loopback TCP, beside plain sockets and other stores."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec

from holdfast.report import Row, not_measured
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.measure import degraded_pool, peers, placement, pool, silent_pool, stripes
from holdfast_bench.measure.silent_pool import SilentPoolSettings

ALSO = ("local_cpu_s_per_gb", "remote_cpu_s_per_gb", "plain_us", "alone_s", "why")

MODEL = "demo"
PAIRS = 2
"""Pairs of requests to engines for each round: they differ by a tenth, and a twentieth counts."""
PARTS = {
    "sockets": "a target beside plain sockets",
    "tls": "the same under TLS",
    "nixl": "the first over NIXL, if it is installed",
    "placement": "segments moved by a join, prefixes usable after a loss, reads caused by "
    "1,000 threads; no timing",
    "stripes": "contexts whole after a loss and what that costs (no timing); one context over four "
    "links of 1 Gbit/s, as root",
    "trouble": "a member that joins, one late target, all targets stopped",
    "engine": "a real engine while all targets are mute, if vLLM is installed",
    "peers": "other stores, those that are installed",
}
QUICK = ("sockets", "tls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_folder_argument(parser, "logs and certificates")
    measuring.add_only_argument(parser, PARTS)
    measuring.add_quick_argument(parser, f"the same as --only {' '.join(QUICK)}")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures. Takes 6 GiB of memory."""
    rows: list[Row] = []
    for row in _parts(args, steps):
        rows.append(row)
        yield row
    yield from peers.beside_rows(rows)


def _parts(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    parts = args.only or (QUICK if args.quick else PARTS)
    fewer = max(measuring.ROUNDS_MIN, args.rounds // 3)
    with measuring.scratch(args.folder) as scratch:
        chosen = [name for name in PARTS if name in parts]
        steps.plan(len(chosen))
        for part in chosen:
            steps.begin(PARTS[part])
            match part:
                case "sockets":
                    yield from pool.pool_rows(scratch, args.rounds)
                case "tls":
                    yield from pool.sealed_rows(scratch, args.rounds)
                case "nixl":
                    yield from pool.nixl_rows(scratch, args.rounds)
                case "placement":
                    yield from placement.placement_rows(scratch)
                case "stripes":
                    yield from stripes.stripe_rows(scratch)
                case "trouble":
                    yield from degraded_pool.trouble_rows(scratch)
                case "engine" if find_spec("vllm") is None:
                    yield not_measured("pool.engine", measuring.NO_VLLM)
                case "engine":
                    settings = SilentPoolSettings(
                        model.make(MODEL),
                        model.SHAPES[MODEL].vocabulary,
                        PAIRS * args.rounds,
                        steps.update,
                    )
                    yield from silent_pool.mute_rows(scratch / "engine", settings)
                case "peers":
                    yield from peers.peer_rows(scratch, fewer, steps.update)
