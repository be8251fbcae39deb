"""Progress of measuring commands: step n of m, and the elapsed time.

Steps take seconds or minutes each, so no expected end is derived from those that are done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cli.progress import duration_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text


class Steps:
    """The steps of a command: a live status line on a terminal, else a plain line for each.

    Without `plan` the number of steps is unknown, and only the elapsed time is shown.
    """

    def __init__(self, console: Console, status: Status | None) -> None:
        self.console = console
        self._status = status
        self._started_s = time.monotonic()
        self._begun = self._total = 0

    def plan(self, steps: int) -> None:
        """Set the number of steps that follow; the time until now is not one of them."""
        self._begun, self._total = 0, steps

    def begin(self, text: str) -> None:
        """Show that the next step begins."""
        self.advance()
        self.update(text)

    def advance(self) -> None:
        """Count the next step as begun; `update` shows it."""
        self._begun += 1

    def update(self, text: str) -> None:
        """Show a part of the current step, which is not counted."""
        step = ""
        if self._begun and self._begun <= self._total:
            step = f"step {self._begun} of {self._total}"
        if self._status is not None:
            self._status.update(_LiveLine(step, text, self._started_s))
        else:
            elapsed_s = time.monotonic() - self._started_s
            line = f"{step}: {text}" if step else text
            print(f"{elapsed_s:6.0f} s  {line}", file=sys.stderr, flush=True)


class _LiveLine:
    """A status line whose elapsed time is that of its latest drawing."""

    def __init__(self, step: str, text: str, started_s: float) -> None:
        self._step = step
        self._text = text
        self._started_s = started_s

    def __rich__(self) -> Text:
        from rich.text import Text

        so_far = f"{duration_text(time.monotonic() - self._started_s)} so far"
        return Text(f"{self._step + ', ' if self._step else ''}{so_far}: {self._text}")


@contextmanager
def progress(console: Console, text: str) -> Iterator[Steps]:
    """Yield the steps of a command, with a first text for its set-up."""
    if console.is_terminal:
        with console.status(text) as status:
            yield Steps(console, status)
        return
    steps = Steps(console, None)
    steps.update(text)
    yield steps
