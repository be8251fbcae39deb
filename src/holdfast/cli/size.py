"""`holdfast size`: compute the capacity and bandwidth that a model and its users need."""

from __future__ import annotations

import argparse
import sys
from textwrap import indent
from typing import TextIO

from holdfast.cli.model_caching import caching_line, caching_row
from holdfast.cli.models import add_model_arguments, read_model_arguments
from holdfast.cli.options import add_json_argument, add_output_argument, count
from holdfast.cli.traces import (
    OPTIONS,
    add_drop_argument,
    add_formats,
    add_trace_arguments,
    read_trace,
)
from holdfast.errors import ConfigError
from holdfast.report import Report, Row, at_most, write, write_text
from holdfast.sim.evidence import check_own_rate, check_reuse
from holdfast.sim.explain import CLAIMS, find_claim
from holdfast.sim.hardware import check_contexts
from holdfast.sim.model.catalogue import known_models, load_model
from holdfast.sim.model.shape import DTYPE_BYTES
from holdfast.sim.profile import load_profile
from holdfast.sim.size.demand import Cut, of_trace, of_users
from holdfast.sim.size.draw import frontier_svg, hits_svg
from holdfast.sim.size.proposal import (
    advice,
    assumptions,
    kwh_a_day,
    ladder_text,
    million_tokens_dollars,
    proposal_lines,
)
from holdfast.sim.size.question import SizingGoal, SizingQuestion
from holdfast.sim.size.search import SizingAnswer, answer

_NEW_TOKENS = 1000
"""Default of `--new`."""

_CODEC = "whether tiers below memory store encoded records, as a node's option (default: auto)"

_EVERY_S = 300.0
"""Default of `--every`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the load, the goal and the hardware, and the two lists."""
    load = parser.add_argument_group("load")
    add_model_arguments(load)
    load.add_argument(
        "--users", type=count, metavar="N", help="number of users, each with one context"
    )
    load.add_argument(
        "--context", type=count, metavar="TOKENS", help="length of each context, such as 32k"
    )
    load.add_argument(
        "--new",
        type=count,
        metavar="TOKENS",
        help=f"new tokens in each request (default {_NEW_TOKENS:,})",
    )
    load.add_argument(
        "--every",
        type=float,
        metavar="S",
        help=f"seconds between a user's requests (default {_EVERY_S:g})",
    )
    load.add_argument(
        "--trace", metavar="TRACE", help="a trace instead of users: a file, or a shipped trace"
    )
    add_trace_arguments(load)
    add_drop_argument(load)
    load.add_argument(
        "--dtype",
        metavar="T",
        help=f"type of the KV state: {', '.join(DTYPE_BYTES)} (default: the config's, or bf16)",
    )
    goal = parser.add_argument_group("goal and hardware")
    goal.add_argument("--slo-ttft", type=float, metavar="S", help="maximum time to first token")
    goal.add_argument(
        "--slo-share",
        type=float,
        default=0.95,
        metavar="P",
        help="share of the requests that must meet it (default 0.95)",
    )
    goal.add_argument("--gpu", default="H200x8", help="GPUs of one engine (default: H200x8)")
    goal.add_argument(
        "--nodes",
        type=int,
        default=0,
        help="number of machines with such GPUs (default: as many as needed)",
    )
    goal.add_argument("--codec", choices=("auto", "off", "planes"), default="auto", help=_CODEC)
    goal.add_argument("--media", metavar="A,B", help="media of the tiers (default: most)")
    goal.add_argument(
        "--prices", metavar="FILE", help="YAML that overrides the shipped hardware profile"
    )
    goal.add_argument(
        "--price-level",
        choices=("low", "mid", "high"),
        default="mid",
        help="which of the profile's prices to use (default mid)",
    )
    add_output_argument(goal, "--svg", "draw the cost as a chart")
    goal.add_argument(
        "--chart",
        choices=("ttft", "hits"),
        default="ttft",
        help="horizontal axis of the chart (default ttft)",
    )
    add_json_argument(parser)
    lists = parser.add_argument_group("lists")
    lists.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="CLAIM",
        help="recompute published claims about context memory: all, or one by its name",
    )
    lists.add_argument("--models", action="store_true", help="list the shipped models")
    add_formats(parser)


def run(args: argparse.Namespace) -> int:
    """Compute and print the sizing or a list, and write it as JSON if `--json` is given."""
    out = sys.stderr if "-" in (args.json, args.svg) else sys.stdout
    if args.explain is not None:
        report = _explain(args.explain, out)
    elif args.models:
        report = _models(out)
    else:
        question = _question(args)
        found = answer(question)
        if args.svg:
            draw = hits_svg if args.chart == "hits" else frontier_svg
            write_text("--svg", args.svg, draw(question, found))
        print("\n".join(proposal_lines(question, found)), file=out)
        print(f"\n{caching_line(question.shape)}", file=out)
        report = Report("size", _rows(question, found))
    if args.json:
        write(report, args.json)
    return 0


def _question(args: argparse.Namespace) -> SizingQuestion:
    shape = read_model_arguments(args)
    if shape is None:
        raise ConfigError("--model: missing; give a name of `holdfast size --models`, or a config")
    profile = load_profile(args.prices or "")
    gpu, gpus = profile.gpu(args.gpu)
    cut = Cut.of(shape)
    if args.trace:
        for name in ("users", "context", "new", "every"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name}: a trace contains this; omit one of them")
        trace = read_trace(args, shape)
        check_contexts(trace, shape)
        check_reuse(trace)
        if args.rate is None:
            check_own_rate(trace)
        demand = of_trace(trace, args.rate, cut)
    else:
        if args.rate is not None:
            raise ConfigError("--rate: needs a trace; the rate of users follows from --every")
        for name in OPTIONS:
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: needs a trace; add --trace")
        if args.users is None or args.context is None:
            raise ConfigError("no load: give --users and --context, or --trace FILE")
        new = min(_NEW_TOKENS, args.context) if args.new is None else args.new
        every_s = _EVERY_S if args.every is None else args.every
        demand = of_users(args.users, args.context, new, every_s, cut)
    chosen = {"media": tuple(args.media.split(","))} if args.media else {}
    return SizingQuestion(
        shape=shape,
        dtype=args.dtype or shape.kv_dtype,
        demand=demand,
        gpu=gpu,
        gpus=gpus,
        profile=profile,
        goal=SizingGoal(args.slo_ttft, args.slo_share),
        nodes=args.nodes,
        price_level=args.price_level,
        codec=args.codec,
        **chosen,
    )


def _asked(question: SizingQuestion) -> dict[str, object]:
    """Return the input of a sizing, which distinguishes one report from another."""
    demand, goal = question.demand, question.goal
    return {
        "load": demand.about,
        "model": question.shape.name,
        "dtype": question.dtype,
        "weights_bytes": question.shape.weights_bytes,
        "gpu": question.gpu.about,
        "gpus": question.gpus,
        "nodes": question.nodes or None,
        "block_tokens": demand.block_tokens,
        "other_block_tokens": list(demand.other_block_tokens),
        "peak": demand.peak,
        "input_tokens": float(demand.input_tokens.mean()),
        "slo_ttft_s": goal.ttft_s,
        "slo_share": goal.share,
        "media": list(question.media),
        "codec": question.codec,
        "prices": question.price_level,
        "prices_of": question.profile.date,
    }


def _rows(question: SizingQuestion, found: SizingAnswer) -> list[Row]:
    best, without, goal = found.best, found.without, question.goal
    rows = [
        Row(
            what="size.sized",
            value=question.demand.requests_per_s,
            unit="requests/s",
            more=_asked(question),
        ),
        Row(what="size.advice", value=None, unit="", more={"says": advice(question, found)}),
    ]
    for tier in best.tiers:
        fields = tier._asdict()
        value = fields.pop("capacity_bytes")
        fields["bought_as"] = fields.pop("unit")  # the row's own unit is that of its value
        rows.append(Row(what=f"size.{tier.tier}", value=value, unit="bytes", more=fields))
    figures: list[tuple[str, float, float, str]] = [
        ("size.ttft.median", best.ttft_s[0], without.ttft_s[0], "s"),
        ("size.cost", best.dollars_per_h, without.dollars_per_h, "$/h"),
        (
            "size.cost.million",
            million_tokens_dollars(question, best),
            million_tokens_dollars(question, without),
            "$/M tokens",
        ),
        ("size.engines", best.busy_engines, without.busy_engines, "engines"),
        ("size.engines.needed", best.engines, without.engines, "engines"),
        ("size.energy", kwh_a_day(best), kwh_a_day(without), "kWh/day"),
        ("size.purchase", best.purchase_dollars, without.purchase_dollars, "$"),
        ("size.machines", best.machines, without.machines, "machines"),
    ]
    rows += [
        Row(what="size.hit", value=best.hit, unit="share"),
        at_most(
            *("size.ttft", best.ttft_s[1], "s", goal.ttft_s),
            share=goal.share,
            without_memory=without.ttft_s[1],
        ),
    ]
    rows += [Row(what=w, value=v, unit=u, more={"without_memory": o}) for w, v, o, u in figures]
    rows += [
        Row(
            what="size.frontier",
            value=need.dollars_per_h,
            unit="$/h",
            more={"ttft_s": need.ttft_s[1], "hit": need.hit, "ladder": ladder_text(need)},
        )
        for need in found.frontier
    ]
    for kind, need in found.by_lowest_tier.items():
        more: dict[str, object] = {}
        if need is not None:
            more = {
                "purchase_dollars": need.purchase_dollars,
                "ttft_s": need.ttft_s[1],
                "hit": need.hit,
                "engines": need.engines,
                "ladder": ladder_text(need),
            }
        cost = need.dollars_per_h if need is not None else None
        rows.append(Row(what=f"size.alternative.{kind}", value=cost, unit="$/h", more=more))
    rows += [
        Row(what="size.assumption", value=None, unit="", more={"says": line})
        for line in (question.demand.about, *assumptions(question))
    ]
    return [*rows, caching_row("size", question.shape)]


def _explain(name: str, out: TextIO) -> Report:
    rows = []
    for claim in [find_claim(name)] if name else CLAIMS:
        explained = claim.work_out()
        print(f"{claim.name}: {claim.says}", file=out)
        print(indent(explained.calculation, "    "), file=out)
        print(f"    {explained.verdict}: {explained.because}\n", file=out)
        more: dict[str, object] = {
            "says": claim.says,
            "verdict": explained.verdict,
            "because": explained.because,
        }
        rows += [
            Row(
                what=f"size.explain.{claim.name}",
                value=value,
                unit="",
                more={"figure": key, **more},
            )
            for key, value in explained.figures.items()
        ]
    return Report("size", rows)


def _models(out: TextIO) -> Report:
    rows = []
    for name in known_models():
        shape = load_model(name)
        print(
            f"{name:<52}{shape.kv_bytes_per_token():>10,.0f} B/token"
            f"{shape.fixed_bytes() / 1e6:>10,.1f} MB fixed{shape.context_max:>12,} tokens",
            file=out,
        )
        more: dict[str, object] = {
            "fixed_bytes": shape.fixed_bytes(),
            "weights_bytes": shape.weights_bytes,
            "active_parameters": shape.active_parameters,
            "context_max": shape.context_max,
        }
        value = shape.kv_bytes_per_token()
        rows.append(Row(what=f"size.model.{name}", value=value, unit="B/token", more=more))
    return Report("size", rows)
