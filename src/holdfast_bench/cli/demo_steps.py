"""The steps of a demo: run and print them, their table and rows, the verdict, the logs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import report
from holdfast.report import Row
from holdfast_bench.cli.progress import Steps
from holdfast_bench.scenarios.demo_scenario import DemoStep
from holdfast_bench.scenarios.engines_demo_scenario import EnginesStep
from holdfast_bench.scenarios.pool_demo_scenario import PoolStep

if TYPE_CHECKING:
    from rich.table import Table


def follow(
    walk: Generator[DemoStep], about: Mapping[str, str], steps: Steps
) -> tuple[list[DemoStep], float]:
    """Run every step, print the line of each when it finishes, and close the generator.

    `about` describes each step by its name. Returns the steps and the seconds they took.
    """
    started_s = time.monotonic()
    done: list[DemoStep] = []
    with closing(walk):
        steps.advance()
        for step in walk:
            done.append(step)
            steps.console.print(line(done, about[step.name]), soft_wrap=True)
            steps.advance()
    return done, time.monotonic() - started_s


def line(done: Sequence[DemoStep], about: str) -> str:
    """Return the output line of the last finished step."""
    cold, step = done[0], done[-1]
    pool = isinstance(step, PoolStep)
    gain = "" if pool or step is cold else f" ({cold.ttft_s / step.ttft_s:.0f}x sooner)"
    origin = f", {step.fetched_tokens} from {'+'.join(step.tiers)}" if step.fetched_tokens else ""
    outputs = "outputs" if pool else "output"
    if not step.equal:
        verdict = "[red]output differs[/]"
    elif step.ok:
        verdict = f"[green]{outputs} equal[/]"
    else:
        verdict = f"{outputs} equal, [red]not from the expected tier[/]"
    if isinstance(step, EnginesStep):
        verdict += f", log-probabilities within {step.difference:.1e}"
    return (
        f"{step.name:<15} {step.ttft_s:.3f} s{gain}: {about}; "
        f"{step.computed_tokens} tokens computed{origin}; {verdict}"
    )


def row(step: DemoStep, cold: DemoStep) -> Row:
    """Return the row of a step in the report."""
    more: dict[str, object] = {
        "ttft_s": step.ttft_s,
        "computed_tokens": step.computed_tokens,
        "fetched_tokens": step.fetched_tokens,
        "tier": "+".join(step.tiers),
        "gb_per_s": step.gb_per_s,
        "equal": step.equal,
    }
    if isinstance(step, PoolStep):
        more |= {"contexts": len(step.asked), "spread": step.spread}
    elif isinstance(step, EnginesStep):
        more["difference"] = step.difference
    else:
        speedup = cold.ttft_s / step.ttft_s
        more |= {"speedup": speedup, "reason": step.reason, "cause": step.cause}
    return Row(what=step.name, value=step.ttft_s, unit="s", ok=step.ok, more=more)


def table(title: str, steps: Sequence[DemoStep]) -> Table:
    """Return the table of the steps."""
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    rows = [_cells(step, steps[0]) for step in steps]
    for heading in rows[0]:
        text = heading in ("step", "equal", "by target")
        shown.add_column(heading, justify="left" if text else "right", overflow="fold")
    for cells in rows:
        shown.add_row(*cells.values())
    return shown


def _cells(step: DemoStep, cold: DemoStep) -> dict[str, str]:
    """Return the cells of a step's row in the table, by heading."""
    apart = {"difference": f"{step.difference:.0e}"} if isinstance(step, EnginesStep) else {}
    sooner, by_target = {"sooner": f"{cold.ttft_s / step.ttft_s:.1f}x"}, dict[str, str]()
    if isinstance(step, PoolStep):
        sooner, by_target = {}, {"by target": " ".join(map(str, step.spread.values()))}
    return {
        "step": step.name,
        "first token": f"{step.ttft_s:.3f} s",
        **sooner,
        "computed": str(step.computed_tokens),
        "fetched": str(step.fetched_tokens),
        "from": "+".join(step.tiers),
        "GB/s": report.number(step.gb_per_s),
        "equal": report.mark(step.equal),
        **apart,
        **by_target,
    }


def verdict(steps: Sequence[DemoStep], elapsed_s: float, praise: str) -> str:
    """Return the failed steps and their recorded causes; `praise` if none failed."""
    from rich.markup import escape

    wrong = [step.name for step in steps if not step.equal]
    missed = [step.name for step in steps if step.equal and not step.ok]
    parts = [f"{len(steps)} steps in {elapsed_s:.0f} s."]
    if wrong:
        parts.append(f"[red]Output differs: {', '.join(wrong)}.[/]")
    if missed:
        parts.append(f"[red]Not from the expected tier: {', '.join(missed)}.[/]")
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
