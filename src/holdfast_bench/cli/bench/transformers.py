"""`holdfast bench transformers`: the first token of transformers, computed, missed and fetched."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median

from holdfast import report
from holdfast.errors import ConfigError
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.measure import transformers_prompts

ALSO = ("computed_s", "missed_s", "fetched_s", "rounds")
TOKENS, QUICK_TOKENS = 4096, 1024
GOAL = 5.0
"""Smallest gain of a fetched context of `TOKENS` tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_duration(parser, "6 minutes on two cores")
    measuring.add_rounds_argument(parser, 7, "contexts per model")
    measuring.add_quick_argument(parser, f"contexts of {QUICK_TOKENS} tokens, without goals")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        raise ConfigError("transformers is not installed here; install torch and transformers")
    tokens = QUICK_TOKENS if args.quick else TOKENS
    steps.plan(len(transformers_prompts.MODELS))
    for kind in transformers_prompts.MODELS:
        steps.begin(f"a model with {kind} layers")
        times = transformers_prompts.measure(kind, tokens, args.rounds, steps.update)
        yield from measuring.print_rows(_rows(kind, tokens, times), steps)


def _rows(kind: str, tokens: int, times: transformers_prompts.PromptTimes) -> Iterator[Row]:
    computed, missed, fetched = (median(each) for each in times)
    more = {"computed_s": computed, "missed_s": missed, "fetched_s": fetched}
    more["rounds"] = len(times.computed)
    goal = GOAL if tokens == TOKENS else None
    yield report.at_least(
        f"transformers.{kind}.warm.{tokens}", computed / fetched, "x", goal, **more
    )
    yield report.at_most(f"transformers.{kind}.miss.{tokens}", missed / computed, "x", **more)
