"""Arrival times of a trace: their unit, and whether they are times at all.

Files of all formats are seen with times in another unit than their format's, and with numbers in
place of times. A date since 1970 shows its unit; other times only show that their unit is unlikely.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.trace import Floats

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds in each unit that times may have."""

NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

TIME_MAX = 1e19
"""Maximum absolute value of a time stamp in any unit; more is an error in the file."""

EPOCH_S = 1e9, 4e9
"""Seconds since 1970 that count as a date: 2001 to 2096."""

RATE_MAX = 100.0
"""Mean requests per second above which times of a trace without dates are not believed to be ms."""

REQUESTS_MIN = 10
"""Requests from which a mean rate is judged; with fractions of a millisecond, `NUMBERED_MIN`."""

NUMBERED_MIN = 3
"""Requests from which equal steps count as numbers and not as times."""


class Arrivals(NamedTuple):
    """The arrival times of a file's requests."""

    time_s: Floats
    untimed: str = ""
    """Why the times cannot be used; empty if they can."""
    remark: str = ""
    """What was assumed; empty for nothing."""


def arrivals(raw: Floats, unit: str, chosen: str | None) -> Arrivals:
    """Read times in the unit of their format, or in `chosen`, the unit that the user gives."""
    steps = np.diff(np.sort(raw))
    span = float(steps.sum())
    if len(raw) >= NUMBERED_MIN and not span:
        return Arrivals(raw * UNITS_S[unit], "all its requests have the same time")
    if chosen:
        return Arrivals(raw * UNITS_S[chosen])
    least = float(raw.min())
    for other, second in UNITS_S.items():
        if EPOCH_S[0] <= least * second < EPOCH_S[1]:
            remark = "" if other == unit else f"its times are dates in {NAMES[other]}, read as such"
            return Arrivals(raw * second, remark=remark)
    if len(raw) >= NUMBERED_MIN and _are_numbers(raw, steps, unit):
        return Arrivals(raw * UNITS_S[unit], f"its times number the requests: {_first(raw)}")
    rate = (len(raw) - 1) / (span * UNITS_S[unit]) if span else 0.0
    judged = len(raw) >= (REQUESTS_MIN if (raw == np.round(raw)).all() else NUMBERED_MIN)
    if unit == "ms" and judged and rate > RATE_MAX:
        return Arrivals(
            raw * UNITS_S[unit],
            f"its times mean {rate:,.0f} requests a second if they are milliseconds, as in this "
            f"format, and {rate / 1e3:,.3g} if they are seconds (give --time-unit ms or s)",
        )
    return Arrivals(raw * UNITS_S[unit])


def _are_numbers(raw: Floats, steps: Floats, unit: str) -> bool:
    """Return whether times count requests, or the turns of each session, and measure nothing.

    Milliseconds of real traffic are never dense; seconds may be, but do not come one by one.
    """
    if not (raw == np.round(raw)).all():
        return False
    return bool((steps <= 1).all() if unit == "ms" else (steps == 1).all())


def _first(raw: Floats) -> str:
    return ", ".join(f"{value:g}" for value in raw[:3]) + ", ..."
