"""`holdfast bench kinds`: what a real engine gains from a warm context, by kind of model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from holdfast import report
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import kind_models
from holdfast_bench.scenarios import document, model_kinds
from holdfast_bench.scenarios.model_kinds import KindTimes

ALSO = ("like", "cold_s", "warm_s", "missed", "bytes_per_token")

TOKENS = 4096
QUICK_KIND = "window"
TAIL_TOKENS = 16
"""Tokens behind the last whole block, which are computed in each case."""

GOAL = 10.0
"""Smallest gain of a fetched context of `TOKENS` tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 7, "rounds per kind of model")
    measuring.add_keep_argument(parser)
    parser.add_argument(
        "--kind",
        choices=tuple(kind_models.KINDS),
        action="append",
        help="measure this kind only; may be repeated (default: all)",
    )
    measuring.add_quick_argument(
        parser, f"only the kind {QUICK_KIND}, {measuring.ROUNDS_MIN} rounds"
    )


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    every = (QUICK_KIND,) if args.quick else tuple(kind_models.KINDS)
    kinds, rounds = args.kind or every, measuring.ROUNDS_MIN if args.quick else args.rounds
    steps.plan(len(kinds))
    with measuring.engines(args.keep) as folder:
        for kind in kinds:
            steps.begin(f"a model with {kind} layers")
            made = kind_models.make(kind)
            prompt = _prompt(made)
            times = model_kinds.measure(folder / kind, made, prompt, rounds, steps.update)
            yield from measuring.print_rows(_rows(kind, times), steps)


def _prompt(made: Path) -> list[int]:
    return document.read_tokens(document.tokenizer_of(made), None, TOKENS + TAIL_TOKENS)


def _rows(kind: str, times: KindTimes) -> Iterator[Row]:
    """Yield the gain, and the bytes stored and fetched beside those of full attention.

    No verdict if a context was missed.
    """
    more = {"like": kind_models.KINDS[kind].like, "rounds": len(times.warm)}
    yield report.at_least(
        f"kinds.{kind}.warm.{TOKENS}",
        median(times.cold) / median(times.warm),
        "x",
        None if times.missed else GOAL,
        cold_s=median(times.cold),
        warm_s=median(times.warm),
        missed=times.missed,
        **more,
    )
    for name, nbytes in (("stored", times.stored_bytes), ("fetched", times.fetched_bytes)):
        token_bytes = nbytes / TOKENS
        yield report.at_most(
            f"kinds.{kind}.{name}",
            token_bytes / kind_models.FULL_TOKEN_BYTES,
            "of full attention",
            None,
            bytes_per_token=token_bytes,
            **more,
        )
