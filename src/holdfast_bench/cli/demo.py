"""`holdfast demo`: a real engine on this machine recovers a context from every tier."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import report
from holdfast.cli.options import add_json_argument
from holdfast.errors import HoldfastError
from holdfast.report import Report, Row
from holdfast_bench.cli import demo_pool, demo_steps, measuring
from holdfast_bench.cli.progress import progress
from holdfast_bench.harness import model
from holdfast_bench.scenarios import demo_scenario, pool_demo_scenario
from holdfast_bench.scenarios.demo_scenario import DemoSettings, DemoStep

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODEL_DEFAULT = "demo"
TOKENS_DEFAULT = 4096

STEPS = {
    "cold": "read for the first time",
    "warm": "the engine's own cache was reset",
    "engine_restart": "the engine was stopped and started",
    "node_restart": "the node was killed with -9 and started",
    "second_engine": "another engine asks",
    "follow_up": "the next turn",
}
"""Description of each step, for its line of output."""

ALL_EQUAL = "Every output equals the engine's own, bit for bit (tokens and log-probabilities)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    made = ", ".join(model.SHAPES)
    parser.add_argument(
        "--model",
        metavar="PATH",
        help=f"a Hugging Face folder, or a model made here: {made} (default: {MODEL_DEFAULT}, "
        f"291 M; with --pool {demo_pool.MODEL_DEFAULT}, 137 M)",
    )
    parser.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="the text to ask about (default: a long source file of Python's library)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"length of a context, a multiple of {demo_scenario.BATCH_TOKENS} "
        f"(default: {TOKENS_DEFAULT}; with --pool {demo_pool.TOKENS_DEFAULT})",
    )
    parser.add_argument(
        "--pool",
        type=int,
        metavar="N",
        help="two engine hosts over a pool of so many targets, one killed, one joining; each host "
        "a network namespace as root, else a loopback port",
    )
    parser.add_argument(
        "--plan",
        default="best",
        choices=("best", "held"),
        help="best (default): fetch what brings the first token soonest; held: fetch all that is "
        "held, however quickly the model would compute it",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
        help="arithmetic of the engine (default: the model's own)",
    )
    measuring.add_keep_argument(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if all outputs are equal and from the expected tier, else 1."""
    console = report.console(args.json)
    with measuring.engines(args.keep) as folder:
        steps = _run if args.pool is None else _run_pool
        try:
            found = steps(args, console, folder)
        except HoldfastError:
            _keep_logs(args, console, folder)
            raise
        if not found.ok:
            _keep_logs(args, console, folder)
    if args.keep:
        console.print(f"logs and store: {folder}")
    return measuring.finish(found, args.json)


def _keep_logs(args: argparse.Namespace, console: Console, folder: Path) -> None:
    """Copy the logs of a failed step and print their folder, unless `--keep` keeps them."""
    kept = None if args.keep else demo_steps.keep_logs(folder)
    if kept:
        console.print(f"logs: {kept}", soft_wrap=True)


def _run(args: argparse.Namespace, console: Console, folder: Path) -> Report:
    with progress(console, "set-up: the model is made") as shown:
        setting = _setting(args, folder, shown.update)
        shown.plan(len(STEPS))
        steps, elapsed_s = demo_steps.follow(demo_scenario.walk(setting), _line, shown)
    console.print(_table(steps))
    console.print(demo_steps.verdict(steps, elapsed_s, ALL_EQUAL), soft_wrap=True)
    return Report("demo", [_row(step, steps[0]) for step in steps])


def _run_pool(args: argparse.Namespace, console: Console, folder: Path) -> Report:
    pool_demo_scenario.check_targets(args.pool)
    with progress(console, "set-up: the model is made"):
        path = _model(args.model or demo_pool.MODEL_DEFAULT)
    return demo_pool.run(args, console, folder, path)


def _setting(args: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> DemoSettings:
    path = _model(args.model or MODEL_DEFAULT)
    tokens = TOKENS_DEFAULT if args.tokens is None else args.tokens
    prompts = demo_scenario.prompts_of(path, args.document, tokens)
    return DemoSettings(folder, path, args.dtype, prompts, args.plan, tell)


def _model(name: str) -> Path:
    return model.make(name) if name in model.SHAPES else Path(name)


def _row(step: DemoStep, cold: DemoStep) -> Row:
    answer, tokens = step.asked.answer, step.asked.tokens
    more: dict[str, object] = {
        "ttft_s": answer.ttft_s,
        "computed_tokens": tokens.computed,
        "fetched_tokens": tokens.fetched_total,
        "tier": _tier(step),
        "gb_per_s": step.gb_per_s,
        "speedup": cold.asked.answer.ttft_s / answer.ttft_s,
        "equal": step.equal,
        "reason": step.reason,
        "cause": step.cause,
    }
    return Row(what=step.name, value=answer.ttft_s, unit="s", ok=step.ok, more=more)


def _tier(step: DemoStep) -> str:
    return "+".join(sorted(step.asked.tokens.fetched))


def _line(done: Sequence[DemoStep]) -> str:
    """Return the output line of the last finished step."""
    cold, step = done[0], done[-1]
    answer, tokens = step.asked.answer, step.asked.tokens
    gain = "" if step is cold else f" ({cold.asked.answer.ttft_s / answer.ttft_s:.0f}x sooner)"
    origin = f", {tokens.fetched_total} from {_tier(step)}" if tokens.fetched else ""
    return (
        f"{step.name:<15} {answer.ttft_s:.3f} s{gain}: {STEPS[step.name]}; "
        f"{tokens.computed} tokens computed{origin}; {demo_steps.step_verdict(step, 'output')}"
    )


def _table(steps: Sequence[DemoStep]) -> Table:
    figures = ("first token", "sooner", "computed", "fetched", "from", "GB/s")
    shown = demo_steps.table("the same context, each time", figures)
    cold_s = steps[0].asked.answer.ttft_s
    for step in steps:
        answer, tokens = step.asked.answer, step.asked.tokens
        shown.add_row(
            *(step.name, f"{answer.ttft_s:.3f} s", f"{cold_s / answer.ttft_s:.1f}x"),
            *(str(tokens.computed), str(tokens.fetched_total), _tier(step)),
            report.number(step.gb_per_s),
            report.mark(step.equal),
        )
    return shown
