"""Times what the planner learns from: steps that mostly prefill, loads, and first tokens.

Everything is measured where the scheduler waits for it, so that it means the same on every device:
from the moment a step is handed out, or the step before it ended, to its own end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.engines.vllm.tracked import Tracked
from holdfast.wire.messages import Observed

TOKENS_MIN = 16
"""Steps of fewer tokens say more about decoding."""

PREFILL_SHARE = 0.9
REPORT_AT = 16
"""Observations that make a report; one is also due when there is nothing else to do."""

KEPT_MAX = 256
"""Observations kept while no node is there to hear them."""


class Chunk(NamedTuple):
    """Part of a step: `new` tokens of a request behind `context`; `last`: they end its prompt."""

    tracked: Tracked
    new: int
    context: int
    last: bool


class _Step(NamedTuple):
    began: float
    new: int
    context: float
    endings: list[tuple[int, float, float]]


class Stopwatch:
    """Collects what to tell the node. Times come from `now`, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._under_way: deque[_Step] = deque(maxlen=8)
        self._ended_at = 0.0
        self._steps: list[tuple[float, float, float]] = []
        self._endings: list[tuple[int, float, float]] = []

    def begin(self, chunks: Sequence[Chunk], *, sound: bool) -> None:
        """A step with a forward begins; `sound`: nothing else goes on, and these are all of it."""
        new = sum(chunk.new for chunk in chunks)
        prefill = sum(chunk.new for chunk in chunks if chunk.new > 1)
        pairs = sum(chunk.new * (chunk.context + chunk.new / 2) for chunk in chunks)
        endings = [
            (chunk.tracked.plan, chunk.tracked.loaded_s, chunk.tracked.decided_at)
            for chunk in chunks
            if chunk.last and chunk.tracked.plan
        ]
        if not (sound and prefill >= max(TOKENS_MIN, PREFILL_SHARE * new)):
            new = 0
        context = pairs / new - new / 2 if new else 0.0
        self._under_way.append(_Step(self._now(), new, context, endings))

    def end(self) -> None:
        """The oldest step under way has ended, if there is one; only for a step with a forward."""
        if not self._under_way:
            return
        now, step = self._now(), self._under_way.popleft()
        if step.new:
            seconds = now - max(step.began, self._ended_at)
            self._steps.append((step.new, step.context, seconds))
        self._ended_at = now
        self._endings += [
            (plan, loaded_s, now - decided_at) for plan, loaded_s, decided_at in step.endings
        ]
        del self._steps[:-KEPT_MAX], self._endings[:-KEPT_MAX]

    def report(self, *, idle: bool) -> Observed | None:
        """Return what is to be told now, if anything, and forget it."""
        number = len(self._steps) + len(self._endings)
        if not number or (number < REPORT_AT and not idle):
            return None
        steps, self._steps = self._steps, []
        endings, self._endings = self._endings, []
        return Observed(steps, endings)
