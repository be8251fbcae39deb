"""`holdfast bench sim`: how fast `holdfast sim` is, and how near to what others published."""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator

import msgspec

from holdfast import report
from holdfast.plan.planner import BestCut
from holdfast.report import Row
from holdfast.sim.curve import curve
from holdfast.sim.fleet import Fleet
from holdfast.sim.formats.load import load
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.shipped import LONGEST_TRACE, find_trace
from holdfast.sim.trace import Trace
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure.published import (
    FETCH_RULE_GB_PER_S,
    FETCH_RULE_TOLERANCE,
    H20_FIRST_TOKEN_S,
    H20_TOLERANCE,
    TOGETHER,
    TOGETHER_TOLERANCE,
    fetch_rule_gb_per_s,
    h20_first_token_s,
    together_over_apart,
    token_hit,
)

ALSO = ("published",)
TRACES = ("conversation", "synthetic")
SPEED_GOAL = 200_000.0
"""Block accesses a second of one core, through four tiers."""
CONVERSATION_GOAL_S = 15.0
MEMORY_GOAL_GB = 2.0
EXACT = 1e-9
CURVE_BLOCKS = (1_000, 5_860, 19_532)

_FOUR_TIERS = {
    "engine": {"gpu": "H100x8"},
    "tiers": [
        {"kind": "device", "medium": "hbm", "capacity": "400 GiB"},
        {"kind": "host", "medium": "ddr5", "units": 16},
        {"kind": "disk", "medium": "nvme-tlc", "units": 2, "capacity": "4 TiB"},
        {"kind": "pool", "medium": "pool-flash", "units": 4, "capacity": "32 TiB"},
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 3, "runs through four tiers", least=1)
    measuring.add_quick_argument(parser, "leave out the trace of 42 million block accesses")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    names = TRACES if args.quick else (*TRACES, LONGEST_TRACE)
    steps.plan(len(names))
    for name in names:
        steps.begin(name)
        trace = load(find_trace(name))
        yield from _speed(trace, name, args.rounds)
        if name in TOGETHER:
            yield from _like_curve(trace, name)
            yield _near(f"{name}.together", together_over_apart(trace), TOGETHER[name])
    for tier, published_s in H20_FIRST_TOKEN_S.items():
        yield _near(f"h20.{tier}", h20_first_token_s(tier), published_s, "s", H20_TOLERANCE)
    for gpu, published in FETCH_RULE_GB_PER_S.items():
        found = fetch_rule_gb_per_s(gpu)
        yield _near(f"fetch_rule.{gpu}", found, published, "GB/s", FETCH_RULE_TOLERANCE)


def _speed(trace: Trace, name: str, rounds: int) -> Iterator[Row]:
    """Four tiers, one worker: seconds of this process's CPU, median of a few runs."""
    hardware = resolve(
        parse_ladder(_FOUR_TIERS), shipped(), trace.block_tokens, load_model("Llama-3.1-70B")
    )

    def simulate() -> None:
        fleet = Fleet(hardware, 1, rules_of(hardware))
        Simulation(trace, fleet, SimulationSettings(BestCut(), ROUTERS["least_queue"])).run()

    _, spent_s = measuring.cpu_timed(simulate, rounds)
    yield report.at_least(f"{name}.speed", trace.blocks / spent_s, "blocks/s", SPEED_GOAL)
    if name == "conversation":
        yield report.at_most(f"{name}.cpu", spent_s, "s", CONVERSATION_GOAL_S)
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        yield report.at_most(f"{name}.memory", peak_gb, "GB", MEMORY_GOAL_GB)


def _like_curve(trace: Trace, name: str) -> Iterator[Row]:
    """One tier and no time: the hits of the exact LRU curve, which is the limit."""
    exact = curve(trace)
    for blocks in CURVE_BLOCKS:
        tier = {"kind": "host", "capacity_tokens": blocks * trace.block_tokens}
        hit = token_hit(trace, tier, ROUTERS["round_robin"], 1, {"prefill": {}})
        limit = exact.token_hit(blocks)
        row = report.share(f"{name}.one_tier_{blocks}", hit, "tokens", limit)
        yield msgspec.structs.replace(row, ok=abs(hit - limit) <= EXACT)


def _near(
    what: str,
    value: float,
    published: float,
    unit: str = "times",
    tolerance: float = TOGETHER_TOLERANCE,
) -> Row:
    ok = abs(value / published - 1) <= tolerance
    return Row(what=what, value=value, unit=unit, ok=ok, more={"published": published})
