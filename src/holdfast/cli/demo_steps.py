"""What every demo has in common: steps that scroll by, a table of them, and a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


REMEDY = (
    "A small model may compute a context sooner than a slow disk or network gives it: "
    "--plan held fetches it all the same."
)


class Shown(Protocol):
    """One step: whether its output equals the engine's own, and whether all of it is as wanted."""

    @property
    def name(self) -> str: ...

    @property
    def equal(self) -> bool: ...

    @property
    def ok(self) -> bool: ...


Step = TypeVar("Step", bound=Shown)


def follow(
    walk: Generator[Step], line: Callable[[Sequence[Step]], str], console: Console
) -> tuple[list[Step], float]:
    """Take every step, printing the line that tells of the last of those done; end what walks.

    Returns the steps and the seconds they took.
    """
    started_s = time.monotonic()
    done: list[Step] = []
    with closing(walk):
        for step in walk:
            done.append(step)
            console.print(line(done), soft_wrap=True)
    return done, time.monotonic() - started_s


def table(title: str, figures: Sequence[str]) -> Table:
    """Return an empty table: the step, these figures, and whether outputs are equal."""
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("step", overflow="fold")
    for heading in figures:
        shown.add_column(heading, justify="right", overflow="fold")
    shown.add_column("equal")
    return shown


def verdict(steps: Sequence[Shown], elapsed_s: float, praise: str) -> str:
    """Return what went wrong, else what is to be said for it."""
    wrong = [step.name for step in steps if not step.equal]
    missed = [step.name for step in steps if step.equal and not step.ok]
    parts = [f"{len(steps)} steps in {elapsed_s:.0f} s."]
    if wrong:
        parts.append(f"[red]Output differs: {', '.join(wrong)}.[/]")
    if missed:
        parts.append(f"[red]Not from where it should have come: {', '.join(missed)}.[/] {REMEDY}")
    if not wrong and not missed:
        parts.append(praise)
    return " ".join(parts)
