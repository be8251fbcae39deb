"""Search for the cheapest ladder that meets a goal for time to first token (TTFT): a grid search.

A candidate has at most one host tier, one flash tier (local or pool) and one object store, each
with one of a few capacities. There are several hundred candidates; `size.need` evaluates each.
"""

from __future__ import annotations

from bisect import insort
from itertools import accumulate, pairwise, product
from math import ceil, inf
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import ConfigError
from holdfast.sim.amounts import GB
from holdfast.sim.size.need import CandidateTier, LadderNeed, need
from holdfast.sim.size.question import GPU_BUSY, REMOTE, SizingGoal, SizingQuestion
from holdfast.sim.trace import Floats

_FRACTIONS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Capacities on the grid, as shares of the load's distinct tokens."""

_FRONTIER_POINTS = 12
"""Number of TTFT goals on the Pareto front."""

_FINALISTS = 12
"""Number of ladders, cheapest first by the sample, that are evaluated with all requests."""

_HIT_STEP = 0.002
"""Minimum difference in hit rate between ladders of the hit curve."""

_TTFT_PRECISION = 1.003
"""Ratio of the bounds at which the search for the lowest TTFT stops."""

_NEAR_BOUND = 1.25
"""Up to this ratio to the lower bound, links and GPUs are named as the limit of a TTFT."""

_TIER_CHOICES = (("host",), ("disk", "pool"), ("files", "object"))
"""Kinds of tiers of which a ladder has at most one each, from the top."""


class SizingAnswer(NamedTuple):
    """The cheapest ladder, the cost without context memory, and alternatives."""

    best: LadderNeed
    without: LadderNeed
    """The load without context memory: every token is computed."""
    frontier: tuple[LadderNeed, ...]
    """Pareto front of cost and TTFT, lowest TTFT first."""
    by_hits: tuple[LadderNeed, ...]
    """Cheapest storage for each hit rate, without a TTFT goal; lowest hit rate first."""
    by_lowest_tier: dict[str, LadderNeed | None]
    """Cheapest ladder that meets the goal, by the kind of its lowest tier; None if none does."""
    tried: int
    """Number of candidate ladders."""


def answer(question: SizingQuestion) -> SizingAnswer:
    """Size a ladder. Raises ConfigError if no ladder on the grid meets the goal."""
    question.check()
    demand = question.demand
    uncached_s = question.prefill_s(demand.held(demand.unique_tokens), demand.input_tokens)
    least = ceil(question.needed_engines(uncached_s))
    if 0 < question.nodes < least:
        raise ConfigError(
            f"--nodes: {question.nodes}: computing the tokens that no store can hold takes {least} "
            f"of them, at most {GPU_BUSY:.0%} busy on average and all busy in the busiest minute; "
            f"give {least} or more, leave it out, or lower the load"
        )
    search = _Search(question)
    best = search.cheapest(question.goal)
    # The comparison without memory may need more machines than there are.
    unlimited = msgspec.structs.replace(question, nodes=0) if question.nodes else question
    without = need(unlimited, search.no_limit, (), {0.0: demand.held(0.0)})
    if without is None or best is None:
        raise search.unreachable()
    front = search.frontier(without.ttft_s[1])
    latest_s = question.goal.ttft_s or inf
    best = min([best, *(one for one in front if one.ttft_s[1] <= latest_s)], key=_rank)
    by_lowest_tier = {kind: search.cheapest(question.goal, kind) for kind in search.lowest_kinds}
    if best.tiers:
        by_lowest_tier[best.tiers[-1].tier] = best
    pareto: list[LadderNeed] = []
    for point in sorted([best, *front], key=lambda one: (one.ttft_s[1], one.dollars_per_h)):
        if not pareto or point.dollars_per_h < pareto[-1].dollars_per_h:
            pareto.append(point)
    return SizingAnswer(
        best, without, tuple(pareto), search.by_hits(), by_lowest_tier, search.tried
    )


class _Search:
    """The candidate ladders of a question, evaluated on a sample of requests, then on all."""

    def __init__(self, question: SizingQuestion) -> None:
        self._question = question
        self.no_limit = SizingGoal(None, question.goal.share)
        self._sample = msgspec.structs.replace(question, demand=question.demand.sampled())
        unique = question.demand.unique_tokens
        capacities = [share * unique for share in (0.0, *_FRACTIONS)]
        self._sample_held = {tokens: self._sample.demand.held(tokens) for tokens in capacities}
        self._all_held = {tokens: question.demand.held(tokens) for tokens in capacities}
        self._least: dict[tuple[float, float], tuple[float, float]] = {}
        """(tokens of the largest tier, fastest link) to (lowest TTFT, engines needed)."""
        # Every ladder of the grid whose tiers grow from top to bottom, the empty one first.
        choices: list[list[CandidateTier | None]] = []
        for kinds in _TIER_CHOICES:
            names = [n for n in question.media if question.profile.medium(n).tier in kinds]
            tiers = (
                CandidateTier(n, f * unique)
                for n in names
                for f in ((1.0,) if question.profile.medium(n).tier == "object" else _FRACTIONS)
            )
            choices.append([None, *tiers])
        candidates: list[tuple[CandidateTier, ...]] = []
        for chosen in product(*choices):
            candidate = tuple(tier for tier in chosen if tier is not None)
            if all(above.tokens < below.tokens for above, below in pairwise(candidate)):
                candidates.append(candidate)
        self.tried = len(candidates)
        evaluated = [
            (need(self._sample, self.no_limit, candidate, self._sample_held), candidate)
            for candidate in candidates
        ]
        known = [(one, candidate) for one, candidate in evaluated if one is not None]
        # A goal can only raise the cost of a ladder, so this cost is a lower bound for any goal.
        self._ladders = sorted(known, key=lambda pair: _rank(pair[0]))
        self._failed = [candidate for one, candidate in evaluated if one is None]
        """Ladders that cannot serve the sample; they may still serve all requests."""
        lowest = {self._lowest_kind(candidate) for candidate in candidates}
        self.lowest_kinds = [kind for kinds in _TIER_CHOICES for kind in kinds if kind in lowest]

    def unreachable(self) -> ConfigError:
        """Return the error that names the lowest possible TTFT and what limits it."""
        goal, question = self._question.goal, self._question
        shown = "no ladder" if goal.ttft_s is None else f"--slo-ttft {goal.ttft_s:g} s"
        if goal.ttft_s is not None and (found := self._lowest_ttft(goal.ttft_s)) is not None:
            lowest_s, why = found
            return ConfigError(
                f"{shown}: not reachable for {goal.share:.0%} of requests; the lowest is "
                f"{ceil(lowest_s * 100) / 100:.2f} s: {why}; allow more time or a smaller "
                "--slo-share, or use more GPUs or other --media"
            )
        media = ", ".join(question.media)
        if question.nodes:
            return ConfigError(
                f"--nodes: {question.nodes}: too few to compute the tokens that no ladder of "
                f"{media} fetches in time, or to hold that ladder; give more, leave it out, or use "
                "other --media"
            )
        return ConfigError(
            f"{shown}: no ladder of {media} fetches context in less than half of its compute time "
            "and fits the machines that compute the rest, and computing it is too slow; use other "
            "--media"
        )

    def _lowest_ttft(self, goal_s: float) -> tuple[float, str] | None:
        """Return the lowest TTFT that a ladder reaches, and what limits it; None if none does.

        The search starts at the lower bound, with growing steps, and ends with a bisection.
        """
        bound_s, why = ttft_bound(self._question, self._all_held)
        low_s = high_s = max(bound_s, goal_s)
        slowest_s = max([low_s, *(2 * one.ttft_s[1] for one, _ in self._ladders)])
        step = _TTFT_PRECISION
        while (fastest := self._any_within(high_s)) is None:
            if high_s >= slowest_s:
                return None
            low_s, high_s, step = high_s, min(high_s * step, slowest_s), step**2
        while high_s > low_s * _TTFT_PRECISION:
            middle_s = (low_s * high_s) ** 0.5
            if (one := self._any_within(middle_s)) is None:
                low_s = middle_s
            else:
                high_s, fastest = middle_s, one
        media = ", ".join(self._question.media)
        if not fastest.tiers:
            why = (
                f"no ladder of {media} fits the machines that compute the rest and fetches context "
                "in less than half of its compute time"
            )
        elif high_s > bound_s * _NEAR_BOUND:
            why = f"no ladder of {media} that fits is faster"
        return high_s, why

    def _any_within(self, ttft_s: float) -> LadderNeed | None:
        """Return a ladder of any cost that reaches a TTFT; None if there is none."""
        goal = SizingGoal(ttft_s, self.no_limit.share)
        for _, candidate in reversed(self._ladders):  # expensive ladders are likely to be fast
            if found := self._evaluate(goal, candidate):
                return found
        return None

    def _lowest_kind(self, candidate: tuple[CandidateTier, ...]) -> str:
        """Return the kind of the lowest tier; "" for no tiers."""
        return self._question.profile.medium(candidate[-1].name).tier if candidate else ""

    def cheapest(self, goal: SizingGoal, lowest_kind: str | None = None) -> LadderNeed | None:
        """Return the cheapest ladder that meets a goal; None if there is none.

        `lowest_kind` restricts the search to ladders whose lowest tier is of this kind.
        """
        among = [
            pair
            for pair in self._ladders
            if lowest_kind is None or self._lowest_kind(pair[1]) == lowest_kind
        ]
        finalists: list[tuple[LadderNeed, tuple[CandidateTier, ...]]] = []
        for least, candidate in among:  # by the lower bound of the cost
            last = finalists[_FINALISTS - 1][0] if len(finalists) >= _FINALISTS else None
            if last is not None and least.dollars_per_h > last.dollars_per_h:
                break
            if one := need(self._sample, goal, candidate, self._sample_held):
                insort(finalists, (one, candidate), key=lambda pair: _rank(pair[0]))
        evaluated = (self._need(goal, candidate) for _, candidate in finalists[:_FINALISTS])
        if met := [one for one in evaluated if one is not None]:
            return min(met, key=_rank)
        # Near the lower bound the sample is too coarse: evaluate each ladder on all requests.
        ladders = [(bound.dollars_per_h, candidate) for bound, candidate in among]
        ladders += [
            (inf, candidate)
            for candidate in self._failed
            if lowest_kind is None or self._lowest_kind(candidate) == lowest_kind
        ]
        best = None
        for bound, candidate in ladders:
            if best is not None and bound > best.dollars_per_h:
                break
            one = self._evaluate(goal, candidate)
            best = min((found for found in (best, one) if found), key=_rank, default=None)
        return best

    def frontier(self, slowest_s: float) -> list[LadderNeed]:
        """Return the cheapest ladder for each of `_FRONTIER_POINTS` goals up to `slowest_s`."""
        bound_s, _ = ttft_bound(self._question, self._all_held)
        last_s = max(slowest_s, bound_s * 1.1)
        times = np.geomspace(bound_s * 1.02, last_s, _FRONTIER_POINTS)
        found = (self.cheapest(SizingGoal(float(ttft_s), self.no_limit.share)) for ttft_s in times)
        return [one for one in found if one is not None]

    def by_hits(self) -> tuple[LadderNeed, ...]:
        """Return the Pareto front of hits and storage cost."""
        kept: list[LadderNeed] = []
        highest = -1.0
        by_storage = sorted(
            self._ladders, key=lambda pair: (pair[0].storage_dollars_per_h, -pair[0].hit)
        )
        for one, candidate in by_storage:
            if one.hit > highest + _HIT_STEP:
                highest = one.hit
                found = self._need(self.no_limit, candidate)
                kept += [] if found is None else [found]
        cheapest = accumulate((one.storage_dollars_per_h for one in reversed(kept)), min)
        pairs = zip(kept, reversed([*cheapest]), strict=True)
        return tuple(one for one, least in pairs if one.storage_dollars_per_h <= least)

    def _need(self, goal: SizingGoal, candidate: tuple[CandidateTier, ...]) -> LadderNeed | None:
        """Evaluate a ladder on all requests."""
        return need(self._question, goal, candidate, self._all_held)

    def _evaluate(
        self, goal: SizingGoal, candidate: tuple[CandidateTier, ...]
    ) -> LadderNeed | None:
        """Evaluate a ladder on all requests, unless no tier speed lets its capacity suffice."""
        question = self._question
        tokens = candidate[-1].tokens if candidate else 0.0
        link = question.ingest_bytes_per_s_max(tier.name for tier in candidate)
        if (tokens, link) not in self._least:
            compute_s, load_s, at = _idle_times(question, self._all_held[tokens], link)
            ttft_s = float(question.overhead_s + compute_s[at] + load_s[at])
            self._least[tokens, link] = ttft_s, question.needed_engines(compute_s)
        least_s, engines = self._least[tokens, link]
        late = goal.ttft_s is not None and least_s > goal.ttft_s * (1 + 1e-9)
        if late or 0 < question.nodes < engines:
            return None
        return self._need(goal, candidate)


def _rank(one: LadderNeed) -> tuple[float, float]:
    """Return the sort key of proposals: by cost, then by TTFT."""
    return one.dollars_per_h, one.ttft_s[1]


def ttft_bound(question: SizingQuestion, held: dict[float, Floats]) -> tuple[float, str]:
    """Return a lower bound of the TTFT at the goal's share of requests, and what limits it.

    `held` maps capacities, 0 and the largest included, to the held tokens of each request. Held
    tokens load at the bandwidth of the GPUs' links, or of the network if no medium is local.
    """
    inputs = question.demand.input_tokens
    tiers = [question.profile.medium(name).tier for name in question.media]
    link_bytes_per_s = question.ingest_bytes_per_s_max(question.media)
    links = "the engine's network" if set(tiers) <= set(REMOTE) else "the GPUs' links"
    bound_s, why = inf, ""
    for tokens in sorted(held, reverse=True):
        compute_s, load_s, at = _idle_times(question, held[tokens], link_bytes_per_s)
        ttft_s = float(question.overhead_s + compute_s[at] + load_s[at])
        if ttft_s >= bound_s:
            continue
        bound_s = ttft_s
        if load_s[at] > compute_s[at]:
            why = (
                f"loading {load_s[at] * link_bytes_per_s / GB:.1f} GB of context over {links} "
                f"({link_bytes_per_s / GB:.0f} GB/s) takes {load_s[at]:.2f} s"
            )
        elif compute_s[at] > question.overhead_s:
            computed = f"computing {inputs[at] - held[tokens][at]:,.0f}"
            if tokens == max(held):
                why = f"{computed} new tokens, which no store holds, takes {compute_s[at]:.2f} s"
            else:
                why = (
                    f"{computed} tokens is faster than loading them and takes {compute_s[at]:.2f} s"
                )
        else:
            why = f"the engine itself takes {question.overhead_s:.2f} s per request"
    return bound_s, why


def _idle_times(
    question: SizingQuestion, held: Floats, link_bytes_per_s: float
) -> tuple[Floats, Floats, int]:
    """Return the seconds to compute and to load each request, if it has the link to itself.

    The third value is the request at the quantile of the goal's share, by time to first token.
    """
    compute_s = question.prefill_s(held, question.demand.input_tokens)
    load_s = (held * question.token_bytes + question.fixed_bytes(held)) / link_bytes_per_s
    order = np.argsort(question.overhead_s + compute_s + load_s)
    at = max(0, ceil(question.goal.share * len(order) - 1e-9) - 1)
    return compute_s, load_s, int(order[at])
