"""Plan how many held blocks of a prompt to fetch; the rest is recomputed.

The first token is ready when the fetched blocks have arrived and the rest is computed. Tiers are
read in parallel. Computing follows fetching, because attention needs all earlier blocks. The
planner evaluates every cut between fetched and computed blocks, and takes the best.

Computing also waits for the prefill that is queued at the engine, and fetching does not. So behind
a queue a fetch may take as long as the queue without any loss, and more is fetched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.plan.cost import PrefillCost, TierEstimate

SHARE = 0.5
"""A fetch may take this share of the computing time that it saves."""

SLACK = 1.5
"""A fetch may always take this multiple of its expected time."""

_NEVER = float("inf")
_SHORT_S = 0.1
_QUEUE_SHOWN_S = 1e-3
AT_ONCE = TierEstimate(0.0, _NEVER)


class PlanQuestion(NamedTuple):
    """Input of a plan: the held blocks of a prompt, and the current costs of fetch and compute.

    `tiers`: the tier of each leading held block, as an index into `estimates` and `names`.
    `prompt_tokens` 0 and `cost` None mean unknown. `have_tokens`: leading tokens that the engine
    already has. `limit_s`: maximum duration of a fetch. `delivery`: the copy from the node's memory
    into the engine, which follows the fetch. `queued_s`: time for which the engine computes other
    prompts first.
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
    queued_s: float = 0.0

    @property
    def first(self) -> int:
        """The first block that the engine does not have completely."""
        whole = self.have_tokens // self.block_tokens if self.have_tokens else 0
        return min(whole, len(self.tiers))


class Plan(NamedTuple):
    """A decision: use the first `blocks` held blocks and recompute the rest.

    `fetch_s`: time until the blocks are fetched. `expected_s`: time to the first token on an engine
    without a queue. `recompute_s`: the same without a fetch. The last two are 0 if the engine's
    cost is unknown. A fetch that takes longer than `deadline_s` is cancelled. `reason` is one line.
    """

    blocks: int
    fetch_s: float
    expected_s: float
    recompute_s: float
    deadline_s: float
    reason: str


class Planner(Protocol):
    """Interface of a planner. Pure."""

    @abstractmethod
    def plan(self, question: PlanQuestion) -> Plan:
        """Return the plan for a question."""


class FetchHeld:
    """Plans to fetch all held blocks that arrive within the limit, without regard to the cost."""

    def plan(self, question: PlanQuestion) -> Plan:
        """Return the longest prefix that is expected within the limit."""
        first, held = question.first, len(question.tiers)
        blocks = first + blocks_within(
            question.tiers[first:], question.block_bytes, question.estimates, question.limit_s
        )
        there_s = fetch_s(question, blocks)
        if blocks == held:
            reason = f"fetch all {held - first} blocks{_whence(question, blocks)}: {_time(there_s)}"
        else:
            reason = (
                f"fetch {blocks - first} of {held - first} blocks{_whence(question, blocks)}: "
                f"{_time(there_s)}; the rest would pass the deadline of {_time(question.limit_s)}"
            )
        return Plan(blocks, there_s, 0.0, 0.0, question.limit_s, reason)


class BestCut:
    """Plans for the least time to the first token; as `FetchHeld` if the cost is unknown.

    A fetch's deadline is the larger of `SHARE` of the computing time that it saves and `SLACK`
    times its expected duration, and at most the question's limit. It is never later than the first
    token without a fetch, so that blocks on their way do not hold a request up for longer.
    """

    def plan(self, question: PlanQuestion) -> Plan:
        """Return the cut with the least time to the first token; the shortest if several tie."""
        cost = question.cost
        if cost is None or question.prompt_tokens <= 0:
            return FetchHeld().plan(question)
        if not isinstance(question.tiers, bytes):  # bytes are fast to count and slice
            question = question._replace(tiers=bytes(question.tiers))
        have, prompt = question.have_tokens, question.prompt_tokens
        recompute_s = cost.seconds(prompt - have, have)
        blocks = _best(question, cost)
        least_s = expected_s(question, blocks)
        there_s, tokens = fetch_s(question, blocks), _ready(question, blocks)
        saved_s = recompute_s - cost.seconds(prompt - tokens, tokens)
        latest_s = min(question.queued_s + recompute_s, question.limit_s)
        deadline_s = min(max(SHARE * saved_s, SLACK * there_s), latest_s)
        first, held = question.first, len(question.tiers)
        if held <= first:
            reason = f"recompute {_time(recompute_s)}: nothing that is missing is held"
        elif blocks <= first:
            reason = (
                f"recompute {_time(recompute_s)}{_behind(question)}, fetch none of "
                f"{held - first} blocks held: {_why(question, first)}"
            )
        else:
            reason = (
                f"fetch {blocks - first} of {held - first} blocks{_whence(question, blocks)}: "
                f"{_time(least_s)} against {_time(recompute_s)}{_behind(question)}"
            )
            if blocks < held:
                reason += f"; last {held - blocks} recomputed: {_why(question, blocks)}"
        return Plan(blocks, there_s, least_s, recompute_s, deadline_s, reason)


def blocks_within(
    tiers: Sequence[int], block_bytes: int, estimates: Sequence[TierEstimate], limit_s: float
) -> int:
    """Return how many leading blocks are expected in memory within `limit_s` seconds.

    `tiers`: the tier of each block, as an index of `estimates`. The tiers are read in parallel.
    """
    finish, step = _starts_and_steps(block_bytes, estimates)
    for block, tier in enumerate(tiers):
        finish[tier] += step[tier]
        if finish[tier] > limit_s:
            return block
    return len(tiers)


def first_token_s(question: PlanQuestion, blocks: int) -> float:
    """Return the time to the first token behind the engine's queue; the cost must be known."""
    waits_s = max(0.0, question.queued_s - fetch_s(question, blocks))
    return expected_s(question, blocks) + waits_s


def expected_s(question: PlanQuestion, blocks: int) -> float:
    """Return the time to the first token if `blocks` are fetched and the engine has no queue.

    The cost must be known.
    """
    if question.cost is None:
        raise ValueError("the engine's prefill cost is unknown; give the question a cost")
    tokens = _ready(question, blocks)
    computed_s = question.cost.seconds(question.prompt_tokens - tokens, tokens)
    taken = question.tiers[question.first : blocks]
    if not taken:
        return computed_s
    delivered_s = question.delivery.seconds(question.block_bytes * len(taken))
    return fetch_s(question, blocks) + delivered_s + computed_s


def fetch_s(question: PlanQuestion, blocks: int) -> float:
    """Return the time until the first `blocks` are fetched, from all tiers in parallel."""
    taken = question.tiers[question.first : blocks]
    return max(
        estimate.seconds(question.block_bytes * taken.count(tier))
        for tier, estimate in enumerate(question.estimates)
    )


def _ready(question: PlanQuestion, blocks: int) -> int:
    """Return how many tokens need no computing; the last token always does, for sampling."""
    if blocks <= question.first:
        return question.have_tokens
    return min(blocks * question.block_tokens, question.prompt_tokens - 1)


def _starts_and_steps(
    block_bytes: int, estimates: Sequence[TierEstimate]
) -> tuple[list[float], list[float]]:
    """Return for each tier the time before its first byte, and the time of one block."""
    starts = [each.latency_s for each in estimates]
    steps = [_NEVER] * len(starts)
    for tier, each in enumerate(estimates):
        if each.bytes_per_s > 0:
            starts[tier] += each.queued_bytes / each.bytes_per_s
            steps[tier] = block_bytes / each.bytes_per_s
    return starts, steps


def _best(question: PlanQuestion, cost: PrefillCost) -> int:
    """Return the best cut.

    `done` is when the engine's queue is computed and the blocks have arrived, `left` the time from
    then to the first token. `left` falls by `gain` with each block, and `gain` grows by `bend`
    because attention is quadratic. So evaluating a cut takes a few additions.
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
    least += question.queued_s
    if each == _NEVER:
        return at
    finish, step = _starts_and_steps(question.block_bytes, question.estimates)
    done, block, limit_s = question.queued_s, first, question.limit_s
    for tier in question.tiers[first:whole]:
        arrived = finish[tier] + step[tier]
        finish[tier] = arrived
        block += 1
        left -= gain
        gain += bend
        if arrived > limit_s:
            return at
        if arrived > done:  # noqa: PLR1730 - `max` takes as long as the rest of the loop
            done = arrived
        if done + left < least:
            least = done + left
            at = block
    if whole < len(question.tiers) and whole * size < prompt:
        # The last block ends with the prompt, whose last token is computed in any case.
        in_time = fetch_s(question, whole + 1) <= limit_s
        if in_time and first_token_s(question, whole + 1) < least:
            return whole + 1
    return at


def _time(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")  # round before choosing the unit: 99.9 ms is 0.10 s
    return f"{seconds:.2f} s" if rounded >= _SHORT_S else f"{1000 * rounded:.2g} ms"


def _whence(question: PlanQuestion, blocks: int) -> str:
    taken = question.tiers[question.first : blocks]
    names = [name for tier, name in enumerate(question.names) if taken.count(tier)]
    return " from " + " and ".join(names) if names else ""


def _behind(question: PlanQuestion) -> str:
    """Return what computing waits for, such as " behind 1.20 s of queued prefill"."""
    queued_s = question.queued_s
    return f" behind {_time(queued_s)} of queued prefill" if queued_s >= _QUEUE_SHOWN_S else ""


def _why(question: PlanQuestion, block: int) -> str:
    """Return why `block`, the first one not fetched, is not worth fetching from its tier."""
    tier = question.tiers[block]
    estimate, name = question.estimates[tier], question.names[tier]
    wanted = question.block_bytes * question.tiers[block:].count(tier)
    return f"{name} busy" if estimate.queued_bytes > wanted else f"{name} too slow"
