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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple, TypeAlias

from holdfast.rig.ask import NO_HINT
from holdfast.rig.calm import Others, calm
from holdfast.rig.doubt import of_mean, of_median, settled
from holdfast.rig.measure.bench import BYPASS, POOL, Bench, Course
from holdfast.rig.measure.cuts import against_cuts
from holdfast.rig.report import Row, at_most, with_more
from holdfast.rig.server import Engine

PLACES = ("host", "disk", "slow", POOL)
NOWHERE = "nowhere"
CONNECTOR = "connector"
PARTS = (*PLACES, NOWHERE, CONNECTOR)
GOAL = 1.05

TIMES_MAX = 5
"""So often at most are contexts of one length put at their place, each time behind another node."""

PAIRS_MIN = 8
"""Fewer say nothing of how far off their median may be."""

COUPLES = (3, 8)
"""Of engines with and without a connector, at least and at most."""

CONNECTOR_TOKENS = 512


class Pair(NamedTuple):
    """Seconds to the first token one way and the other, and tokens fetched the first way."""

    seconds: float
    without_s: float
    fetched: int

    @property
    def ratio(self) -> float:
        """How much longer the first way took."""
        return self.seconds / self.without_s


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
    found: list[Round] = []
    for time in range(TIMES_MAX):
        found += _behind_a_node(bench, f"{place}, time {time + 1}", place, length, course)
        pairs = calm(found, len(found) // 2)
        ratios = [pair.ratio for pair in pairs]
        ratio, doubt = median(ratios), of_median(ratios)
        if len(ratios) >= PAIRS_MIN and settled(ratio, doubt, GOAL):
            break
    more: dict[str, object] = {
        "source": place,
        "tokens": length,
        "planned_s": median(pair.seconds for pair in pairs),
        "recompute_s": median(pair.without_s for pair in pairs),
        "fetched": median(pair.fetched for pair in pairs),
        "rounds": len(pairs),
        "disturbed": len(found) - len(pairs),
        "doubt": doubt,
    }
    return with_more(at_most("plan.recompute", ratio, "x", GOAL), more)


def _behind_a_node(bench: Bench, what: str, place: str, length: int, course: Course) -> list[Round]:
    """Put contexts at a place, behind a node just started, and ask for them."""
    prompts = [bench.text(length) for _ in range(course.rounds_at(length))]
    course.tell(f"{what}: contexts of {length} tokens are saved")
    bench.clear()
    if place == NOWHERE:
        bench.have("disk", "best", [])
    else:
        bench.have(place, "best", prompts)
    course.tell(f"{what}: contexts of {length} tokens are asked for")
    return _asked(bench, prompts, Way(bench.behind), Way(bench.behind, BYPASS))


def _connector_row(bench: Bench, course: Course) -> Row:
    """Ask couples of engines, one without a connector; each is compared for itself."""
    ratios: list[float] = []
    least, most = COUPLES
    rounds = course.rounds_at(CONNECTOR_TOKENS)
    for couple in range(most):
        course.tell(f"{CONNECTOR}: couple {couple + 1} of engines")
        if couple:
            bench.renew()
        prompts = [bench.text(CONNECTOR_TOKENS) for _ in range(rounds)]
        found = _asked(bench, prompts, Way(bench.behind, BYPASS), Way(bench.alone))
        ratios.append(median(pair.ratio for pair in calm(found, len(found) // 2)))
        if len(ratios) >= least and settled(mean(ratios), of_mean(ratios), GOAL):
            break
    more = {"tokens": CONNECTOR_TOKENS, "rounds": rounds, "couples": ratios}
    row = at_most("plan.connector", mean(ratios), "x", GOAL)
    return with_more(row, {**more, "doubt": of_mean(ratios)})


def _asked(bench: Bench, prompts: Sequence[Sequence[int]], way: Way, without: Way) -> list[Round]:
    """Ask for each context one way and the other; an even number of them."""
    others = Others()
    rounds: list[Round] = []
    for one, other in zip(prompts[::2], prompts[1::2], strict=True):
        others.share()
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
