"""Measure prefill steps, loads and times to the first token, for the planner's estimates.

Times are measured in the scheduler, so that they mean the same on every device: a step lasts from
its dispatch, or from the end of the step before it if that is later, to its own end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from holdfast.client.prompt_ledger import CountedPrompt
from holdfast.client.tracked_request import PlanEnd
from holdfast.wire.local.messages import Observed

TOKENS_MIN = 16
"""Shorter steps are not reported, because decoding dominates them."""

PREFILL_SHARE = 0.9
"""Minimum share of prefill tokens in a step that is reported."""

REPORT_AT = 16
"""Number of observations that make a report due; an idle engine reports any number."""

MAX_OBSERVATIONS = 256
"""Observations of each kind that are kept until they are reported."""


class PrefillChunk(NamedTuple):
    """One request's part of a step: `new` tokens after `context` tokens.

    `end`: how the request's plan ends with this step; None if the prompt continues or has no plan.
    """

    new: int
    context: int
    end: PlanEnd | None = None


class _Step(NamedTuple):
    began: float
    new: int
    context: float
    ends: list[PlanEnd]


class StepTimer:
    """Collects observations for the node. `now` is the clock, in seconds.

    `step_s`: time of the last step with a forward; 0 before the first one has ended.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.step_s = 0.0
        self._now = now
        self._under_way: deque[_Step] = deque(maxlen=8)
        self._ended_at = 0.0
        self._observed = Observed([])

    def begin(self, chunks: Sequence[PrefillChunk], *, sound: bool) -> None:
        """Begin a step with a forward; `sound`: no load runs, and `chunks` is the whole step."""
        new = sum(chunk.new for chunk in chunks)
        prefill = sum(chunk.new for chunk in chunks if chunk.new > 1)
        pairs = sum(chunk.new * (chunk.context + chunk.new / 2) for chunk in chunks)
        ends = [chunk.end for chunk in chunks if chunk.end is not None]
        if not (sound and prefill >= max(TOKENS_MIN, PREFILL_SHARE * new)):
            new = 0
        context = pairs / new - new / 2 if new else 0.0
        self._under_way.append(_Step(self._now(), new, context, ends))

    def end(self) -> None:
        """End the oldest step under way, if any. Call it only for a step with a forward."""
        if not self._under_way:
            return
        now, step = self._now(), self._under_way.popleft()
        self.step_s = now - max(step.began, self._ended_at)
        if step.new:
            self._observed.steps.append((step.new, step.context, self.step_s))
        self._ended_at = now
        for end in step.ends:
            self.plan_ended(end, now - end.decided_at)
        del self._observed.steps[:-MAX_OBSERVATIONS]

    def prompt_counted(self, prompt: CountedPrompt) -> None:
        """Record a prompt whose tokens are counted."""
        self._observed.prompts.append((prompt.tokens, prompt.engine, dict(prompt.loaded)))
        del self._observed.prompts[:-MAX_OBSERVATIONS]

    def plan_ended(self, end: PlanEnd, first_token_s: float = 0.0) -> None:
        """Record how a plan ended; one that was not carried out has no time to the first token."""
        observed = self._observed
        if end.not_followed is None:
            observed.endings.append((end.plan, end.loaded_s, first_token_s))
        else:
            observed.not_followed.append((end.plan, str(end.not_followed), first_token_s))
        del observed.endings[:-MAX_OBSERVATIONS], observed.not_followed[:-MAX_OBSERVATIONS]

    def report(self, *, idle: bool) -> Observed | None:
        """Return and clear the observations if a report is due; None otherwise."""
        observed = self._observed
        number = sum(map(len, msgspec.structs.astuple(observed)))
        if not number or (number < REPORT_AT and not idle):
            return None
        self._observed = Observed([])
        return observed
