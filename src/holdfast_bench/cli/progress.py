"""Progress of measuring commands: step n of m, the elapsed time, and the expected end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.cli.progress import remaining_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


class Steps:
    """The steps of a command: a status line on a terminal, else a plain line for each.

    The expected end assumes that the steps that are left take as long, on average, as those done.
    Without `plan` the number of steps is unknown, and only the elapsed time is shown.
    """

    def __init__(self, console: Console, status: Status | None) -> None:
        self.console = console
        self._status = status
        self._started_s = time.monotonic()
        self._planned_s = self._started_s
        self._begun = self._total = 0

    def plan(self, steps: int) -> None:
        """Set the number of steps that follow; the time until now is not one of them."""
        self._planned_s = time.monotonic()
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
        now_s = time.monotonic()
        if self._begun and self._begun <= self._total:
            rest = remaining_text(self._begun - 1, self._total, now_s - self._planned_s)
            text = f"step {self._begun} of {self._total}, {rest}: {text}"
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(text))
        else:
            elapsed_s = now_s - self._started_s
            print(f"{elapsed_s:6.0f} s  {text}", file=sys.stderr, flush=True)


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
