"""Measure plans on a real engine: against recomputing, and against every other cut.

An engine is held against itself, asked to bypass Holdfast for the same context: two engines that do
the very same differ by a twentieth for as long as they live. Like is compared with like: one that
is asked again at once still spins from the time before, which costs a short context a tenth. So of
two contexts each way is asked for one behind itself, and for one at rest. Contexts beside which
others of the machine computed are left out.

What a connector costs a request that bypasses it is measured by itself, against engines without
one, where only several couples of engines say something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple, TypeAlias

from holdfast.rig.ask import NO_HINT
from holdfast.rig.calm import Others, calm
from holdfast.rig.measure.bench import BYPASS, Bench, Course
from holdfast.rig.measure.cuts import against_cuts
from holdfast.rig.report import Row, at_most, with_more
from holdfast.rig.server import Engine

PLACES = ("host", "disk", "slow")
NOWHERE = "nowhere"
CONNECTOR = "connector"
PARTS = (*PLACES, NOWHERE, CONNECTOR)
GOAL = 1.05
COUPLES = 4
CONNECTOR_TOKENS = 512


class Pair(NamedTuple):
    """Seconds to the first token one way and the other, and tokens fetched the first way."""

    seconds: float
    without_s: float
    fetched: int


Round: TypeAlias = tuple[Pair, float]
"""A pair, and the share of the machine others had meanwhile."""


class Way(NamedTuple):
    """Which engine is asked, and what it is told."""

    engine: Engine
    hint: Mapping[str, object] = NO_HINT


def plan_rows(
    stack: ExitStack, folder: Path, course: Course, parts: Sequence[str] = PARTS
) -> Iterator[Row]:
    """Yield what plans gain and cost at each length, from each place; then against other cuts."""
    bench = Bench(stack, folder, course)
    for place in parts:
        if place == CONNECTOR:
            yield _connector_row(bench, course)
            continue
        if place not in ("host", NOWHERE):
            bench.meet(place)
        for length in course.cut_lengths if place == NOWHERE else course.lengths:
            yield _against_recompute(bench, place, length, course)
        for length in course.cut_lengths if place != NOWHERE else ():
            yield against_cuts(bench, place, length, course)


def _against_recompute(bench: Bench, place: str, length: int, course: Course) -> Row:
    """Ask for contexts that are held at a place, or nowhere, as planned and bypassing it."""
    prompts = [bench.text(length) for _ in range(course.rounds_at(length))]
    course.tell(f"{place}: contexts of {length} tokens are saved")
    bench.clear()
    if place == NOWHERE:
        bench.have("disk", "best", [])
    else:
        bench.have(place, "best", prompts)
    planned, without = Way(bench.behind), Way(bench.behind, BYPASS)
    found = _asked(bench, prompts, planned, without, lambda said: course.tell(f"{place}: {said}"))
    pairs = calm(found, len(found) // 2)
    more: dict[str, object] = {
        "source": place,
        "tokens": length,
        "planned_s": median(pair.seconds for pair in pairs),
        "recompute_s": median(pair.without_s for pair in pairs),
        "fetched": median(pair.fetched for pair in pairs),
        "rounds": len(pairs),
        "disturbed": len(found) - len(pairs),
    }
    return with_more(at_most("plan.recompute", _ratio(pairs), "x", GOAL), more)


def _connector_row(bench: Bench, course: Course) -> Row:
    """Ask couples of engines, one without a connector; each is compared for itself."""
    ratios: list[float] = []
    times = course.rounds_at(CONNECTOR_TOKENS)
    for couple in range(COUPLES):
        if couple:
            course.tell(f"couple {couple + 1} of {COUPLES} starts")
            bench.renew()
        prompts = [bench.text(CONNECTOR_TOKENS) for _ in range(times)]
        ways = Way(bench.behind, BYPASS), Way(bench.alone)
        found = _asked(bench, prompts, *ways, course.tell)
        ratios.append(_ratio(calm(found, len(found) // 2)))
    more = {"tokens": CONNECTOR_TOKENS, "rounds": times, "couples": ratios}
    return with_more(at_most("plan.connector", mean(ratios), "x", GOAL), more)


def _asked(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    way: Way,
    without: Way,
    tell: Callable[[str], None],
) -> list[Round]:
    """Ask for each context one way and the other; an even number of them."""
    others = Others()
    rounds: list[Round] = []
    for turn in range(0, len(prompts), 2):
        tell(f"round {turn + 1} of {len(prompts)}")
        others.share()
        one, other = prompts[turn : turn + 2]
        pairs = _like_with_like(bench, one, other, way, without)
        share = others.share()
        rounds += [(pair, share) for pair in pairs]
    return rounds


def _like_with_like(
    bench: Bench, one: Sequence[int], other: Sequence[int], way: Way, without: Way
) -> tuple[Pair, Pair]:
    """Ask for two contexts; each pair was asked of engines in the same state.

    The engine of `way` was asked last.
    """
    again, tokens = bench.ttft_s(way.engine, one, way.hint)
    bench.rest()
    rested_without, _ = bench.ttft_s(without.engine, one, without.hint)
    again_without, _ = bench.ttft_s(without.engine, other, without.hint)
    bench.rest()
    rested, other_tokens = bench.ttft_s(way.engine, other, way.hint)
    return Pair(again, again_without, tokens), Pair(rested, rested_without, other_tokens)


def _ratio(pairs: Sequence[Pair]) -> float:
    return median(pair.seconds / pair.without_s for pair in pairs)
