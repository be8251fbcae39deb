"""`holdfast bench traces`: exact curves and bounds of the shipped traces, beside published ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from holdfast import report
from holdfast.report import Row
from holdfast.sim.belady import belady
from holdfast.sim.curve import HitCurve, curve
from holdfast.sim.formats.load import load
from holdfast.sim.retention import retention
from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.shipped import LONGEST_TRACE, SHIPPED, find_trace
from holdfast.sim.statistics import statistics
from holdfast.sim.trace import Trace
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps

ALSO = ("published",)
TOLERANCE = 0.005
SPEED_GOAL = 1.0
"""Million block accesses a second on one core, for all capacities at once."""
SMALL = 100_000
"""A trace with fewer block accesses says nothing about speed."""
SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)
TTLS_S = (60.0, 300.0, 3600.0)
OF_MAX = {"tenth": 0.1, "half": 0.5, "most": 0.95}
"""Sizes that are looked at: where LRU has these shares of the hits of a store without end."""

# Block hits of leaf-first LRU at SHARES of the different blocks, by an independent survey of
# September 2026 that its authors computed from the raw files.
SURVEY = {
    "conversation": (0.052, 0.195, 0.278, 0.353, 0.363),
    "synthetic": (0.034, 0.155, 0.260, 0.443, 0.589),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        help="files of any known format, or names of shipped traces (default: all of those)",
    )
    measuring.add_rounds_argument(parser, 3, "how often speed is measured", least=1)
    measuring.add_quick_argument(parser, "leave out the trace of 42 million block accesses")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    names = {file: name for name, file in SHIPPED.items()}
    chosen = args.traces or [name for name in SHIPPED if not args.quick or name != LONGEST_TRACE]
    steps.plan(len(chosen))
    for path in [find_trace(text) for text in chosen]:
        steps.begin(path.name)
        trace = load(path)
        yield from _rows(trace, names.get(path.name, trace.name), args.rounds)


def _rows(trace: Trace, name: str, rounds: int) -> Iterator[Row]:
    """Every figure of one trace."""
    runs, curve_s = measuring.cpu_timed(lambda: reuse(trace), rounds)
    found, count_s = measuring.cpu_timed(lambda: curve(trace, runs), rounds)
    if trace.blocks >= SMALL:
        speed = trace.blocks / (curve_s + count_s) / 1e6
        yield report.at_least(f"{name}.curve", speed, "M/s", SPEED_GOAL)
    taken = statistics(trace, runs)
    yield Row(what=f"{name}.infinite", value=taken.infinite_token_hit, unit="tokens")
    if not taken.infinite_token_hit:
        return
    yield from _survey(trace, name, found)
    yield from _bounds(trace, name, runs, found)
    ttls_s = [ttl_s for ttl_s in TTLS_S if ttl_s < trace.span_s]
    for kept in retention(trace, ttls_s, runs):
        yield Row(
            what=f"{name}.ttl_{kept.ttl_s:g}_s",
            value=kept.token_hit,
            unit="tokens",
            more={"mean_blocks": round(kept.mean_blocks), "peak_blocks": kept.peak_blocks},
        )


def _survey(trace: Trace, name: str, found: HitCurve) -> Iterator[Row]:
    for share, published in zip(SHARES, SURVEY.get(name, ()), strict=False):
        hit = found.block_hit(round(share * trace.unique))
        yield Row(
            what=f"{name}.lru_{share:.0%}",
            value=hit,
            unit="blocks",
            ok=abs(hit - published) <= TOLERANCE,
            more={"published": published},
        )


def _bounds(trace: Trace, name: str, runs: Reuse, found: HitCurve) -> Iterator[Row]:
    """LRU beside the oracle, which is its limit, at three sizes."""
    for label, share in OF_MAX.items():
        blocks = found.capacity_for(share)
        (bound,) = belady(trace, [blocks], runs)
        hit, limit = found.token_hit(blocks), bound.token_hit
        yield report.share(f"{name}.lru_{label}", hit, "tokens", limit, blocks=blocks)
