"""Dependencies in a session: the answer that each request waits for."""

from __future__ import annotations

import bisect
import math

from holdfast.sim.trace import Trace

_TICK_S = 1e-3
"""Resolution of times in a trace."""


def followers(trace: Trace) -> dict[int, list[int]]:
    """Map each request to the requests of its session that wait for its answer.

    A request waits for the last request that had arrived when the client's think time began. This
    is not always the previous request, because agents send several requests at once.
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
