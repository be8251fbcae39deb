"""Measure a plan against every other cut of the same contexts.

A search measures each cut; then the best cut is measured again, with new contexts, and the plan is
compared with that second measurement. The smallest of several medians is biased: a plan that takes
the same cut would seem slower than it.

If the plan fetches a context that is held up to the best cut completely, such contexts and complete
ones alternate behind one node, because two identical nodes differ by a tenth. If it does not, the
best cut and the plan's own are measured behind different nodes, and those of the best cut fetch
everything that is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from statistics import mean, median
from typing import NamedTuple, TypeAlias

from holdfast.limits import BLOCK_TOKENS
from holdfast.report import Row, at_most
from holdfast_bench.harness.noise_filter import OtherProcesses, least_disturbed
from holdfast_bench.harness.standard_error import is_conclusive, of_mean, of_median
from holdfast_bench.measure.engine_pair import TAIL_TOKENS, EnginePair, EnginePairSettings

GOAL = 1.10
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SEARCH_ROUNDS_MIN = 4
"""Smallest number of rounds of each cut in the search."""

TURNS = ("held", "best", "best", "held", "best", "held", "held", "best")
"""Planners of consecutive nodes; in this order linear and quadratic drift of the machine's speed
cancels out."""

TURN_ROUNDS_MIN = 3

TIMES_MAX = 3
"""Largest number of repetitions of all turns."""

ORDER = ("whole", "cut", "cut", "whole")
"""Order of contexts behind one node; linear drift of its speed cancels out."""

NODES_MAX = 5
"""Largest number of nodes with alternating contexts."""

PAIRS_MIN = 8
"""Smallest number of pairs whose median has a usable standard error."""

Answer: TypeAlias = tuple[float, int]
"""Seconds to the first token, and tokens fetched."""

Sample: TypeAlias = tuple[Answer, float]
"""An answer, and the share of the machine that other processes used."""


class CutTimes(NamedTuple):
    """Consecutive answers for a context held completely and one held up to the best cut."""

    whole: Answer
    cut: Answer


class CutComparison(NamedTuple):
    """Seconds to the first token as planned and at the best cut; `tokens` that plans fetched."""

    planned_s: float
    best_s: float
    ratio: float
    standard_error: float
    tokens: Sequence[int]


class HeldContext(NamedTuple):
    """A context, and the number of its leading blocks that are held."""

    prompt: Sequence[int]
    blocks: int


def against_cuts(bench: EnginePair, place: str, length: int, settings: EnginePairSettings) -> Row:
    """Find the best cut; compare it with the plan's own cut of contexts held completely."""
    rounds = max(settings.rounds_at(length) // 2, SEARCH_ROUNDS_MIN)
    times = _search(bench, place, length, settings, rounds)
    best = min(times, key=lambda cut: times[cut])
    settings.tell(f"{place}: {length} tokens, the plan beside a cut after {best} blocks")
    beside = _behind_the_same(bench, place, length, best, settings)
    together = beside is not None
    if beside is None:
        beside = _behind_their_own(bench, place, length, best, settings)
    more = {
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
        "standard_error": beside.standard_error,
    }
    return at_most("plan.cut", beside.ratio, "x", GOAL, **more)


def _search(
    bench: EnginePair, place: str, length: int, settings: EnginePairSettings, rounds: int
) -> dict[int, float]:
    """Return the median seconds of each cut, by the number of blocks fetched."""
    cuts = sorted({round(share * length / BLOCK_TOKENS) for share in SHARES})
    settings.tell(f"{place}: {length} tokens, cut after {', '.join(map(str, cuts))} blocks")
    searched = [HeldContext(bench.text(length), cut) for _ in range(rounds) for cut in cuts]
    found: dict[int, list[Sample]] = {cut: [] for cut in cuts}
    for (_, cut), asked in zip(searched, _asked(bench, place, "held", searched), strict=True):
        found[cut].append(asked)
    return {cut: _median_s(each) for cut, each in found.items()}


def _behind_the_same(
    bench: EnginePair, place: str, length: int, best: int, settings: EnginePairSettings
) -> CutComparison | None:
    """Compare complete and cut contexts behind one node; None if plans fetch few cut ones whole."""
    order = ORDER * (settings.rounds_at(length) // 2)
    held = {"whole": length // BLOCK_TOKENS, "cut": best}
    found: list[tuple[CutTimes, float]] = []
    for node in range(1, NODES_MAX + 1):
        contexts = [HeldContext(bench.text(length), held[kind]) for kind in order]
        asked = list(zip(order, _asked(bench, place, "best", contexts), strict=True))
        for two in zip(asked[::2], asked[1::2], strict=True):
            times = CutTimes(**{kind: answer for kind, (answer, _) in two})
            if times.cut[1] == best * BLOCK_TOKENS:
                found.append((times, max(share for _, (_, share) in two)))
        if len(found) <= node * settings.rounds_at(length) // 2:
            return None
        pairs = least_disturbed(found, len(found) // 2)
        ratios = [whole_s / cut_s for (whole_s, _), (cut_s, _) in pairs]
        ratio, standard_error = median(ratios), of_median(ratios)
        if len(ratios) >= PAIRS_MIN and is_conclusive(ratio, standard_error, GOAL):
            break
    planned_s, best_s = (median(pair[side][0] for pair in pairs) for side in (0, 1))
    return CutComparison(
        planned_s, best_s, ratio, standard_error, [both.whole[1] for both in pairs]
    )


def _behind_their_own(
    bench: EnginePair, place: str, length: int, best: int, settings: EnginePairSettings
) -> CutComparison:
    """Compare the plan's own cut with the best cut, behind different nodes.

    Contexts are held completely for the plan, and up to the best cut for that.
    """
    each = max(settings.rounds_at(length) // 4, TURN_ROUNDS_MIN)
    held = {"held": best, "best": length // BLOCK_TOKENS}
    turns: dict[str, list[list[Sample]]] = {"held": [], "best": []}
    for _ in range(TIMES_MAX):
        for plan in TURNS:
            contexts = [HeldContext(bench.text(length), held[plan]) for _ in range(each)]
            turns[plan].append(_asked(bench, place, plan, contexts))
        best_s, planned_s = ([_median_s(turn) for turn in turns[plan]] for plan in turns)
        ratio = mean(planned_s) / mean(best_s)
        standard_error = ratio * hypot(
            of_mean(best_s) / mean(best_s), of_mean(planned_s) / mean(planned_s)
        )
        if is_conclusive(ratio, standard_error, GOAL):
            break
    tokens = [taken for samples in turns["best"] for (_, taken), _ in samples]
    return CutComparison(mean(planned_s), mean(best_s), ratio, standard_error, tokens)


def _median_s(samples: Sequence[Sample]) -> float:
    return median(seconds for seconds, _ in least_disturbed(samples, (len(samples) + 1) // 2))


def _asked(
    bench: EnginePair, place: str, plan: str, contexts: Sequence[HeldContext]
) -> list[Sample]:
    """Place leading blocks of contexts on a tier, behind a node with this planner; time each."""
    parts = [held.prompt[: held.blocks * BLOCK_TOKENS + TAIL_TOKENS] for held in contexts]
    bench.drop_contexts()
    bench.place_contexts(place, plan, [part for part in parts if len(part) > TAIL_TOKENS])
    others = OtherProcesses()
    return [(bench.ttft_s(bench.behind, held.prompt), others.share()) for held in contexts]
