"""`holdfast demo --pool N`: what one host saved, another gets, whichever target dies or joins."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import demo_steps
from holdfast.rig import pool_street, report
from holdfast.rig.pool_street import PoolSetting, PoolStep
from holdfast.rig.report import Report, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODEL_DEFAULT = "small"
TOKENS_DEFAULT = 1024

SAID = {
    "prefill_on_a": "host A reads the contexts for the first time",
    "served_on_b": "host B is asked about them",
    "target_killed": "a target was killed with -9, and host B is asked again",
    "target_joined": "another target took its place, A read new contexts, and host B is asked",
}
"""What had happened before each step."""

PRAISE = (
    "Every output equals the engine's own, bit for bit; what died with a target was computed again."
)


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for what can not be shown, before anything is made."""
    pool_street.check_targets(args.pool)


def run(args: argparse.Namespace, console: Console, folder: Path, model: Path) -> Report:
    """Run the steps and show them; nothing runs any more afterwards."""
    tokens = TOKENS_DEFAULT if args.tokens is None else args.tokens
    prompts = pool_street.prompts_of_pool(model, args.document, tokens)
    with console.status("set-up") as status:

        def tell(text: str) -> None:
            status.update(f"{text} ...")

        setting = PoolSetting(folder, model, args.dtype, prompts, args.pool, args.plan, tell)
        steps, elapsed_s = demo_steps.follow(pool_street.walk(setting), _line, console)
    console.print(_table(steps))
    console.print(demo_steps.verdict(steps, elapsed_s, PRAISE), soft_wrap=True)
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
    """The last finished step, as it scrolls by."""
    step = done[-1]
    origin = f", {step.fetched_tokens} from {'+'.join(step.tiers)}" if step.fetched_tokens else ""
    judged = "[green]outputs equal[/]" if step.equal else "[red]output differs[/]"
    if step.equal and not step.ok:
        judged = "outputs equal, [red]not from where they should come[/]"
    return (
        f"{step.name:<14} {step.ttft_s:.3f} s: {SAID[step.name]}; "
        f"{step.computed_tokens} tokens computed{origin}; {judged}"
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
