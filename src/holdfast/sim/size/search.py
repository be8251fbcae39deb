"""Find the cheapest ladder that gives the first token in time: every combination on a grid.

A candidate has at most one host tier, one tier of flash (local or of a pool) and one object store,
each with one of a few capacities. There are some hundreds; each is worked out by `size.need`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import ConfigError
from holdfast.sim.formulas import GB
from holdfast.sim.size.demand import Floats
from holdfast.sim.size.need import Need, Rung, need
from holdfast.sim.size.question import Question, Wish

_FRACTIONS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Capacities that are tried, as shares of what a store that never evicts would hold."""

_FRONTIER_POINTS = 12
_FINALISTS = 12
_HIT_STEP = 0.002
_FLOORS = (("host",), ("disk", "pool"), ("object",))


class Answer(NamedTuple):
    """The cheapest ladder, what it costs without any, and what other times would cost."""

    best: Need
    without: Need
    """Everything computed: the load without context memory."""
    frontier: tuple[Need, ...]
    """The cheapest ladder for each of several times to first token, quickest first."""
    by_hits: tuple[Need, ...]
    """Whatever the time: the cheapest storage for each hit rate, lowest first."""
    tried: int


def answer(question: Question) -> Answer:
    """Size a ladder. Raises ConfigError where nothing that can be bought meets the wish."""
    question.check()
    small = msgspec.structs.replace(question, demand=question.demand.thinned())
    held = _held(small)
    candidates = list(_candidates(question))
    found = _affordable(small, candidates, held)
    if not found:
        raise _unreachable(small, held)
    whole_held = {0.0: question.demand.held(0.0)}
    best = _first_that_holds(question, found, whole_held)
    without = need(_with_wish(question, Wish(None, question.wish.share)), (), whole_held)
    if best is None or without is None:
        raise _unreachable(small, held)
    front = _no_worse([best, *_frontier(question, small, candidates, held)])
    return Answer(
        best, without, front, _by_hits(question, small, candidates, held), len(candidates)
    )


def _candidates(question: Question) -> Iterator[tuple[Rung, ...]]:
    """Every ladder of the grid, tiers larger from top to bottom; the empty one comes first."""
    unique = question.demand.unique_tokens
    floors: list[list[Rung | None]] = []
    for kinds in _FLOORS:
        names = [n for n in question.media if question.profile.medium(n).tier in kinds]
        fractions = (1.0,) if kinds == ("object",) else _FRACTIONS
        floors.append([None, *(Rung(n, f * unique) for n in names for f in fractions)])
    for host in floors[0]:
        for flash in floors[1]:
            for store in floors[2]:
                rungs = tuple(rung for rung in (host, flash, store) if rung is not None)
                sizes = [rung.tokens for rung in rungs]
                if all(a < b for a, b in pairwise(sizes)):
                    yield rungs


def _held(question: Question) -> dict[float, Floats]:
    unique = question.demand.unique_tokens
    return {f * unique: question.demand.held(f * unique) for f in (0.0, *_FRACTIONS)}


def _affordable(
    question: Question, candidates: list[tuple[Rung, ...]], held: dict[float, Floats]
) -> list[tuple[Need, tuple[Rung, ...]]]:
    """Return the candidates that meet the wish, cheapest first."""
    found = [(needed, r) for r in candidates if (needed := need(question, r, held)) is not None]
    return sorted(found, key=lambda pair: pair[0].dollars_per_h)


def _first_that_holds(
    question: Question,
    found: list[tuple[Need, tuple[Rung, ...]]],
    held: dict[float, Floats],
) -> Need | None:
    """Return the first candidate that also meets the wish with every request counted."""
    for _, rungs in found[:_FINALISTS]:
        for tokens in (0.0, *(rung.tokens for rung in rungs)):
            if tokens not in held:
                held[tokens] = question.demand.held(tokens)
        needed = need(question, rungs, held)
        if needed is not None:
            return needed
    return None


def _frontier(
    question: Question,
    small: Question,
    candidates: list[tuple[Rung, ...]],
    held: dict[float, Floats],
) -> tuple[Need, ...]:
    """Return the cheapest ladder for each of several wishes, without those that are no better."""
    without = need(_with_wish(small, Wish(None, small.wish.share)), (), held)
    quickest, _ = reachable(small, held)
    slowest = without.ttft_s[1] if without is not None else quickest * 100
    points: list[Need] = []
    whole_held: dict[float, Floats] = {}
    for ttft_s in np.geomspace(quickest * 1.02, max(slowest, quickest * 1.1), _FRONTIER_POINTS):
        wish = Wish(float(ttft_s), question.wish.share)
        found = _affordable(_with_wish(small, wish), candidates, held)
        best = _first_that_holds(_with_wish(question, wish), found, whole_held)
        if best is not None:
            points.append(best)
    return _no_worse(points)


def _by_hits(
    question: Question,
    small: Question,
    candidates: list[tuple[Rung, ...]],
    held: dict[float, Floats],
) -> tuple[Need, ...]:
    """Return the ladders that no other beats in both hits and cost of storage."""
    any_time = Wish(None, question.wish.share)
    found = _affordable(_with_wish(small, any_time), candidates, held)
    found.sort(key=lambda pair: (pair[0].storage_dollars_per_h, -pair[0].hit))
    kept: list[Need] = []
    whole_held: dict[float, Floats] = {}
    highest = -1.0
    for one, rungs in found:
        if one.hit <= highest + _HIT_STEP:
            continue
        highest = one.hit
        whole = _first_that_holds(_with_wish(question, any_time), [(one, rungs)], whole_held)
        if whole is not None:
            kept.append(whole)
    cheapest = accumulate((one.storage_dollars_per_h for one in reversed(kept)), min)
    pairs = zip(kept, reversed([*cheapest]), strict=True)
    return tuple(one for one, least in pairs if one.storage_dollars_per_h <= least)


def _no_worse(points: list[Need]) -> tuple[Need, ...]:
    """Return those that no other beats in both time and cost, quickest first."""
    kept: list[Need] = []
    for point in sorted(points, key=lambda one: (one.ttft_s[1], one.dollars_per_h)):
        if not kept or point.dollars_per_h < kept[-1].dollars_per_h:
            kept.append(point)
    return tuple(kept)


def reachable(question: Question, held: dict[float, Floats]) -> tuple[float, str]:
    """Return the soonest first token for the wished share of requests, and what limits it.

    With everything held that was ever seen, brought at the speed of the GPUs' own links.
    """
    inputs = question.demand.input_tokens.astype(np.float64)
    deepest = held[max(held)]
    compute_s = question.prefill_s(deepest, inputs)
    nbytes = deepest * question.token_bytes + question.fixed_bytes * (deepest > 0)
    load_s = nbytes / question.link_bytes_per_s
    ttft_s = question.overhead_s + compute_s + load_s
    share = question.wish.share
    at = int(np.argsort(ttft_s)[max(0, int(np.ceil(share * len(ttft_s))) - 1)])
    fresh = inputs[at] - deepest[at]
    if load_s[at] > compute_s[at]:
        why = (
            f"bringing {nbytes[at] / GB:.1f} GB of context over the GPUs' links "
            f"({question.link_bytes_per_s / GB:.0f} GB/s) takes {load_s[at]:.2f} s"
        )
    elif compute_s[at] > question.overhead_s:
        why = (
            f"computing {fresh:,.0f} tokens that no store can hold, since they are new, takes "
            f"{compute_s[at]:.2f} s"
        )
    else:
        why = f"the engine itself takes {question.overhead_s:.2f} s a request"
    return float(ttft_s[at]), why


def _unreachable(question: Question, held: dict[float, Floats]) -> ConfigError:
    soonest, why = reachable(question, held)
    wish = question.wish
    asked = "" if wish.ttft_s is None else f"--slo-ttft {wish.ttft_s:g} s"
    if wish.ttft_s is not None and soonest > wish.ttft_s:
        return ConfigError(
            f"{asked}: not reachable for {wish.share:.0%} of requests; the soonest is "
            f"{soonest:.2f} s: {why}; ask for more time or a smaller --slo-share, or use more GPUs"
        )
    return ConfigError(
        f"{asked or 'no ladder'}: none of {', '.join(question.media)} brings context in less than "
        "half of the time that computing it takes, and computing it is too slow; use other --media"
    )


def _with_wish(question: Question, wish: Wish) -> Question:
    return msgspec.structs.replace(question, wish=wish)
