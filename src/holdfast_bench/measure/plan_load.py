"""Measure plans while several requests arrive at once, against fetching all and recomputing all.

One request computes what a slow tier holds. Of several, those that would wait behind the others'
prefill fetch instead: with the load, the cut moves towards the tier. The row shows it as the share
of the held tokens that the engine got from the node.

The ways take turns, in an order in which linear drift of the machine's speed cancels out. A node
keeps only the blocks on disk when it restarts, so contexts that one planner fetched are on their
tier again for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot
from statistics import mean, median
from typing import NamedTuple

from holdfast.report import Row, at_most
from holdfast_bench.harness.completion import NO_HINT, fetched_tokens
from holdfast_bench.harness.standard_error import of_median
from holdfast_bench.measure.engine_pair import (
    BYPASS,
    TAIL_TOKENS,
    EnginePair,
    EnginePairSettings,
)

GOAL = 1.05
LOADS = (1, 4, 16)
QUICK_LOADS = (1, 4)
TOKENS = 1024
QUICK_TOKENS = 512
BURSTS = 4
"""Smallest number of bursts of each way and load, an even one; the median of their means counts."""

REQUESTS_MIN = 16
"""Smallest number of requests of each way and load: small bursts are more of them."""


class BurstWay(NamedTuple):
    """A way to answer a burst: the node's planner, and the requests' hint."""

    plan: str
    hint: Mapping[str, object] = NO_HINT


WAYS = {
    "planned": BurstWay("best"),
    "fetch": BurstWay("held"),
    "recompute": BurstWay("held", BYPASS),
}

TURNS = ("planned", "fetch", "recompute", "recompute", "fetch", "planned")


class BurstTimes(NamedTuple):
    """Mean seconds to the first token of a burst, and the share of held tokens that came."""

    first_token_s: float
    fetched_share: float


def under_load(
    bench: EnginePair, place: str, tokens: int, at_once: int, settings: EnginePairSettings
) -> Row:
    """Measure bursts of `at_once` contexts that a tier holds, as planned and in both other ways."""
    count = max(BURSTS, REQUESTS_MIN // at_once)
    bursts = [[bench.text(tokens) for _ in range(at_once)] for _ in range(count)]
    what = f"{place}: {at_once} at once of {tokens} tokens"
    settings.tell(f"{what} are saved")
    bench.drop_contexts()
    bench.place_contexts(place, "best", [prompt for burst in bursts for prompt in burst])
    plan, halves = "best", (bursts[: count // 2], bursts[count // 2 :])
    found: dict[str, list[BurstTimes]] = {name: [] for name in WAYS}
    for name in TURNS:
        way = WAYS[name]
        settings.tell(f"{what}, {name}")
        if way.plan != plan:
            plan = way.plan
            bench.restart_node(place, plan)
        half = halves[bool(found[name])]
        found[name] += [_burst(bench, burst, way.hint) for burst in half]
    times = {name: [each.first_token_s for each in way] for name, way in found.items()}
    seconds = {name: median(each) for name, each in times.items()}
    errors = {name: of_median(each) / seconds[name] for name, each in times.items()}
    better = min("fetch", "recompute", key=lambda name: seconds[name])
    ratio = seconds["planned"] / seconds[better]
    more = {
        "source": place,
        "tokens": tokens,
        "at_once": at_once,
        **{f"{name}_s": each for name, each in seconds.items()},
        "fetched_share": mean(each.fetched_share for each in found["planned"]),
        "bursts": count,
        "standard_error": ratio * hypot(errors["planned"], errors[better]),
    }
    return at_most("plan.load", ratio, "x", GOAL, **more)


def _burst(
    bench: EnginePair, prompts: Sequence[Sequence[int]], hint: Mapping[str, object]
) -> BurstTimes:
    before = fetched_tokens(bench.behind)
    times = bench.burst_s(bench.behind, prompts, hint)
    held = sum(len(prompt) - TAIL_TOKENS for prompt in prompts)
    return BurstTimes(mean(times), (fetched_tokens(bench.behind) - before) / held)
