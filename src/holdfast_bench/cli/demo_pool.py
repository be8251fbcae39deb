"""`holdfast demo --pool N`: one host fetches contexts of another from a pool, as targets change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import report
from holdfast.report import Report, Row
from holdfast_bench.cli import demo_steps
from holdfast_bench.cli.progress import progress
from holdfast_bench.scenarios import pool_demo_scenario
from holdfast_bench.scenarios.pool_demo_scenario import PoolSetting, PoolStep

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODEL_DEFAULT = "small"
TOKENS_DEFAULT = 1024

STEPS = {
    "prefill_on_a": "host A reads the contexts for the first time",
    "served_on_b": "host B is asked about them",
    "target_killed": "a target was killed with -9, and host B is asked again",
    "target_joined": "another target took its place, A read new contexts, and host B is asked",
}
"""Description of each step, for its line of output."""

ALL_EQUAL = (
    "Every output equals the engine's own, bit for bit; blocks of a killed target were recomputed."
)


def run(args: argparse.Namespace, console: Console, folder: Path, model: Path) -> Report:
    """Run the steps and print them; all processes have ended when this returns."""
    tokens = TOKENS_DEFAULT if args.tokens is None else args.tokens
    prompts = pool_demo_scenario.prompts_of_pool(model, args.document, tokens)
    with progress(console, "set-up") as shown:
        shown.plan(len(STEPS))
        setting = PoolSetting(
            folder, model, args.dtype, prompts, args.pool, args.plan, shown.update
        )
        steps, elapsed_s = demo_steps.follow(pool_demo_scenario.walk(setting), _line, shown)
    console.print(_table(steps))
    console.print(demo_steps.verdict(steps, elapsed_s, ALL_EQUAL), soft_wrap=True)
    return Report("demo pool", [_row(step) for step in steps])


def _row(step: PoolStep) -> Row:
    more: dict[str, object] = {
        "ttft_s": step.ttft_s,
        "contexts": len(step.asked),
        "computed_tokens": step.computed_tokens,
        "fetched_tokens": step.fetched_tokens,
        "tier": "+".join(step.tiers),
        "gb_per_s": step.gb_per_s,
        "spread": step.spread,
        "equal": step.equal,
    }
    return Row(what=step.name, value=step.ttft_s, unit="s", ok=step.ok, more=more)


def _line(done: Sequence[PoolStep]) -> str:
    """Return the output line of the last finished step."""
    step = done[-1]
    origin = f", {step.fetched_tokens} from {'+'.join(step.tiers)}" if step.fetched_tokens else ""
    return (
        f"{step.name:<14} {step.ttft_s:.3f} s: {STEPS[step.name]}; "
        f"{step.computed_tokens} tokens computed{origin}; "
        f"{demo_steps.step_verdict(step, 'outputs')}"
    )


def _table(steps: Sequence[PoolStep]) -> Table:
    title = "contexts of one host on another; first token: mean of all"
    shown = demo_steps.table(title, ("first token", "computed", "fetched", "from", "GB/s"))
    shown.add_column("by target", no_wrap=True)
    for step in steps:
        held = " ".join(map(str, step.spread.values()))
        shown.add_row(
            *(step.name, f"{step.ttft_s:.3f} s"),
            *(str(step.computed_tokens), str(step.fetched_tokens), "+".join(step.tiers)),
            report.number(step.gb_per_s),
            report.mark(step.equal),
            held,
        )
    return shown
