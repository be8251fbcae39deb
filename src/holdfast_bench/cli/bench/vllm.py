"""`holdfast bench vllm`: what a real engine gains from a warm context, and pays without one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median

from holdfast import report
from holdfast.report import Row
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.harness.standard_error import of_median, percentile_90
from holdfast_bench.scenarios import document, first_token, throughput, ttft_race
from holdfast_bench.scenarios.first_token import FirstTokenPairs
from holdfast_bench.scenarios.ttft_race import LayoutTimes, RaceTimes, RaceTrack

ALSO = ("source", "cold_s", "warm_s", "missed")

LENGTHS = (4096, 8192)
QUICK_LENGTHS = (4096,)
TAIL_TOKENS = 16
GOALS = {(4096, "host"): 20.0, (4096, "disk"): 12.0, (8192, "host"): 35.0, (8192, "disk"): 18.0}
OVERHEAD_GOAL = 2.0
FIRST_TOKEN_GOAL = 1.02
"""Largest time to first token without any reuse, relative to vLLM alone."""
PORTABLE_GOAL = 1.15
"""Largest time to first token of a context in portable blocks, relative to exact ones."""
FIGURES: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "p90": percentile_90}
AS_FAST = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 7, "rounds per length")
    measuring.add_quick_argument(parser, "leave out the longest context")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    with measuring.engines(args.keep) as folder, ExitStack() as stack:
        made = model.make("demo")
        lengths = QUICK_LENGTHS if args.quick else LENGTHS
        track = ttft_race.lay_track(stack, folder, made, max(lengths) + 1024)
        prompts = _prompts(made, lengths)
        # One more round warms the engines up for the load without reuse.
        parts = len(lengths) + 2 + len(first_token.REQUESTS)
        steps.plan(parts * args.rounds + 1)
        yield from measuring.print_rows(_rows(track, prompts, args.rounds, steps.begin), steps)


def _prompts(made: Path, lengths: Sequence[int]) -> dict[int, list[int]]:
    """Give each length a part of the text to itself, so that none finds another's blocks.

    The tail lies behind the last whole block and the last prefill step: see `demo_scenario.py`.
    """
    text = document.read_tokens(
        document.tokenizer_of(made), None, sum(lengths) + len(lengths) * TAIL_TOKENS
    )
    prompts = {}
    for length in lengths:
        prompts[length], text = text[: length + TAIL_TOKENS], text[length + TAIL_TOKENS :]
    return prompts


def _rows(
    track: RaceTrack, prompts: Mapping[int, list[int]], rounds: int, tell: Callable[[str], None]
) -> Iterator[Row]:
    for length, prompt in prompts.items():
        times = ttft_race.race(track, prompt, rounds, tell)
        yield _warm_row(length, "host", times, times.host)
        yield _warm_row(length, "disk", times, times.disk)
        if times.lmcache:
            yield _peer_row(length, times)
    length = min(prompts)
    yield _layout_row(length, ttft_race.compare_layouts(track, prompts[length], rounds, tell))
    pairs = throughput.measure(track, model.SHAPES["demo"].vocabulary, rounds, tell)
    more = {
        "alone_tokens_per_s": pairs.tokens_per_s(pairs.alone),
        "holdfast_tokens_per_s": pairs.tokens_per_s(pairs.behind),
        "rounds": len(pairs.alone),
        "standard_error": 100 * of_median(pairs.ratios),
    }
    yield report.at_most("vllm.overhead", 100 * pairs.overhead, "%", OVERHEAD_GOAL, **more)
    vocabulary = model.SHAPES["demo"].vocabulary
    for clients in first_token.REQUESTS:
        measured = first_token.measure(track, vocabulary, clients, rounds, tell)
        yield from _first_token_rows(clients, measured)


def _first_token_rows(clients: int, times: FirstTokenPairs) -> Iterator[Row]:
    for name, figure in FIGURES.items():
        alone_s, holdfast_s = times.figures(figure)
        yield report.at_most(
            f"vllm.first_token.{clients}.{name}",
            holdfast_s / alone_s,
            "x",
            FIRST_TOKEN_GOAL,
            alone_s=alone_s,
            holdfast_s=holdfast_s,
            rounds=len(times.alone),
            requests=sum(map(len, times.alone)),
            standard_error=of_median(times.ratios(figure)),
        )


def _warm_row(length: int, source: str, times: RaceTimes, warm: list[float]) -> Row:
    gain = ttft_race.gain(times.cold, warm)
    more = {
        "source": source,
        "cold_s": median(times.cold),
        "warm_s": median(warm),
        "warm_min_s": min(warm),
        "rounds": len(warm),
        "missed": times.missed[source],
    }
    return report.at_least(f"vllm.warm.{length}", gain, "x", GOALS[length, source], **more)


def _layout_row(length: int, times: LayoutTimes) -> Row:
    """How much later the first token comes with portable blocks; no verdict if one was missed."""
    ratios = [slow / fast for slow, fast in zip(times.portable, times.exact, strict=True)]
    missed = sum(times.missed.values())
    more = {
        "source": "host",
        "exact_s": median(times.exact),
        "portable_s": median(times.portable),
        "rounds": len(ratios),
        "missed": missed,
        "standard_error": of_median(ratios),
    }
    goal = None if missed else PORTABLE_GOAL
    return report.at_most(f"vllm.portable.{length}", median(ratios), "x", goal, **more)


def _peer_row(length: int, times: RaceTimes) -> Row:
    """How many times sooner than with LMCache, both from host memory; no verdict if it missed."""
    gain, missed = ttft_race.gain(times.lmcache, times.host), times.missed.get(ttft_race.PEER, 0)
    more = {
        "source": "host",
        "lmcache_s": median(times.lmcache),
        "warm_s": median(times.host),
        "rounds": len(times.lmcache),
        "missed": missed,
    }
    return report.at_least(f"vllm.lmcache.{length}", gain, "x", None if missed else AS_FAST, **more)
