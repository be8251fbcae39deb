"""Progress of long work: how much is done, the elapsed time, and the expected end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TERMINAL_PERIOD_S = 0.5
_LINES_PERIOD_S = 10.0
"""Minimum seconds between two lines where standard error is no terminal."""


def remaining_text(done: float, total: float, elapsed_s: float) -> str:
    """Return the elapsed time and, if known, the expected rest: "41 s, about 62 s left".

    The rest is expected to take as long as the work done until now took, in proportion.
    """
    elapsed = f"{_seconds_text(elapsed_s)} elapsed"
    if not 0 < done < total:
        return elapsed
    return f"{elapsed}, about {_seconds_text(elapsed_s * (total - done) / done)} left"


def _seconds_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:  # noqa: PLR2004  # an hour
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def work_progress(unit: str) -> Iterator[Callable[[float, float, str], None]]:
    """Yield a function that shows on standard error what is done, of a total, and a note.

    On a terminal it rewrites one line, which is removed at the end. Elsewhere it prints a line
    every `_LINES_PERIOD_S`, so short work prints nothing.
    """
    terminal = sys.stderr.isatty()
    period_s = _TERMINAL_PERIOD_S if terminal else _LINES_PERIOD_S
    began_s = shown_s = time.monotonic()

    def show(done: float, total: float, note: str) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < period_s:
            return
        shown_s = now_s
        of = f" of {total:,.0f}" if total > 0 else ""
        rest = remaining_text(done, total, now_s - began_s)
        line = f"{done:,.0f}{of} {unit}, {note}: {rest}"
        sys.stderr.write(f"\r\x1b[K{line}" if terminal else f"{line}\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
