"""Progress of long work: how much is done, the elapsed time, and the rest while the rate is steady.

An expected end is shown only if it can be trusted: if the work of the last half of the time went at
the rate of the whole. Otherwise the elapsed time is all that is known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TERMINAL_PERIOD_S = 0.5
_LINES_PERIOD_S = 10.0
"""Minimum seconds between two lines where standard error is no terminal."""

STEADY_FACTOR = 1.25
"""Largest ratio of the two rates of steady work."""

SAMPLES_MIN = 8
"""Samples below which the rate says little: a few steps of unequal length look steady by chance."""

_SAMPLES_MAX = 256


class WorkRate:
    """The rate of work that began at 0 s, from samples of how much was done."""

    def __init__(self) -> None:
        self._samples = [(0.0, 0.0)]

    def note(self, done: float, elapsed_s: float) -> None:
        """Record how much is done after this time."""
        if len(self._samples) >= _SAMPLES_MAX:
            del self._samples[1::2]
        self._samples.append((elapsed_s, done))

    def remaining_s(self, done: float, total: float, elapsed_s: float) -> float | None:
        """Return the expected rest in seconds; None if it is unknown or the rate is not steady."""
        if not 0 < done < total or elapsed_s <= 0 or len(self._samples) <= SAMPLES_MIN:
            return None
        half_s, half_done = next(
            sample for sample in reversed(self._samples) if sample[0] <= elapsed_s / 2
        )
        whole, recent = done / elapsed_s, (done - half_done) / (elapsed_s - half_s)
        if not whole / STEADY_FACTOR <= recent <= whole * STEADY_FACTOR:
            return None
        return (total - done) / whole


def duration_text(seconds: float) -> str:
    """Return a duration with two units at most: "41 s", "2 min 5 s", "1 h 3 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:  # noqa: PLR2004  # an hour
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def work_progress(unit: str, part: str = "") -> Iterator[Callable[[float, float, str], None]]:
    """Yield a function that shows on standard error what is done, of a total, and a note.

    `part`: what the total is of, if more work follows, such as "this campaign". On a terminal it
    rewrites one line, which is removed at the end. Elsewhere it prints a line every
    `_LINES_PERIOD_S`, so short work prints nothing.
    """
    terminal = sys.stderr.isatty()
    period_s = _TERMINAL_PERIOD_S if terminal else _LINES_PERIOD_S
    began_s = shown_s = time.monotonic()
    rate = WorkRate()

    def show(done: float, total: float, note: str) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        rate.note(done, now_s - began_s)
        if now_s - shown_s < period_s:
            return
        shown_s = now_s
        line = f"{done:,.0f}{f' of {total:,.0f}' if total > 0 else ''} {unit}, {note}: "
        line += f"{duration_text(now_s - began_s)} elapsed"
        if (rest_s := rate.remaining_s(done, total, now_s - began_s)) is not None:
            line += f", about {duration_text(rest_s)} left{f' of {part}' if part else ''}"
        sys.stderr.write(f"\r\x1b[K{line}" if terminal else f"{line}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
