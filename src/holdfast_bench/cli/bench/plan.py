"""`holdfast bench plan`: plans on a real engine, against recomputing and every other cut.

An engine is compared with itself, bypassing Holdfast by a hint, because two identical engines
differ by a twentieth as long as they run. Both requests of a pair find the engine in the same
state: an engine that still busy-waits after a request is up to a tenth slower with a short context.
Of two contexts, each way therefore requests one directly after its own previous request, and one on
an idle engine. Pairs disturbed by other processes are left out.

The connector's cost for a request that bypasses Holdfast is a figure of its own. It is measured
against engines without a connector, with several couples of engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple, TypeAlias

from holdfast.report import Row, at_most
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness import model
from holdfast_bench.harness.noise_filter import OtherProcesses, least_disturbed
from holdfast_bench.harness.standard_error import is_conclusive, of_mean, of_median
from holdfast_bench.measure import plan_load
from holdfast_bench.measure.engine_pair import BYPASS, POOL, EnginePair, EnginePairSettings
from holdfast_bench.measure.plan_cuts import PAIRS_MIN, against_cuts

ALSO = ("source", "tokens", "planned_s", "recompute_s", "best_s")

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
CUT_LENGTHS = (512, 2048, 8192)
QUICK_LENGTHS = (128, 512, 2048)
QUICK_CUT_LENGTHS = (512,)
ROUNDS_MIN = 3

PLACES = ("host", "disk", "slow", POOL)
NOWHERE = "nowhere"
CONNECTOR = "connector"
LOAD = "load"
PARTS = (*PLACES, NOWHERE, CONNECTOR, LOAD)
LOADED_PLACES = ("disk", "slow")
GOAL = 1.05

TIMES_MAX = 5
"""Largest number of nodes for one length, each with contexts of its own."""

COUPLES = (3, 8)
"""Smallest and largest number of couples of engines with and without a connector."""

CONNECTOR_TOKENS = 512


class PlanPair(NamedTuple):
    """Seconds to the first token of the way measured and of the reference, and tokens fetched."""

    seconds: float
    without_s: float
    fetched: int

    @property
    def ratio(self) -> float:
        """Time of the way measured, divided by that of the reference."""
        return self.seconds / self.without_s


Round: TypeAlias = tuple[PlanPair, float]
"""A pair, and the share of the machine that other processes used."""


TimedPrefill: TypeAlias = Callable[[Sequence[int]], tuple[float, int]]
"""Sends a prompt in one way; returns the seconds to its first token, and the tokens fetched."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    about = "rounds per length and node, 4 of long ones, two or five times as many of short ones"
    measuring.add_rounds_argument(parser, 8, about, ROUNDS_MIN)
    measuring.add_model_argument(parser, "small")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help="measure these alone: contexts from memory (host), from a disk, from a slow one, from "
        "a pool's target, from nowhere, what a connector costs, several requests at once: "
        "%(choices)s (default: all)",
    )
    measuring.add_quick_argument(parser, "few and short contexts")
    measuring.add_keep_argument(parser)


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield the figures."""
    with measuring.engines(args.keep) as folder, ExitStack() as stack:
        settings = EnginePairSettings(
            model=args.model,
            made=model.make(args.model),
            lengths=QUICK_LENGTHS if args.quick else LENGTHS,
            cut_lengths=QUICK_CUT_LENGTHS if args.quick else CUT_LENGTHS,
            rounds=args.rounds,
            tell=steps.update,
        )
        yield from measuring.print_rows(plan_rows(stack, folder, settings, args.only), steps)


def plan_rows(
    stack: ExitStack, folder: Path, settings: EnginePairSettings, parts: Sequence[str] = PARTS
) -> Iterator[Row]:
    """Yield, for each tier, plans against recomputing at each length, then against other cuts."""
    bench = EnginePair(stack, folder, settings)
    for place in parts:
        if place == CONNECTOR:
            yield _connector_row(bench, settings)
            continue
        if place == LOAD:
            yield from _load_rows(bench, settings, quick=settings.lengths == QUICK_LENGTHS)
            continue
        if place not in ("host", NOWHERE):
            bench.probe_tier(place)
        for length in settings.cut_lengths if place == NOWHERE else settings.lengths:
            yield _against_recompute(bench, place, length, settings)
        for length in settings.cut_lengths if place != NOWHERE else ():
            yield against_cuts(bench, place, length, settings)


def _against_recompute(
    bench: EnginePair, place: str, length: int, settings: EnginePairSettings
) -> Row:
    """Measure contexts held on a tier, or on none, as planned and with Holdfast bypassed."""
    found: list[Round] = []
    for time in range(TIMES_MAX):
        what = f"{place}, time {time + 1}: contexts of {length} tokens"
        prompts = [bench.text(length) for _ in range(settings.rounds_at(length))]
        settings.tell(f"{what} are saved")
        bench.drop_contexts()
        if place == NOWHERE:
            bench.place_contexts("disk", "best", [])
        else:
            bench.place_contexts(place, "best", prompts)
        settings.tell(f"{what} are asked for")
        way = partial(bench.ttft_s, bench.behind)
        found += _asked(bench, prompts, way, partial(way, hint=BYPASS))
        pairs = least_disturbed(found, len(found) // 2)
        ratios = [pair.ratio for pair in pairs]
        ratio, standard_error = median(ratios), of_median(ratios)
        if len(ratios) >= PAIRS_MIN and is_conclusive(ratio, standard_error, GOAL):
            break
    more = {
        "source": place,
        "tokens": length,
        "planned_s": median(pair.seconds for pair in pairs),
        "recompute_s": median(pair.without_s for pair in pairs),
        "fetched": median(pair.fetched for pair in pairs),
        "rounds": len(pairs),
        "disturbed": len(found) - len(pairs),
        "standard_error": standard_error,
    }
    return at_most("plan.recompute", ratio, "x", GOAL, **more)


def _load_rows(bench: EnginePair, settings: EnginePairSettings, *, quick: bool) -> Iterator[Row]:
    """Yield plans under load, from a fast tier and a slow one."""
    tokens = plan_load.QUICK_TOKENS if quick else plan_load.TOKENS
    for place in LOADED_PLACES:
        bench.probe_tier(place)
        for at_once in plan_load.QUICK_LOADS if quick else plan_load.LOADS:
            yield plan_load.under_load(bench, place, tokens, at_once, settings)


def _connector_row(bench: EnginePair, settings: EnginePairSettings) -> Row:
    """Measure the connector's cost: the mean, over couples of engines, of their median ratios."""
    ratios: list[float] = []
    least, most = COUPLES
    rounds = settings.rounds_at(CONNECTOR_TOKENS)
    for couple in range(most):
        settings.tell(f"{CONNECTOR}: couple {couple + 1} of engines")
        if couple:
            bench.restart_engines()
        prompts = [bench.text(CONNECTOR_TOKENS) for _ in range(rounds)]
        way = partial(bench.ttft_s, bench.behind, hint=BYPASS)
        found = _asked(bench, prompts, way, partial(bench.ttft_s, bench.alone))
        ratios.append(median(pair.ratio for pair in least_disturbed(found, len(found) // 2)))
        if len(ratios) >= least and is_conclusive(mean(ratios), of_mean(ratios), GOAL):
            break
    more = {
        "tokens": CONNECTOR_TOKENS,
        "rounds": rounds,
        "couples": ratios,
        "standard_error": of_mean(ratios),
    }
    return at_most("plan.connector", mean(ratios), "x", GOAL, **more)


def _asked(
    bench: EnginePair, prompts: Sequence[Sequence[int]], way: TimedPrefill, without: TimedPrefill
) -> list[Round]:
    """Measure each context both ways; the number of contexts is even.

    Of two contexts, one pair is measured on busy-waiting engines, and one on idle engines. The last
    request before the call went to the engine of `way`.
    """
    others = OtherProcesses()
    rounds: list[Round] = []
    for one, other in zip(prompts[::2], prompts[1::2], strict=True):
        others.share()
        again, tokens = way(one)
        bench.wait_idle()
        rested_without, _ = without(one)
        again_without, _ = without(other)
        bench.wait_idle()
        rested, other_tokens = way(other)
        share = others.share()
        rounds.append((PlanPair(again, again_without, tokens), share))
        rounds.append((PlanPair(rested, rested_without, other_tokens), share))
    return rounds
