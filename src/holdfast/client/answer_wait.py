"""How long one scheduling step of an engine waits for a node's answers about new requests.

Without an answer the engine schedules a new request one step later, which costs that request the
whole step. A node usually answers within a millisecond. So the step waits for a small share of the
time that a step takes, which delays the other requests by at most that share.
"""

from __future__ import annotations

STEP_SHARE = 0.05
"""Longest wait of a step, as a share of the last step's time."""

STEP_MAX_S = 0.02
"""Longest wait of a step while other requests are computed, however long the steps are."""

IDLE_S = 0.005
"""Longest wait of a step while no request is computed: it delays no other request.

Without it the engine would poll for the answer with empty steps of about 3 ms, and leave its
processes spinning beside the next step.
"""

VAIN_SHARE = 0.5
"""A wait without an answer shows that the node is slow if it took this share of the budget."""

MAX_SKIPPED = 64
"""Largest number of answers after a vain wait before a step waits as long again."""

LONGER = 2.0
"""A wait that may take this many times as long as the vain one is tried at once: steps differ."""


def budget_s(step_s: float, *, computing: bool) -> float:
    """Return how long a step may wait in all, for all of its new requests.

    `step_s`: time of the last step, 0 if not known; `computing`: other requests are computed.
    """
    share_s = min(STEP_SHARE * step_s, STEP_MAX_S)
    return share_s if computing else max(share_s, IDLE_S)


class AnswerWait:
    """The time that the present step has left to wait for answers.

    A node that did not answer in time is slow. While requests are computed, no step waits as long
    again until the node has answered a number of lookups, which doubles with each vain wait.
    """

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._vain_waits = 0
        self._vain_s = 0.0
        self._skipped = 0

    def next_step(self) -> None:
        """Begin the next scheduling step, with a budget of its own."""
        self._spent_s = 0.0

    def limit_s(self, step_s: float, *, computing: bool) -> float:
        """Return how long the step may wait now; arguments as for `budget_s`."""
        left_s = max(budget_s(step_s, computing=computing) - self._spent_s, 0.0)
        is_slow = computing and self._skipped and left_s < LONGER * self._vain_s
        return 0.0 if is_slow else left_s

    def waited(self, seconds: float, limit_s: float, *, answered: bool) -> None:
        """Note a wait with this limit."""
        budget = self._spent_s + limit_s
        self._spent_s += seconds
        if answered:
            self._vain_waits = self._skipped = 0
        elif limit_s >= VAIN_SHARE * budget:
            self._vain_waits += 1
            self._vain_s = limit_s
            self._skipped = min(2**self._vain_waits, MAX_SKIPPED)

    def answered(self) -> None:
        """Note an answer that arrived without a wait."""
        self._skipped = max(self._skipped - 1, 0)
