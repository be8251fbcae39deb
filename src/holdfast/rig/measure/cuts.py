"""Measure a plan against every other cut of the same contexts.

The best cut is found by trying each; then it is measured again, with contexts of its own, and that
is what the plan is held against. The smallest of several medians is small by luck, too: a plan that
takes that very cut would come out slower than it.

Where the plan takes whole what is held up to the best cut, contexts cut there and whole ones are
asked for by turns behind the same node: two that were started alike differ by a tenth. Where it
does not, each is asked for behind nodes of its own, of which some fetch whatever is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import hypot
from statistics import mean, median
from typing import NamedTuple, TypeAlias

from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.calm import Others, calm
from holdfast.rig.doubt import of_mean, of_median, settled
from holdfast.rig.measure.bench import TAIL_TOKENS, Bench, Course
from holdfast.rig.report import Row, at_most, with_more

GOAL = 1.10
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SEARCH_ROUNDS_MIN = 4
"""Of each cut that is tried."""

TURNS = ("held", "best", "best", "held", "best", "held", "held", "best")
"""A node of its own for each; in this order neither comes off better on a machine that becomes
slower, or becomes so ever faster."""

TURN_ROUNDS_MIN = 3

TIMES_MAX = 3
"""So often at most are all turns taken."""

ORDER = ("whole", "cut", "cut", "whole")
"""Of contexts behind one node: neither comes off better as it becomes slower."""

NODES_MAX = 5
"""So many nodes at most are asked for both."""

PAIRS_MIN = 8
"""Fewer say nothing of how far off their median may be."""

Answer: TypeAlias = tuple[float, int]
"""Seconds to the first token, and tokens fetched."""

Sample: TypeAlias = tuple[Answer, float]
"""And the share of the machine others had meanwhile."""


class Both(NamedTuple):
    """A context held whole and one held up to the best cut, asked for one behind the other."""

    whole: Answer
    cut: Answer


class Beside(NamedTuple):
    """Seconds to the first token as planned and at the best cut, how far apart, what was taken."""

    planned_s: float
    best_s: float
    ratio: float
    doubt: float
    tokens: Sequence[int]


class Held(NamedTuple):
    """A context, and how many leading blocks of it are held."""

    prompt: Sequence[int]
    blocks: int


def against_cuts(bench: Bench, place: str, length: int, course: Course) -> Row:
    """Find the best cut, measure it anew, and the plan's own cut of contexts held whole."""
    rounds = max(course.rounds_at(length) // 2, SEARCH_ROUNDS_MIN)
    times = _search(bench, place, length, course, rounds)
    best = min(times, key=lambda cut: times[cut])
    course.tell(f"{place}: {length} tokens, the plan beside a cut after {best} blocks")
    beside = _behind_the_same(bench, place, length, best, course)
    together = beside is not None
    if beside is None:
        beside = _behind_their_own(bench, place, length, best, course)
    more: dict[str, object] = {
        "source": place,
        "tokens": length,
        "planned_s": beside.planned_s,
        "planned_cut": median(beside.tokens) / BLOCK_TOKENS,
        "best_cut": best,
        "best_s": beside.best_s,
        "cuts_s": {str(cut): seconds for cut, seconds in times.items()},
        "rounds": rounds,
        "beside": len(beside.tokens),
        "same_node": together,
        "doubt": beside.doubt,
    }
    return with_more(at_most("plan.cut", beside.ratio, "x", GOAL), more)


def _search(bench: Bench, place: str, length: int, course: Course, rounds: int) -> dict[int, float]:
    """Return the seconds of each cut, by how many blocks are fetched."""
    cuts = sorted({round(share * length / BLOCK_TOKENS) for share in SHARES})
    course.tell(f"{place}: {length} tokens, cut after {', '.join(map(str, cuts))} blocks")
    searched = [Held(bench.text(length), cut) for _ in range(rounds) for cut in cuts]
    found: dict[int, list[Sample]] = {cut: [] for cut in cuts}
    for (_, cut), asked in zip(searched, _asked(bench, place, "held", searched), strict=True):
        found[cut].append(asked)
    return {cut: _median_s(each) for cut, each in found.items()}


def _behind_the_same(
    bench: Bench, place: str, length: int, best: int, course: Course
) -> Beside | None:
    """Ask for contexts held whole and cut, as planned; None if most cut ones come not whole."""
    found: list[tuple[Both, float]] = []
    for node in range(1, NODES_MAX + 1):
        asked = _pairs(bench, place, length, best, course)
        found += [pair for pair in asked if pair[0].cut[1] == best * BLOCK_TOKENS]
        if len(found) <= node * course.rounds_at(length) // 2:
            return None
        pairs = calm(found, len(found) // 2)
        ratios = [whole_s / cut_s for (whole_s, _), (cut_s, _) in pairs]
        ratio, doubt = median(ratios), of_median(ratios)
        if len(ratios) >= PAIRS_MIN and settled(ratio, doubt, GOAL):
            break
    planned_s, best_s = (median(pair[side][0] for pair in pairs) for side in (0, 1))
    return Beside(planned_s, best_s, ratio, doubt, [both.whole[1] for both in pairs])


def _pairs(
    bench: Bench, place: str, length: int, best: int, course: Course
) -> Iterator[tuple[Both, float]]:
    """Ask one node for whole contexts and cut ones by turns; with each pair, others' share."""
    order = ORDER * (course.rounds_at(length) // 2)
    held = {"whole": length // BLOCK_TOKENS, "cut": best}
    contexts = [Held(bench.text(length), held[kind]) for kind in order]
    asked = list(zip(order, _asked(bench, place, "best", contexts), strict=True))
    for two in zip(asked[::2], asked[1::2], strict=True):
        taken = {kind: answer for kind, (answer, _) in two}
        yield Both(**taken), max(share for _, (_, share) in two)


def _behind_their_own(bench: Bench, place: str, length: int, best: int, course: Course) -> Beside:
    """Ask for the plan's own cut behind some nodes, for the best one behind others."""
    turns: dict[str, list[list[Sample]]] = {"held": [], "best": []}
    for _ in range(TIMES_MAX):
        for plan, samples in _turns(bench, place, length, best, course):
            turns[plan].append(samples)
        best_s, planned_s = ([_median_s(each) for each in turns[plan]] for plan in turns)
        ratio = mean(planned_s) / mean(best_s)
        doubt = ratio * hypot(of_mean(best_s) / mean(best_s), of_mean(planned_s) / mean(planned_s))
        if settled(ratio, doubt, GOAL):
            break
    tokens = [taken for samples in turns["best"] for (_, taken), _ in samples]
    return Beside(mean(planned_s), mean(best_s), ratio, doubt, tokens)


def _turns(
    bench: Bench, place: str, length: int, best: int, course: Course
) -> Iterator[tuple[str, list[Sample]]]:
    """Ask for contexts cut where that was best, and for whole ones as the plan sees fit."""
    each = max(course.rounds_at(length) // 4, TURN_ROUNDS_MIN)
    for plan in TURNS:
        blocks = best if plan == "held" else length // BLOCK_TOKENS
        contexts = [Held(bench.text(length), blocks) for _ in range(each)]
        yield plan, _asked(bench, place, plan, contexts)


def _median_s(samples: Sequence[Sample]) -> float:
    return median(seconds for seconds, _ in calm(samples, (len(samples) + 1) // 2))


def _asked(bench: Bench, place: str, plan: str, contexts: Sequence[Held]) -> list[Sample]:
    """Have leading blocks of contexts at a place, behind a node that plans so; ask each once."""
    parts = [held.prompt[: held.blocks * BLOCK_TOKENS + TAIL_TOKENS] for held in contexts]
    bench.clear()
    bench.have(place, plan, [part for part in parts if len(part) > TAIL_TOKENS])
    others = Others()
    return [(bench.ttft_s(bench.behind, held.prompt), others.share()) for held in contexts]
