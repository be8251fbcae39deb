"""`holdfast sim`: run a trace through a modelled ladder, with the code that serves."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from holdfast.cli.options import add_json_argument
from holdfast.cli.traces import OPTIONS, add_trace_arguments, read_trace
from holdfast.errors import ConfigError
from holdfast.plan.planner import BestCut
from holdfast.policy.choice import DEFAULT, POLICIES
from holdfast.rig.report import Report, Row, check_target, number, write
from holdfast.sim.economy import assumptions, economy_figures
from holdfast.sim.figures import Figure, Run, hit_figures, time_figures, wear_figures
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import UNBOUNDED, check_contexts, resolve
from holdfast.sim.ladder import read_ladder
from holdfast.sim.model import ModelShape, load_model
from holdfast.sim.outlook import outlook, outlook_figures
from holdfast.sim.page import page
from holdfast.sim.pictures import capacity_chart
from holdfast.sim.profile import load_profile
from holdfast.sim.replay import returns
from holdfast.sim.route import ROUTERS, router
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Setting, Simulation
from holdfast.sim.trace import Trace

WORKERS_MAX = 1_000
_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare trace, ladder and what may vary."""
    parser.add_argument("trace", metavar="TRACE", help="a file, or the name of a shipped trace")
    parser.add_argument("--ladder", required=True, metavar="FILE", help="tiers and engine, YAML")
    parser.add_argument("--model", metavar="NAME", help="a shipped model, or a config.json")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--router", default="least_queue", metavar="R", help=f"one of: {', '.join(ROUTERS)}"
    )
    parser.add_argument(
        "--closed-loop",
        action="store_true",
        help="a session's next request comes its think time after the answer before",
    )
    parser.add_argument(
        "--policy", default=DEFAULT, metavar="P", help=f"eviction, one of: {', '.join(POLICIES)}"
    )
    parser.add_argument(
        "--hints",
        action="store_true",
        help="sessions say when they return and when they close, as the trace knows it",
    )
    parser.add_argument("--prices", metavar="FILE", help="laid over the shipped hardware profile")
    add_trace_arguments(parser)
    add_json_argument(parser)
    parser.add_argument("--svg", metavar="FILE", help="hits by capacity as a picture")
    parser.add_argument("--html", metavar="FILE", help="everything as one page")


def run(args: argparse.Namespace) -> int:
    """Simulate, and show what was found."""
    check_target(args.json)
    check_target(args.svg, "--svg")
    check_target(args.html, "--html")
    if not 1 <= args.workers <= WORKERS_MAX:
        raise ConfigError(
            f"--workers: {args.workers} is not within 1 and {WORKERS_MAX:,}; correct it"
        )
    route = router(args.router)
    ladder = read_ladder(args.ladder)
    model = load_model(args.model) if args.model else None
    profile = load_profile(args.prices or "")
    trace = read_trace(args)
    if model:
        check_contexts(trace, model)
    hardware = resolve(ladder, profile, trace.block_tokens, model)
    fleet = Fleet(hardware, args.workers, rules_of(hardware, args.policy))
    hints = returns(trace) if args.hints else None
    setting = Setting(BestCut(), route, args.closed_loop, hints)
    bare = Fleet(hardware._replace(rungs=[]), args.workers, rules_of(hardware, args.policy))
    with _progress(trace, sys.stderr) as progress:
        began_s = time.process_time()
        requests = Simulation(trace, fleet, setting).run(progress)
        spent_s = time.process_time() - began_s
        found = Run(trace, fleet, requests, Simulation(trace, bare, setting).run(progress))
    curves = outlook(trace)
    figures = [
        *hit_figures(found),
        *time_figures(found),
        *wear_figures(found),
        *economy_figures(found),
        *outlook_figures(curves),
        Figure("sim.speed", trace.blocks / max(spent_s, 1e-9), "blocks/s", {"cpu_s": spent_s}),
    ]
    if args.json != "-":
        _show(found, figures, model)
    if args.json:
        write(Report("sim", _rows(args, found, figures, model)), args.json)
    if args.svg:
        _write("--svg", args.svg, capacity_chart(found, curves))
    if args.html:
        _write("--html", args.html, page(found, figures, curves, _command(args)))
    return 0


def _command(args: argparse.Namespace) -> str:
    """Return the command as one would type it again, without where its output went."""
    words = ["holdfast", "sim", args.trace, "--ladder", args.ladder]
    if args.model:
        words += ["--model", args.model]
    words += ["--workers", str(args.workers), "--router", args.router, "--policy", args.policy]
    for option in ("closed_loop", "hints"):
        words += [_option(option)] if getattr(args, option) else []
    for option in ("prices", *OPTIONS):
        value = getattr(args, option)
        words += [_option(option), str(value)] if value is not None else []
    return shlex.join(words)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _write(option: str, target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {target}: {error.strerror}; choose another file") from error


@contextmanager
def _progress(trace: Trace, stream: TextIO) -> Iterator[Callable[[int], None] | None]:
    """Show on a terminal how many requests have arrived; nothing anywhere else."""
    if not stream.isatty():
        yield None
        return

    def show(arrived: int) -> None:
        share = arrived / max(1, trace.requests)
        bar = "#" * int(share * _BAR)
        print(
            f"\r{bar:.<{_BAR}} {arrived:,} of {trace.requests:,}", end="", file=stream, flush=True
        )

    try:
        yield show
    finally:
        print("\r" + " " * 60, end="\r", file=stream, flush=True)


def _show(found: Run, figures: list[Figure], model: ModelShape | None) -> None:
    """Print the tiers as a table, then every other figure on a line."""
    trace, fleet = found.trace, found.fleet
    on = f"{fleet.hardware.name}, {model.name}" if model else fleet.hardware.name
    print(
        f"{trace.name}: {trace.requests:,} requests, "
        f"{trace.input_tokens.sum() / 1e6:,.1f} M tokens in, "
        f"{trace.output_tokens.sum() / 1e6:,.1f} M out; {on}, {len(fleet.workers)} workers\n"
    )
    print(f"{'tier':<10}{'hits':>8}{'read GB':>12}{'written GB':>12}{'held/capacity blocks':>28}")
    for figure in figures:
        if figure.what.startswith("sim.tier."):
            more = figure.more
            held = f"{more['peak_blocks']:,} of {_many(more['capacity_blocks'])}"
            print(
                f"{figure.what.rpartition('.')[2]:<10}{figure.value:>8.1%}{more['read_gb']:>12,.0f}"
                f"{more['written_gb']:>12,.0f}{held:>28}"
            )
    print()
    for figure in figures:
        if not figure.what.startswith("sim.tier."):
            name = figure.what.removeprefix("sim.").replace(".", " ").replace("_", " ")
            print(f"{name:<28}{_value(figure):>10} {figure.unit}{_beside(figure)}")
    print("\n" + "\n".join(f"- {line}" for line in assumptions(found)))


def _many(blocks: object) -> str:
    return f"{blocks:,}" if isinstance(blocks, int) and blocks < UNBOUNDED else "no end"


def _value(figure: Figure) -> str:
    """Show a figure with three digits; a count exactly."""
    counts = figure.unit == "requests" and figure.value is not None
    return f"{figure.value:,.0f}" if counts else number(figure.value)


def _beside(figure: Figure) -> str:
    """Show what a figure is to be seen with."""
    more = figure.more
    if isinstance(without := more.get("without_ladder_s"), float):
        return f" (without the ladder {without:.3g})"
    if figure.what == "sim.gpu.busy":
        return f" ({more['prefill']:.3g} prefill, {more['decode']:.3g} decode)"
    if "rated" in more:
        return f" (rated for {more['rated']:g}; {more['of_capacity']:.3g} of the tier's capacity)"
    return ""


def _rows(
    args: argparse.Namespace, found: Run, figures: list[Figure], model: ModelShape | None
) -> list[Row]:
    """Return what was simulated, every figure, and what they take for granted."""
    setting: dict[str, object] = {
        "trace": found.trace.name,
        "ladder": found.fleet.hardware.name,
        "model": model.name if model else None,
        "gpus": found.fleet.hardware.gpus,
        "workers": len(found.fleet.workers),
        "command": _command(args),
    }
    return [
        Row(what="sim.setting", value=None, unit="", more=setting),
        *(Row(what=f.what, value=f.value, unit=f.unit, more=f.more) for f in figures),
        *(
            Row(what="sim.assumption", value=None, unit="", more={"says": line})
            for line in assumptions(found)
        ),
    ]
