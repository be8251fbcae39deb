"""Measure plans while several requests arrive at once, against fetching all and recomputing all.

One request computes what a slow tier holds. Of several, those that would wait behind the others'
prefill fetch instead: with the load, the cut moves towards the tier. The row shows it as the share
of the held blocks that plans fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from holdfast.report import Row, at_most
from holdfast_bench.harness.completion import NO_HINT
from holdfast_bench.measure.engine_pair import BYPASS, EnginePair, EnginePairSettings

GOAL = 1.05
LOADS = (1, 4, 16)
QUICK_LOADS = (1, 4)
TOKENS = 2048
QUICK_TOKENS = 512
BURSTS = 4
"""Bursts of each way and load; the median of their means counts."""


class BurstWay(NamedTuple):
    """A way to answer a burst: the node's planner, and the requests' hint."""

    plan: str
    hint: Mapping[str, object] = NO_HINT


WAYS = {
    "planned": BurstWay("best"),
    "fetch": BurstWay("held"),
    "recompute": BurstWay("best", BYPASS),
}


class BurstTimes(NamedTuple):
    """Mean seconds to the first token of a burst, and the share of held blocks that plans fetch."""

    first_token_s: float
    fetched_share: float


def under_load(
    bench: EnginePair, place: str, tokens: int, at_once: int, settings: EnginePairSettings
) -> Row:
    """Measure bursts of `at_once` contexts that a tier holds, as planned and in both other ways."""
    found: dict[str, list[BurstTimes]] = {}
    for name, way in WAYS.items():
        settings.tell(f"{place}: {at_once} at once of {tokens} tokens, {name}")
        bursts = [[bench.text(tokens) for _ in range(at_once)] for _ in range(BURSTS)]
        bench.drop_contexts()
        bench.place_contexts(place, way.plan, [prompt for burst in bursts for prompt in burst])
        found[name] = [_burst(bench, burst, way.hint) for burst in bursts]
    seconds = {name: median(each.first_token_s for each in way) for name, way in found.items()}
    more = {
        "source": place,
        "tokens": tokens,
        "at_once": at_once,
        **{f"{name}_s": each for name, each in seconds.items()},
        "fetched_share": mean(each.fetched_share for each in found["planned"]),
        "bursts": BURSTS,
    }
    better = min(seconds["fetch"], seconds["recompute"])
    return at_most("plan.load", seconds["planned"] / better, "x", GOAL, **more)


def _burst(
    bench: EnginePair, prompts: Sequence[Sequence[int]], hint: Mapping[str, object]
) -> BurstTimes:
    times = bench.burst_s(bench.behind, prompts, hint)
    plans = bench.node.plans()["plans"][: len(prompts)]
    held = sum(plan["held_blocks"] for plan in plans)
    share = sum(plan["blocks"] for plan in plans) / held if held else 0.0
    return BurstTimes(mean(times), share)
