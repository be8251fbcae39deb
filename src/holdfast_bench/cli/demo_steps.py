"""Shared parts of the demos: running the steps, the table of steps, and the verdict."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from holdfast_bench.cli.progress import Steps
from holdfast_bench.scenarios.demo_scenario import DemoStep
from holdfast_bench.scenarios.pool_demo_scenario import PoolStep

if TYPE_CHECKING:
    from rich.table import Table


CheckedStep: TypeAlias = DemoStep | PoolStep
Step = TypeVar("Step", DemoStep, PoolStep)


def follow(
    walk: Generator[Step], line: Callable[[Sequence[Step]], str], steps: Steps
) -> tuple[list[Step], float]:
    """Run every step, print the line of each when it finishes, and close the generator.

    Returns the steps and the seconds they took.
    """
    started_s = time.monotonic()
    done: list[Step] = []
    with closing(walk):
        steps.advance()
        for step in walk:
            done.append(step)
            steps.console.print(line(done), soft_wrap=True)
            steps.advance()
    return done, time.monotonic() - started_s


def table(title: str, figures: Sequence[str]) -> Table:
    """Return an empty table with columns for the step, these figures, and equality of outputs."""
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("step", overflow="fold")
    for heading in figures:
        shown.add_column(heading, justify="right", overflow="fold")
    shown.add_column("equal")
    return shown


def step_verdict(step: CheckedStep, outputs: str) -> str:
    """Return whether a step's output, or outputs, are equal and from the expected tier."""
    if not step.equal:
        return "[red]output differs[/]"
    if step.ok:
        return f"[green]{outputs} equal[/]"
    return f"{outputs} equal, [red]not from the expected tier[/]"


def verdict(steps: Sequence[CheckedStep], elapsed_s: float, praise: str) -> str:
    """Return the failed steps and their recorded causes; `praise` if none failed."""
    from rich.markup import escape

    wrong = [step.name for step in steps if not step.equal]
    missed = [step.name for step in steps if step.equal and not step.ok]
    parts = [f"{len(steps)} steps in {elapsed_s:.0f} s."]
    if wrong:
        parts.append(f"[red]Output differs: {', '.join(wrong)}.[/]")
    if missed:
        parts.append(f"[red]Not from where it should have come: {', '.join(missed)}.[/]")
        parts += [f"{step.name}: {escape(step.cause)}." for step in steps if step.cause]
    if not wrong and not missed:
        parts.append(praise)
    return " ".join(parts)


def keep_logs(folder: Path) -> Path | None:
    """Copy the log files below a folder to a new folder that is kept; None if there are none."""
    logs = list(folder.rglob("*.log"))
    if not logs:
        return None
    kept = Path(tempfile.mkdtemp(prefix="holdfast-logs-", dir=folder.parent))
    for log in logs:
        target = kept / log.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, target)
    return kept
