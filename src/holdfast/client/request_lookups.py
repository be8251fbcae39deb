"""The lookups of an engine's requests: asked at their arrival, read when the engine schedules them.

The engine's scheduler must not wait. So the store is asked at once, and a step waits for answers
only for a small share of its own time (`client.answer_wait`). An answer that does not come in time
counts as none: the request is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from holdfast.blocks.key import KEY_BYTES
from holdfast.client.answer_wait import AnswerWait
from holdfast.client.connection import StoreClient
from holdfast.client.counts import REFUSED, ClientCounts
from holdfast.client.engine_queue import EngineQueue
from holdfast.client.step_timer import StepTimer
from holdfast.client.timeouts import Backoff, EngineClocks
from holdfast.client.tracked_request import PlanRequest, TrackedRequest
from holdfast.errors import NodeGoneError, NotFollowed, Outcome, ProtocolError, RefusedError
from holdfast.limits import CHAIN_BLOCKS_MAX
from holdfast.wire.fields import traceparent
from holdfast.wire.local.messages import Cover, Covered

COVER_MIN_S = 0.05
COVER_MAX_S = 1.0
"""Bounds on the timeout of an answer that is derived from the prompt."""

NODE_SHARE = 0.8
"""Share of the answer's timeout that the node may spend on shared tiers; the rest is transfer."""

COVER_SHARE = 0.05
"""Timeout of an answer, as a share of the estimated time to compute the prompt."""

_log = logging.getLogger(__name__)


class LookupLimits(NamedTuple):
    """Limits of an engine's lookups and loads, in seconds.

    `answer_s` None: the timeout of an answer is derived from the prompt. `load_s`: longest time of
    a load.
    """

    load_s: float
    answer_s: float | None = None


class RequestLookups:
    """Asks the store about requests, and reads its answers into them.

    `timer` knows how long steps take, and is told how plans end. One thread calls the methods.
    `whole`: a context may be resumable after 32 tokens and not after 16, as with recurrent layers.
    Then all ranks must plan to fetch the same blocks; if they do not, they are asked once more,
    about the fewest blocks of all.
    """

    def __init__(
        self,
        limits: LookupLimits,
        counts: ClientCounts,
        clocks: EngineClocks,
        timer: StepTimer,
        *,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self._limits = limits
        self._counts = counts
        self._now, self._running = clocks
        self._timer = timer
        self._backoff = Backoff()
        self._answer_wait = AnswerWait()
        self._token_s = 0.0

    def next_step(self) -> None:
        """Begin the next scheduling step, with a budget of its own for waits."""
        self._answer_wait.next_step()

    def ask(
        self,
        tracked: TrackedRequest,
        clients: Sequence[StoreClient] | None,
        queue: EngineQueue,
        local_tokens: int = 0,
    ) -> None:
        """Ask how much of a request is held; `clients`: one for each rank, None: the store is away.

        `queue`: what the engine does before it. `local_tokens`: those in the engine's own cache.
        """
        blocks = [min(len(group[0]), CHAIN_BLOCKS_MAX) for group in tracked.groups]
        units = min(
            number * group[0].block_tokens // tracked.unit_tokens
            for number, group in zip(blocks, tracked.groups, strict=True)
        )
        tracked.planned_local_tokens = local_tokens
        if not units:
            return  # nothing is asked for such a request, so it has no plan
        if clients is None:
            self.end_plan(tracked, NotFollowed.GONE)
            return
        question = PlanRequest(units, self._running())
        tracked.planned_queue = queue
        deadline_s = NODE_SHARE * self._limit_s(tracked)
        trace = traceparent((tracked.request.trace_headers or {}).get("traceparent", ""))
        try:
            chains = zip(
                *(tracked.keys(0, number, group) for group, number in enumerate(blocks)),
                strict=True,
            )
            for client, (keys, *more), common in zip(
                clients, chains, tracked.common_keys(), strict=True
            ):
                cover = Cover(
                    keys,
                    tokens=tracked.request.num_tokens,
                    have=local_tokens,
                    limit_s=self._limits.load_s,
                    plan=tracked.plan,
                    session=tracked.hint.session,
                    common=common,
                    deadline_s=deadline_s,
                    trace=trace,
                    queued_tokens=queue.tokens,
                    queued_pairs=queue.pairs,
                    to_load=dict(queue.to_load),
                    more_keys=more,
                )
                question.ask(client, cover)
        except NodeGoneError:
            self._counts.add("calls", "lookup", "gone")
            question.forget()
            self.end_plan(tracked, NotFollowed.GONE)
            return
        tracked.question = question

    def answered(self, tracked: TrackedRequest, *, computing: bool) -> bool:
        """Read the replies that arrived; return whether the answer is complete, failed or late.

        `computing`: whether the engine computes requests that a wait would delay.
        """
        if self.polled(tracked, partial(self._wait_briefly, computing)):
            return True
        question = tracked.question
        if question is None:
            return True
        limit_s, waited_s = self._limit_s(tracked), self._running() - question.at_s
        if waited_s < limit_s or (
            # A node that may lack a processor has longer, unless the user set the timeout.
            self._limits.answer_s is None
            and waited_s < self._backoff.timeout_s(COVER_MAX_S)
            and question.node_is_runnable()
        ):
            return False
        _log.info("late: the node did not say within %.3g s what is held; computed", limit_s)
        self._backoff.late()
        self._counts.add("calls", "lookup", "late")
        tracked.forget()
        self.end_plan(tracked, NotFollowed.LATE)
        return True

    def polled(
        self,
        tracked: TrackedRequest,
        read: Callable[[PlanRequest], Covered | None] = PlanRequest.answer,
    ) -> bool:
        """Read the replies that arrived; return whether the answer is complete, or failed.

        True also if nothing was asked.
        """
        question = tracked.question
        if question is None:
            return True
        try:
            answer = read(question)
            if answer is not None and self._must_agree(tracked, question, answer):
                if not question.is_repeated:
                    tracked.plan = answer.plan
                    tracked.question = _asked_again(tracked, question, answer.worth)
                    return False
                answer = msgspec.structs.replace(answer, worth=0)
        except (NodeGoneError, RefusedError, ProtocolError) as error:
            outcome = REFUSED if isinstance(error, RefusedError) else Outcome.GONE
            self._counts.add("calls", "lookup", outcome)
            tracked.forget()  # an earlier answer is outdated
            self.end_plan(tracked, NotFollowed.GONE)
            return True
        if answer is None:
            return False
        self._backoff.answered()
        self._counts.add("calls", "lookup", "ok")
        tracked.learn(answer)
        if answer.recompute_s:
            computed = tracked.request.num_tokens - tracked.planned_local_tokens
            self._token_s = answer.recompute_s / max(1, computed)
        return True

    def end_plan(self, tracked: TrackedRequest, why: NotFollowed) -> None:
        """Note that the plan of a request, if it has one, is not carried out."""
        end = tracked.end_plan(why)
        if end is not None:
            self._timer.plan_ended(end)

    def _must_agree(self, tracked: TrackedRequest, question: PlanRequest, answer: Covered) -> bool:
        """Return whether the ranks' plans differ, and some rank may be unable to load the least."""
        loads = answer.worth * tracked.unit_tokens > tracked.planned_local_tokens
        return self._whole and loads and question.ranks_differ

    def _limit_s(self, tracked: TrackedRequest) -> float:
        """Return the timeout of this prompt's answer; it shrinks while the node is silent."""
        if self._limits.answer_s is not None:
            return self._backoff.timeout_s(self._limits.answer_s)
        share_s: float = COVER_SHARE * self._token_s * tracked.request.num_tokens
        return self._backoff.timeout_s(min(max(COVER_MIN_S, share_s), COVER_MAX_S))

    def _wait_briefly(self, computing: bool, question: PlanRequest) -> Covered | None:  # noqa: FBT001  # bound by `partial`
        """Return the answer; wait for it at most for what is left of this step's budget."""
        if (answer := question.answer()) is not None:
            self._answer_wait.answered()
            return answer
        limit_s = self._answer_wait.limit_s(self._timer.step_s, computing=computing)
        if limit_s <= 0:
            return None
        began_s = self._now()
        answer = question.answer(limit_s, self._now)
        seconds, answered = self._now() - began_s, answer is not None
        self._answer_wait.waited(seconds, limit_s, answered=answered)
        return answer


def _asked_again(tracked: TrackedRequest, question: PlanRequest, blocks: int) -> PlanRequest:
    """Ask every rank again, about no more than `blocks` blocks; raises NodeGoneError."""
    sizes = [group[0].block_tokens for group in tracked.groups]
    ends = [blocks * tracked.unit_tokens // size * KEY_BYTES for size in sizes]
    again = PlanRequest(blocks, question.at_s, is_repeated=True)
    try:
        for client, cover, covered in question.replies:
            chains = zip((cover.keys, *cover.more_keys), ends, strict=True)
            keys, *more = (chain[:end] for chain, end in chains)
            again.ask(
                client,
                msgspec.structs.replace(cover, keys=keys, more_keys=more, plan=covered.plan),
            )
    except NodeGoneError:
        again.forget()
        raise
    return again
