"""`holdfast bench traces`: exact curves and bounds of the shipped traces, beside published ones."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.rig import report
from holdfast.rig.report import Report, Row
from holdfast.sim.belady import belady
from holdfast.sim.curve import Curve, curve
from holdfast.sim.formats.load import load
from holdfast.sim.retention import retention
from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.shipped import SHIPPED, find_trace
from holdfast.sim.statistics import statistics
from holdfast.sim.trace import Trace

TOLERANCE = 0.005
SPEED_GOAL = 1.0
"""Million block accesses a second on one core, for all capacities at once."""
SMALL = 100_000
"""A trace with fewer block accesses says nothing about speed."""
ROUNDS = 3
SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)
TTLS_S = (60.0, 300.0, 3600.0)
OF_MAX = {"tenth": 0.1, "half": 0.5, "most": 0.95}
"""Sizes that are looked at: where LRU has these shares of the hits of a store without end."""

Result = TypeVar("Result")

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
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if every goal was met, else 1."""
    names = {file: name for name, file in SHIPPED.items()}
    paths = [find_trace(text) for text in args.traces or SHIPPED]
    console = report.console(args.json)
    rows: list[Row] = []
    with console.status("") as status:
        for path in paths:
            status.update(path.name)
            trace = load(path)
            rows += _rows(trace, names.get(path.name, trace.name))
    found = Report("bench traces", rows)
    console.print(report.table(found, also=("published",)))
    if args.json:
        report.write(found, args.json)
    return 0 if found.ok else 1


def _rows(trace: Trace, name: str) -> Iterator[Row]:
    """Every figure of one trace."""
    runs, curve_s = _timed(lambda: reuse(trace))
    found, count_s = _timed(lambda: curve(trace, runs))
    if trace.blocks >= SMALL:
        speed = trace.blocks / (curve_s + count_s) / 1e6
        yield report.at_least(f"{name}.curve", speed, "M/s", SPEED_GOAL)
    taken = statistics(trace, runs)
    yield _hit(f"{name}.infinite", taken.infinite_token_hit)
    if not taken.infinite_token_hit:
        return
    yield from _survey(trace, name, found)
    yield from _bounds(trace, name, runs, found)
    ttls_s = [ttl_s for ttl_s in TTLS_S if ttl_s < trace.span_s]
    for kept in retention(trace, ttls_s, runs):
        row = _hit(f"{name}.ttl_{kept.ttl_s:g}_s", kept.token_hit)
        more: dict[str, object] = {
            "mean_blocks": round(kept.mean_blocks),
            "peak_blocks": kept.peak_blocks,
        }
        yield report.with_more(row, more)


def _survey(trace: Trace, name: str, found: Curve) -> Iterator[Row]:
    for share, published in zip(SHARES, SURVEY.get(name, ()), strict=False):
        hit = found.block_hit(round(share * trace.unique))
        yield Row(
            what=f"{name}.lru_{share:.0%}",
            value=hit,
            unit="blocks",
            ok=abs(hit - published) <= TOLERANCE,
            more={"published": published},
        )


def _bounds(trace: Trace, name: str, runs: Reuse, found: Curve) -> Iterator[Row]:
    """LRU beside the oracle, which is its limit, at three sizes."""
    for label, share in OF_MAX.items():
        blocks = found.capacity_for(share)
        (bound,) = belady(trace, [blocks], runs)
        row = report.share(
            f"{name}.lru_{label}", found.token_hit(blocks), "tokens", bound.token_hit
        )
        yield report.with_more(row, {"blocks": blocks})


def _hit(what: str, share: float) -> Row:
    return Row(what=what, value=share, unit="tokens")


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and the median seconds of this process's CPU over a few rounds."""
    taken = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        result = work()
        taken.append(time.process_time() - begin)
    return result, sorted(taken)[ROUNDS // 2]
