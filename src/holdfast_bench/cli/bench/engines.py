"""`holdfast bench engines`: answers behind contexts of another engine, beside an engine's own.

The goal of a difference of log-probabilities is that between the two engines alone, which is 0 if
they agree to the last bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean

from holdfast import report
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.scenarios import engine_comparison

ALSO = ("prompts", "between_alone")
PROMPTS, QUICK_PROMPTS = 200, 5
EQUAL_GOAL = 95.0
"""Smallest share of prompts, in percent, whose answers have the tokens of the engine's own."""

DURATION = "10 minutes on two cores, 20 to 35 with SGLang"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_duration(parser, DURATION)
    measuring.add_rounds_argument(parser, PROMPTS, "prompts")
    measuring.add_model_argument(parser, "tiny")
    measuring.add_quick_argument(parser, f"{QUICK_PROMPTS} prompts")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    prompts = QUICK_PROMPTS if args.quick else args.rounds
    with measuring.engines(args.keep) as folder:
        steps.plan(1)
        steps.begin("the engines start")
        made = model.make(args.model)
        found = engine_comparison.compare(folder, made, args.model, prompts, steps.update)
    for each in found:
        pair = f"engines.{each.writer}.{each.reader}"
        equal, apart, between = 100 * fmean(each.equal), max(each.differences), max(each.between)
        more = {"prompts": len(each.equal), "between_alone": between}
        yield report.at_least(f"{pair}.equal", equal, "%", EQUAL_GOAL, **more)
        yield report.at_most(f"{pair}.log_probability", apart, "nats", between, **more)
