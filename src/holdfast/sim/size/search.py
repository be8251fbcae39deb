"""Find the cheapest ladder that gives the first token in time: every combination on a grid.

A candidate has at most one host tier, one tier of flash (local or of a pool) and one object store,
each with one of a few capacities. There are some hundreds; each is worked out by `size.need`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise, product
from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import ConfigError
from holdfast.sim.formulas import GB
from holdfast.sim.size.demand import Floats
from holdfast.sim.size.need import Need, Rung, need
from holdfast.sim.size.question import GPU_BUSY, REMOTE, Question, Wish

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
    _check_nodes(question)
    search = _Search(question)
    best = search.cheapest(question.wish)
    # What is compared with may take more machines than there are.
    unlimited = msgspec.structs.replace(question, wish=search.any_time, nodes=0)
    without = need(unlimited, (), {0.0: question.demand.held(0.0)})
    if best is None or without is None:
        raise search.unreachable()
    front = _no_worse([best, *search.frontier(without.ttft_s[1])])
    return Answer(best, without, front, search.by_hits(), search.tried)


class _Search:
    """The ladders of a question, worked out for some of its requests, then for all of them."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.any_time = Wish(None, question.wish.share)
        self._small = msgspec.structs.replace(question, demand=question.demand.thinned())
        unique = question.demand.unique_tokens
        self._small_held = {
            share * unique: self._small.demand.held(share * unique) for share in (0.0, *_FRACTIONS)
        }
        self._whole_held: dict[float, Floats] = {}
        candidates = list(_candidates(question))
        self.tried = len(candidates)
        asked = _with_wish(self._small, self.any_time)
        worked_out = ((need(asked, rungs, self._small_held), rungs) for rungs in candidates)
        known = [(one, rungs) for one, rungs in worked_out if one is not None]
        # A wish can only make a ladder dearer, so this is also a bound on what any wish costs.
        self._ladders = sorted(known, key=lambda pair: pair[0].dollars_per_h)

    def unreachable(self) -> ConfigError:
        """Return the error that says what can be had instead, and what is in the way."""
        return _unreachable(self._small, self._small_held)

    def asking(self, wish: Wish) -> Question:
        """Return the question with another wish."""
        return _with_wish(self._question, wish)

    def cheapest(self, wish: Wish) -> Need | None:
        """Return the cheapest ladder that meets a wish; None if there is none."""
        asked = _with_wish(self._small, wish)
        found: list[tuple[float, tuple[Rung, ...]]] = []
        for bound, rungs in self._ladders:
            if len(found) >= _FINALISTS and bound.dollars_per_h > found[_FINALISTS - 1][0]:
                break
            one = need(asked, rungs, self._small_held)
            if one is not None:
                found.append((one.dollars_per_h, rungs))
                found.sort(key=lambda pair: pair[0])
        whole = (self._whole(wish, rungs) for _, rungs in found[:_FINALISTS])
        return next((one for one in whole if one is not None), None)

    def frontier(self, slowest_s: float) -> list[Need]:
        """Return the cheapest ladder for each of several wishes."""
        quickest_s, _ = reachable(self._small, self._small_held)
        last_s = max(slowest_s, quickest_s * 1.1)
        times = np.geomspace(quickest_s * 1.02, last_s, _FRONTIER_POINTS)
        share = self.any_time.share
        found = (self.cheapest(Wish(float(ttft_s), share)) for ttft_s in times)
        return [one for one in found if one is not None]

    def by_hits(self) -> tuple[Need, ...]:
        """Return the ladders that no other beats in both hits and cost of storage."""
        kept: list[Need] = []
        highest = -1.0
        by_storage = sorted(
            self._ladders, key=lambda pair: (pair[0].storage_dollars_per_h, -pair[0].hit)
        )
        for one, rungs in by_storage:
            if one.hit > highest + _HIT_STEP:
                highest = one.hit
                whole = self._whole(self.any_time, rungs)
                kept += [] if whole is None else [whole]
        cheapest = accumulate((one.storage_dollars_per_h for one in reversed(kept)), min)
        pairs = zip(kept, reversed([*cheapest]), strict=True)
        return tuple(one for one, least in pairs if one.storage_dollars_per_h <= least)

    def _whole(self, wish: Wish, rungs: tuple[Rung, ...]) -> Need | None:
        """Work out a ladder with every request counted."""
        for tokens in (0.0, *(rung.tokens for rung in rungs)):
            if tokens not in self._whole_held:
                self._whole_held[tokens] = self._question.demand.held(tokens)
        return need(self.asking(wish), rungs, self._whole_held)


def _candidates(question: Question) -> Iterator[tuple[Rung, ...]]:
    """Every ladder of the grid, tiers larger from top to bottom; the empty one comes first."""
    unique = question.demand.unique_tokens
    floors: list[list[Rung | None]] = []
    for kinds in _FLOORS:
        names = [n for n in question.media if question.profile.medium(n).tier in kinds]
        fractions = (1.0,) if kinds == ("object",) else _FRACTIONS
        floors.append([None, *(Rung(n, f * unique) for n in names for f in fractions)])
    for chosen in product(*floors):
        rungs = tuple(rung for rung in chosen if rung is not None)
        if all(above.tokens < below.tokens for above, below in pairwise(rungs)):
            yield rungs


def _no_worse(points: list[Need]) -> tuple[Need, ...]:
    """Return those that no other beats in both time and cost, quickest first."""
    kept: list[Need] = []
    for point in sorted(points, key=lambda one: (one.ttft_s[1], one.dollars_per_h)):
        if not kept or point.dollars_per_h < kept[-1].dollars_per_h:
            kept.append(point)
    return tuple(kept)


def reachable(question: Question, held: dict[float, Floats]) -> tuple[float, str]:
    """Return the soonest first token for the wished share of requests, and what limits it.

    With everything held that was ever seen, brought at the speed of the GPUs' own links, or of the
    engine's network where no medium is local.
    """
    inputs = question.demand.input_tokens.astype(np.float64)
    deepest = held[max(held)]
    compute_s = question.prefill_s(deepest, inputs)
    nbytes = deepest * question.token_bytes + question.fixed_bytes(deepest)
    tiers = [question.profile.medium(name).tier for name in question.media]
    link_bytes_per_s = max(question.into_engine(tier) for tier in tiers)
    links = "the engine's network" if set(tiers) <= set(REMOTE) else "the GPUs' links"
    load_s = nbytes / link_bytes_per_s
    ttft_s = question.overhead_s + compute_s + load_s
    share = question.wish.share
    at = int(np.argsort(ttft_s)[max(0, int(np.ceil(share * len(ttft_s))) - 1)])
    fresh = inputs[at] - deepest[at]
    if load_s[at] > compute_s[at]:
        why = (
            f"bringing {nbytes[at] / GB:.1f} GB of context over {links} "
            f"({link_bytes_per_s / GB:.0f} GB/s) takes {load_s[at]:.2f} s"
        )
    elif compute_s[at] > question.overhead_s:
        why = (
            f"computing {fresh:,.0f} tokens that no store can hold, since they are new, takes "
            f"{compute_s[at]:.2f} s"
        )
    else:
        why = f"the engine itself takes {question.overhead_s:.2f} s a request"
    return float(ttft_s[at]), why


def _check_nodes(question: Question) -> None:
    """Raise ConfigError where no memory saves so much that these machines can compute the rest."""
    inputs = question.demand.input_tokens.astype(np.float64)
    held = question.demand.held(question.demand.unique_tokens)
    least = ceil(question.engines(question.prefill_s(held, inputs)))
    if 0 < question.nodes < least:
        raise ConfigError(
            f"--nodes: {question.nodes}: what no store can hold takes {least} of them to compute, "
            f"{GPU_BUSY:.0%} busy on the average and all in the busiest minute at most; give "
            f"{least} or more, leave it out, or ask for less"
        )


def _unreachable(question: Question, held: dict[float, Floats]) -> ConfigError:
    soonest, why = reachable(question, held)
    wish = question.wish
    asked = "" if wish.ttft_s is None else f"--slo-ttft {wish.ttft_s:g} s"
    if wish.ttft_s is not None and soonest > wish.ttft_s:
        return ConfigError(
            f"{asked}: not reachable for {wish.share:.0%} of requests; the soonest is "
            f"{soonest:.2f} s: {why}; ask for more time or a smaller --slo-share, or use more GPUs"
        )
    if question.nodes:
        return ConfigError(
            f"--nodes: {question.nodes}: too few to compute what no ladder of "
            f"{', '.join(question.media)} brings in time, or to hold that ladder; give more, leave "
            "it out, or use other --media"
        )
    return ConfigError(
        f"{asked or 'no ladder'}: none of {', '.join(question.media)} brings context in less than "
        "half of the time that computing it takes, and computing it is too slow; use other --media"
    )


def _with_wish(question: Question, wish: Wish) -> Question:
    return msgspec.structs.replace(question, wish=wish)
