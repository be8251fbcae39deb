"""`holdfast sim`: simulate a trace on a modelled ladder, with the policies that serve."""

from __future__ import annotations

import argparse
import shlex
import time

from holdfast.cli.model_caching import caching_line, caching_row
from holdfast.cli.models import add_model_arguments, read_model_arguments
from holdfast.cli.options import add_json_argument, add_output_argument, many
from holdfast.cli.progress import work_progress
from holdfast.cli.traces import (
    OPTIONS,
    add_drop_argument,
    add_formats,
    add_trace_arguments,
    read_trace,
)
from holdfast.errors import ConfigError
from holdfast.plan.planner import BestCut
from holdfast.policy.choice import DEFAULT, POLICIES
from holdfast.report import Report, Row, number, write, write_text
from holdfast.sim.amounts import size_text
from holdfast.sim.bounds import bounds, bounds_figures
from holdfast.sim.economy import assumptions, economy_figures
from holdfast.sim.evidence import check_reuse, check_times, paced
from holdfast.sim.figures import (
    SimulationFigures,
    hit_figures,
    paid_request_figures,
    time_figures,
    wear_figures,
)
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import capacity_text, check_contexts, resolve
from holdfast.sim.ladder import read_ladder
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.page import page
from holdfast.sim.pictures import capacity_chart
from holdfast.sim.profile import load_profile
from holdfast.sim.replay import returns
from holdfast.sim.route import ROUTERS, router
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.shipped import find_ladder
from holdfast.sim.verdict import verdict

WORKERS_MAX = 1_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the trace, the ladder and the options of the simulation."""
    parser.add_argument("trace", metavar="TRACE", help="a file, or the name of a shipped trace")
    parser.add_argument(
        "--ladder",
        required=True,
        metavar="FILE",
        help="tiers and engine: a YAML file, or a shipped ladder such as four-tiers",
    )
    add_model_arguments(parser)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--router",
        default="least_queue",
        metavar="R",
        help=f"default least_queue; one of: {', '.join(ROUTERS)}",
    )
    parser.add_argument(
        "--closed-loop",
        action="store_true",
        help="a session sends its next request its think time after the last answer",
    )
    parser.add_argument(
        "--policy",
        default=DEFAULT,
        metavar="P",
        help=f"eviction (default {DEFAULT}), one of: {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--hints",
        action="store_true",
        help="sessions send hints of their returns and ends, from the trace",
    )
    parser.add_argument(
        "--prices", metavar="FILE", help="YAML that overrides the shipped hardware profile"
    )
    add_trace_arguments(parser)
    add_drop_argument(parser)
    add_json_argument(parser)
    add_output_argument(parser, "--svg", "draw hits by capacity as a chart")
    add_output_argument(parser, "--html", "write all results as one page")
    add_formats(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, and print and write the results."""
    if not 1 <= args.workers <= WORKERS_MAX:
        raise ConfigError(f"--workers: {args.workers} is not from 1 to {WORKERS_MAX:,}; correct it")
    route = router(args.router)
    ladder = read_ladder(str(find_ladder(args.ladder)))
    model = read_model_arguments(args)
    profile = load_profile(args.prices or "")
    trace = read_trace(args, model)
    check_reuse(trace)
    if model:
        check_contexts(trace, model)
    if args.rate is not None:
        trace = paced(trace, args.rate)
    check_times(trace)
    hardware = resolve(ladder, profile, trace.block_tokens, model)
    fleet = Fleet(hardware, args.workers, rules_of(hardware, args.policy))
    hints = returns(trace) if args.hints else None
    setting = SimulationSettings(BestCut(), route, args.closed_loop, hints)
    bare = Fleet(hardware._replace(tier_specs=[]), args.workers, rules_of(hardware, args.policy))
    total = trace.requests
    with work_progress("requests", "the first of two parts") as show:
        began_s = time.process_time()
        requests = Simulation(
            trace, fleet, setting, lambda arrived: show(arrived, total, "with the ladder")
        ).run()
        spent_s = time.process_time() - began_s
    with work_progress("requests", "the second of two parts") as show:
        computed = Simulation(
            trace, bare, setting, lambda arrived: show(arrived, total, "without the ladder")
        ).run()
    found = SimulationFigures(trace, fleet, requests, computed)
    curves = bounds(trace)
    figures = [
        *hit_figures(found),
        *time_figures(found),
        *wear_figures(found),
        *paid_request_figures(found),
        *economy_figures(found),
        *bounds_figures(curves),
        Row("sim.speed", trace.blocks / max(spent_s, 1e-9), "blocks/s", {"cpu_s": spent_s}),
    ]
    if "-" not in (args.json, args.svg, args.html):
        _show(found, figures, model)
    if args.json:
        write(Report("sim", _rows(args, found, figures, model)), args.json)
    if args.svg:
        write_text("--svg", args.svg, capacity_chart(found, curves))
    if args.html:
        write_text("--html", args.html, page(found, figures, curves, _command(args)))
    return 0


def _command(args: argparse.Namespace) -> str:
    """Return the command line that repeats the simulation, without the options of its output."""
    words = ["holdfast", "sim", args.trace, "--ladder", args.ladder]
    if args.model:
        words += ["--model", args.model]
    if args.weights_dtype:
        words += ["--weights-dtype", args.weights_dtype]
    words += ["--workers", str(args.workers), "--router", args.router, "--policy", args.policy]
    for name in ("closed_loop", "hints", "prices", *OPTIONS):
        value = getattr(args, name)
        if value is not None and value is not False:
            option = "--" + name.replace("_", "-")
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _show(found: SimulationFigures, figures: list[Row], model: ModelShape | None) -> None:
    """Print the verdict, a table of tiers, every other figure on a line, and the assumptions."""
    trace, fleet = found.trace, found.fleet
    on = f"{fleet.hardware.name}, {model.name}" if model else fleet.hardware.name
    workers = many(len(fleet.workers), "worker")
    print(
        f"{trace.name}: {trace.requests:,} requests, "
        f"{trace.input_tokens.sum() / 1e6:,.1f} M tokens in, "
        f"{trace.output_tokens.sum() / 1e6:,.1f} M out; {on}, {workers}\n"
    )
    print("\n".join(verdict(figures)) + "\n")
    print(
        f"{'tier':<10}{'hits':>8}{'read GB':>12}{'written GB':>12}{'held':>10}"
        f"{'held/capacity blocks':>28}"
    )
    for figure in figures:
        if figure.what.startswith("sim.tier."):
            more = figure.more
            held = f"{more['peak_blocks']:,} of {capacity_text(more['capacity_blocks'])}"
            print(
                f"{figure.what.rpartition('.')[2]:<10}{figure.value:>8.1%}{more['read_gb']:>12,.0f}"
                f"{more['written_gb']:>12,.0f}{size_text(float(str(more['peak_bytes']))):>10}{held:>28}"
            )
    print()
    for figure in figures:
        if not figure.what.startswith("sim.tier."):
            name = figure.what.removeprefix("sim.").replace(".", " ").replace("_", " ")
            exact = figure.unit == "requests" and figure.value is not None
            value = f"{figure.value:,.0f}" if exact else number(figure.value)
            more, beside = figure.more, ""
            if isinstance(without := more.get("without_ladder_s"), float):
                beside = f" (without the ladder {without:.3g})"
            elif figure.what == "sim.gpu.busy":
                beside = f" ({more['prefill']:.3g} prefill, {more['decode']:.3g} decode)"
            elif "rated" in more:
                share = f"{more['of_capacity']:.3g} of the tier's capacity"
                beside = f" (rated for {more['rated']:g}; {share})"
            print(f"{name:<28}{value:>10} {figure.unit}{beside}")
    print("\n" + "\n".join(f"- {line}" for line in assumptions(found)))
    if model:
        print(f"\n{caching_line(model)}")


def _rows(
    args: argparse.Namespace,
    found: SimulationFigures,
    figures: list[Row],
    model: ModelShape | None,
) -> list[Row]:
    """Return the rows of the report: setting, verdict, every figure, and the assumptions."""
    setting: dict[str, object] = {
        "trace": found.trace.name,
        "block_tokens": found.trace.block_tokens,
        "other_block_tokens": list(found.trace.other_block_tokens),
        "ladder": found.fleet.hardware.name,
        "model": model.name if model else None,
        "gpus": found.fleet.hardware.gpus,
        "workers": len(found.fleet.workers),
        "command": _command(args),
    }
    return [
        Row("sim.setting", None, "", setting),
        *(Row("sim.verdict", None, "", {"says": line}) for line in verdict(figures)),
        *figures,
        *(Row("sim.assumption", None, "", {"says": line}) for line in assumptions(found)),
        *([caching_row("sim", model)] if model else []),
    ]
