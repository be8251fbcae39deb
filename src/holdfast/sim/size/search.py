"""Find the cheapest ladder that gives the first token in time: every combination on a grid.

A candidate has at most one host tier, one tier of flash (local or of a pool) and one object store,
each with one of a few capacities. There are some hundreds; each is worked out by `size.need`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import accumulate, pairwise, product
from math import ceil, inf
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
_CLOSE = 1.003
"""How close the soonest first token is looked for."""

_LIMITS = 1.25
"""Up to so much above what links and GPUs allow, it is they that limit a first token."""

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
    if without is None or best is None:
        raise search.unreachable()
    front = search.frontier(without.ttft_s[1])
    latest_s = question.wish.ttft_s or inf
    best = min([best, *(one for one in front if one.ttft_s[1] <= latest_s)], key=_rank)
    return Answer(best, without, _no_worse([best, *front]), search.by_hits(), search.tried)


class _Search:
    """The ladders of a question, worked out for some of its requests, then for all of them."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.any_time = Wish(None, question.wish.share)
        self._small = msgspec.structs.replace(question, demand=question.demand.thinned())
        unique = question.demand.unique_tokens
        capacities = [share * unique for share in (0.0, *_FRACTIONS)]
        self._small_held = {tokens: self._small.demand.held(tokens) for tokens in capacities}
        self._whole_held = {tokens: question.demand.held(tokens) for tokens in capacities}
        self._least: dict[tuple[float, float], tuple[float, float]] = {}
        candidates = list(_candidates(question))
        self.tried = len(candidates)
        asked = _with_wish(self._small, self.any_time)
        worked_out = [(need(asked, rungs, self._small_held), rungs) for rungs in candidates]
        known = [(one, rungs) for one, rungs in worked_out if one is not None]
        # A wish can only make a ladder dearer, so this is also a bound on what any wish costs.
        self._ladders = sorted(known, key=lambda pair: _rank(pair[0]))
        self._doubtful = [rungs for one, rungs in worked_out if one is None]

    def unreachable(self) -> ConfigError:
        """Return the error that says what can be had instead, and what is in the way."""
        wish, question = self._question.wish, self._question
        asked = "" if wish.ttft_s is None else f"--slo-ttft {wish.ttft_s:g} s"
        if wish.ttft_s is not None and (found := self._soonest(wish.ttft_s)) is not None:
            soonest, why = found
            return ConfigError(
                f"{asked}: not reachable for {wish.share:.0%} of requests; the soonest is "
                f"{ceil(soonest * 100) / 100:.2f} s: {why}; ask for more time or a smaller "
                "--slo-share, or use more GPUs or other --media"
            )
        media = ", ".join(question.media)
        if question.nodes:
            return ConfigError(
                f"--nodes: {question.nodes}: too few to compute what no ladder of {media} brings "
                "in time, or to hold that ladder; give more, leave it out, or use other --media"
            )
        return ConfigError(
            f"{asked or 'no ladder'}: none of {media} brings context in less than half of the "
            "time that computing it takes, or has room for it in the machines that compute the "
            "rest, and computing it is too slow; use other --media"
        )

    def _soonest(self, wished_s: float) -> tuple[float, str] | None:
        """Return the soonest first token that a ladder gives, and what limits it; None if none.

        Looked for above what no ladder beats: first in strides that grow, then by halving.
        """
        bound_s, why = reachable(self._question, self._whole_held)
        low_s = high_s = max(bound_s, wished_s)
        slowest_s = max([low_s, *(2 * one.ttft_s[1] for one, _ in self._ladders)])
        stride = _CLOSE
        while (quickest := self._any_in_time(high_s)) is None:
            if high_s >= slowest_s:
                return None
            low_s, high_s, stride = high_s, min(high_s * stride, slowest_s), stride**2
        while high_s > low_s * _CLOSE:
            middle_s = (low_s * high_s) ** 0.5
            if (one := self._any_in_time(middle_s)) is None:
                low_s = middle_s
            else:
                high_s, quickest = middle_s, one
        media = ", ".join(self._question.media)
        if not quickest.tiers:
            why = (
                f"no ladder of {media} fits the machines that compute the rest and brings context "
                "in less than half of what computing it takes"
            )
        elif high_s > bound_s * _LIMITS:
            why = f"no ladder of {media} that fits is quicker"
        return high_s, why

    def _any_in_time(self, ttft_s: float) -> Need | None:
        """Return a ladder, however dear, with a first token in time; None if there is none."""
        wish = Wish(ttft_s, self.any_time.share)
        dearest_first = (rungs for _, rungs in reversed(self._ladders))
        hopeful = (rungs for rungs in dearest_first if not self._hopeless(wish, rungs))
        whole = (self._whole(wish, rungs) for rungs in hopeful)
        return next((one for one in whole if one is not None), None)

    def cheapest(self, wish: Wish) -> Need | None:
        """Return the cheapest ladder that meets a wish; None if there is none."""
        whole = (self._whole(wish, rungs) for _, rungs in self._found(wish)[:_FINALISTS])
        if finalists := [one for one in whole if one is not None]:
            return min(finalists, key=_rank)
        # Close to what is possible, some of the requests can not tell: all are asked about each.
        ladders = [(bound.dollars_per_h, rungs) for bound, rungs in self._ladders]
        best = None
        for bound, rungs in [*ladders, *((inf, rungs) for rungs in self._doubtful)]:
            if best is not None and bound > best.dollars_per_h:
                break
            one = None if self._hopeless(wish, rungs) else self._whole(wish, rungs)
            best = min((found for found in (best, one) if found), key=_rank, default=None)
        return best

    def _found(self, wish: Wish) -> list[tuple[Need, tuple[Rung, ...]]]:
        """Return the cheapest ladders that meet a wish for some requests, the finalists first."""
        asked = _with_wish(self._small, wish)
        found: list[tuple[Need, tuple[Rung, ...]]] = []
        for bound, rungs in self._ladders:
            last = found[_FINALISTS - 1][0] if len(found) >= _FINALISTS else None
            if last is not None and bound.dollars_per_h > last.dollars_per_h:
                break
            one = need(asked, rungs, self._small_held)
            if one is not None:
                insort(found, (one, rungs), key=lambda pair: _rank(pair[0]))
        return found

    def frontier(self, slowest_s: float) -> list[Need]:
        """Return the cheapest ladder for each of several wishes."""
        quickest_s, _ = reachable(self._question, self._whole_held)
        last_s = max(slowest_s, quickest_s * 1.1)
        times = np.geomspace(quickest_s * 1.02, last_s, _FRONTIER_POINTS)
        found = (self.cheapest(Wish(float(ttft_s), self.any_time.share)) for ttft_s in times)
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
        return need(_with_wish(self._question, wish), rungs, self._whole_held)

    def _hopeless(self, wish: Wish, rungs: tuple[Rung, ...]) -> bool:
        """Whether a ladder is too slow, or leaves too much to compute, however fast its tiers."""
        question = self._question
        tokens = rungs[-1].tokens if rungs else 0.0
        tiers = [question.profile.medium(rung.name).tier for rung in rungs]
        link = max((question.into_engine(tier) for tier in tiers), default=inf)
        if (tokens, link) not in self._least:
            held = self._whole_held[tokens]
            compute_s, load_s = _at_best(question, held, link)
            at = _last_in_time(question, ttft_s := question.overhead_s + compute_s + load_s)
            self._least[tokens, link] = float(ttft_s[at]), question.engines(compute_s)
        least_s, engines = self._least[tokens, link]
        late = wish.ttft_s is not None and least_s > wish.ttft_s * (1 + 1e-9)
        return late or 0 < question.nodes < engines


def _rank(one: Need) -> tuple[float, float]:
    """Return what proposals are ordered by: the cheapest first, of those the quickest."""
    return one.dollars_per_h, one.ttft_s[1]


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
    """Return what no first token beats for the wished share of requests, and what limits it.

    `held` has what is held of each request at several capacities, the largest and 0 among them.
    What is held comes at the speed of the GPUs' own links, or of the engine's network where no
    medium is local.
    """
    inputs = question.demand.input_tokens.astype(np.float64)
    tiers = [question.profile.medium(name).tier for name in question.media]
    link_bytes_per_s = max(question.into_engine(tier) for tier in tiers)
    links = "the engine's network" if set(tiers) <= set(REMOTE) else "the GPUs' links"
    soonest_s, why = inf, ""
    for tokens in sorted(held, reverse=True):
        compute_s, load_s = _at_best(question, held[tokens], link_bytes_per_s)
        ttft_s = question.overhead_s + compute_s + load_s
        at = _last_in_time(question, ttft_s)
        if ttft_s[at] >= soonest_s:
            continue
        soonest_s = float(ttft_s[at])
        if load_s[at] > compute_s[at]:
            why = (
                f"bringing {load_s[at] * link_bytes_per_s / GB:.1f} GB of context over {links} "
                f"({link_bytes_per_s / GB:.0f} GB/s) takes {load_s[at]:.2f} s"
            )
        elif compute_s[at] > question.overhead_s:
            new = ", since they are new," if tokens == max(held) else " sooner"
            why = (
                f"computing {inputs[at] - held[tokens][at]:,.0f} tokens that no store can "
                f"{'hold' if tokens == max(held) else 'bring'}{new} takes {compute_s[at]:.2f} s"
            )
        else:
            why = f"the engine itself takes {question.overhead_s:.2f} s a request"
    return soonest_s, why


def _at_best(question: Question, held: Floats, link_bytes_per_s: float) -> tuple[Floats, Floats]:
    """Return the seconds to compute and to load each request with a link of its own."""
    inputs = question.demand.input_tokens.astype(np.float64)
    nbytes = held * question.token_bytes + question.fixed_bytes(held)
    return question.prefill_s(held, inputs), nbytes / link_bytes_per_s


def _last_in_time(question: Question, ttft_s: Floats) -> int:
    """Return the latest request of the share that is wished for."""
    return int(np.argsort(ttft_s)[max(0, ceil(question.wish.share * len(ttft_s) - 1e-9) - 1)])


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


def _with_wish(question: Question, wish: Wish) -> Question:
    return msgspec.structs.replace(question, wish=wish)
