"""Which request of a session waits for which answer."""

from __future__ import annotations

import bisect
import math

from holdfast.sim.trace import Trace

_TICK_S = 1e-3
"""Times in a trace are this coarse."""


def followers(trace: Trace) -> dict[int, list[int]]:
    """Map each request to those of its session that wait for its answer.

    The answer before a request is that of the last one which had come when the client began to
    think: agents ask for several things at once, so it need not be the one just before.
    """
    sessions: dict[int, tuple[list[float], list[int]]] = {}
    after: dict[int, list[int]] = {}
    for number, session in enumerate(trace.session.tolist()):
        if session < 0:
            continue
        times, numbers = sessions.setdefault(session, ([], []))
        at_s, think_s = float(trace.time_s[number]), float(trace.think_s[number])
        if not math.isnan(think_s):
            before = bisect.bisect_right(times, at_s - think_s + _TICK_S)
            if before:
                after.setdefault(numbers[before - 1], []).append(number)
        times.append(at_s)
        numbers.append(number)
    return after
