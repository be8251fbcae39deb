"""Decide how much of what is held is worth fetching, and what is sooner computed again.

A prompt's first token comes when what is fetched has arrived and the rest is computed. Tiers are
read side by side; fetching and computing follow each other, because a block is of no use to the
attention of those behind it before it is there. The cut is the best of all cuts, tried one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.plan.cost import PrefillCost, TierEstimate

SHARE = 0.5
"""A fetch may take this share of the time that computing what it brings would."""

SLACK = 1.5
"""But always this many times what it was expected to take."""

_NEVER = float("inf")
_SHORT_S = 0.1
AT_ONCE = TierEstimate(0.0, _NEVER)


class Question(NamedTuple):
    """What is held of a prompt, and what fetching and computing cost now.

    `tiers`: the tier of each leading block that is held, as an index of `estimates` and `names`.
    `prompt_tokens` 0: not known; `cost` None: not known yet. `have_tokens`: leading tokens that the
    engine has already. `limit_s`: most that a fetch may take. `delivery`: from the node's memory
    into the engine, behind the fetch.
    """

    tiers: Sequence[int]
    block_bytes: int
    block_tokens: int
    estimates: Sequence[TierEstimate]
    names: Sequence[str]
    limit_s: float
    cost: PrefillCost | None = None
    prompt_tokens: int = 0
    have_tokens: int = 0
    delivery: TierEstimate = AT_ONCE

    @property
    def first(self) -> int:
        """The first block that the engine does not have whole."""
        whole = self.have_tokens // self.block_tokens if self.have_tokens else 0
        return min(whole, len(self.tiers))


class Plan(NamedTuple):
    """Use the first `blocks` of what is held, recompute the rest; `reason` is one line.

    `fetch_s`: until the blocks are there; `expected_s`: until the first token; `recompute_s`: until
    then with nothing fetched. Both are 0 where the engine has not told how fast it computes.
    `deadline_s`: a fetch that takes longer is cancelled.
    """

    blocks: int
    fetch_s: float
    expected_s: float
    recompute_s: float
    deadline_s: float
    reason: str


class Planner(Protocol):
    """Anything that turns a question into a plan; pure."""

    def plan(self, question: Question) -> Plan:
        """Return the cut."""
        ...


class FetchHeld:
    """Fetch every held block that the limit leaves time for, whatever computing would cost."""

    def plan(self, question: Question) -> Plan:
        """Return the longest prefix that is expected within the limit."""
        first, held = question.first, len(question.tiers)
        finish, step = _lines(question)
        blocks, fetch_s = first, 0.0
        for tier in question.tiers[first:]:
            finish[tier] += step[tier]
            if finish[tier] > question.limit_s:
                break
            blocks, fetch_s = blocks + 1, max(fetch_s, finish[tier])
        if blocks == held:
            reason = f"fetch all {held - first} blocks{_whence(question, blocks)}: {_time(fetch_s)}"
        else:
            reason = (
                f"fetch {blocks - first} of {held - first} blocks{_whence(question, blocks)}: "
                f"{_time(fetch_s)}; the rest would pass the deadline of {_time(question.limit_s)}"
            )
        return Plan(blocks, fetch_s, 0.0, 0.0, question.limit_s, reason)


class BestCut:
    """Fetch what brings the first token soonest; what is held, while computing has no known cost.

    A fetch's deadline is `share` of the computing it saves, or `slack` times what it should take.
    """

    def __init__(self, share: float = SHARE, slack: float = SLACK) -> None:
        self._share = share
        self._slack = slack
        self._unknown = FetchHeld()

    def plan(self, question: Question) -> Plan:
        """Return the cut with the least time to the first token; the shortest of equals."""
        cost = question.cost
        if cost is None or question.prompt_tokens <= 0:
            return self._unknown.plan(question)
        if not isinstance(question.tiers, bytes):  # which are counted and cut in no time
            question = question._replace(tiers=bytes(question.tiers))
        have, prompt = question.have_tokens, question.prompt_tokens
        recompute_s = cost.seconds(prompt - have, have)
        blocks, least_s = _best(question, cost)
        there_s, tokens = fetch_s(question, blocks), _ready(question, blocks)
        saved_s = recompute_s - cost.seconds(prompt - tokens, tokens)
        deadline_s = min(max(self._share * saved_s, self._slack * there_s), question.limit_s)
        reason = _reason(question, blocks, least_s, recompute_s)
        return Plan(blocks, there_s, least_s, recompute_s, deadline_s, reason)


def expected_s(question: Question, blocks: int) -> float:
    """Return the time to the first token of one cut, in plain terms; the cost must be known."""
    if question.cost is None:
        raise ValueError("nothing can be expected of an engine whose cost is not known")
    tokens = _ready(question, blocks)
    computed_s = question.cost.seconds(question.prompt_tokens - tokens, tokens)
    taken = question.tiers[question.first : blocks]
    if not taken:
        return computed_s
    delivered_s = question.delivery.seconds(question.block_bytes * len(taken))
    return fetch_s(question, blocks) + delivered_s + computed_s


def fetch_s(question: Question, blocks: int) -> float:
    """Return when the last of these blocks is there: each tier for itself, side by side."""
    taken = question.tiers[question.first : blocks]
    return max(
        estimate.seconds(question.block_bytes * taken.count(tier))
        for tier, estimate in enumerate(question.estimates)
    )


def _ready(question: Question, blocks: int) -> int:
    """Return how many tokens need no computing; the last one always does, to sample from."""
    if blocks <= question.first:
        return question.have_tokens
    return min(blocks * question.block_tokens, question.prompt_tokens - 1)


def _lines(question: Question) -> tuple[list[float], list[float]]:
    """Return, for each tier, when it begins to deliver, and the seconds it takes for each block."""
    starts = [each.latency_s for each in question.estimates]
    steps = [_NEVER] * len(starts)
    for tier, each in enumerate(question.estimates):
        if each.bytes_per_s > 0:
            starts[tier] += each.queued_bytes / each.bytes_per_s
            steps[tier] = question.block_bytes / each.bytes_per_s
    return starts, steps


def _best(question: Question, cost: PrefillCost) -> tuple[int, float]:
    """Return the best cut and its time to the first token.

    `left`, what is still to be done once the blocks are there, falls by `gain` with every block,
    and `gain` grows by `bend`: the attention over a longer prompt. So a cut costs a few additions.
    """
    first, size, prompt = question.first, question.block_tokens, question.prompt_tokens
    whole = max(first, min(len(question.tiers), (prompt - 1) // size))
    deliver = question.delivery
    each = question.block_bytes / deliver.bytes_per_s if deliver.bytes_per_s > 0 else _NEVER
    bend = cost.c * size * size
    gain = cost.b * size + bend * (first + 0.5) - each
    left = deliver.seconds(question.block_bytes) - each
    left += cost.seconds(prompt - first * size, first * size)
    least, at = cost.seconds(prompt - question.have_tokens, question.have_tokens), first
    if each == _NEVER:
        return at, least
    finish, step = _lines(question)
    done, block = 0.0, first
    for tier in question.tiers[first:whole]:
        arrived = finish[tier] + step[tier]
        finish[tier] = arrived
        block += 1
        left -= gain
        gain += bend
        if arrived > done:
            if arrived > question.limit_s:
                return at, least
            done = arrived
        if done + left < least:
            least = done + left
            at = block
    if whole < len(question.tiers) and whole * size < prompt:
        # The last block ends with the prompt: one token of it is computed all the same.
        in_time = fetch_s(question, whole + 1) <= question.limit_s
        total = expected_s(question, whole + 1)
        if in_time and total < least:
            return whole + 1, total
    return at, least


def _time(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")  # before the unit is chosen: 99.9 ms are 0.10 s
    return f"{seconds:.2f} s" if rounded >= _SHORT_S else f"{1000 * rounded:.2g} ms"


def _reason(question: Question, blocks: int, expected: float, recompute: float) -> str:
    first, held = question.first, len(question.tiers)
    if held <= first:
        return f"recompute {_time(recompute)}: nothing that is missing is held"
    if blocks <= first:
        why = _why(question, first)
        return f"recompute {_time(recompute)}, fetch none of {held - first} blocks held: {why}"
    words = (
        f"fetch {blocks - first} of {held - first} blocks{_whence(question, blocks)}: "
        f"{_time(expected)} against {_time(recompute)}"
    )
    if blocks == held:
        return words
    return f"{words}; last {held - blocks} recomputed: {_why(question, blocks)}"


def _whence(question: Question, blocks: int) -> str:
    taken = question.tiers[question.first : blocks]
    names = [name for tier, name in enumerate(question.names) if taken.count(tier)]
    return " from " + " and ".join(names) if names else ""


def _why(question: Question, block: int) -> str:
    """Say what keeps the tier of the first block left out from being worth it."""
    tier = question.tiers[block]
    estimate, name = question.estimates[tier], question.names[tier]
    wanted = question.block_bytes * question.tiers[block:].count(tier)
    return f"{name} busy" if estimate.queued_bytes > wanted else f"{name} too slow"
