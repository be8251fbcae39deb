"""`holdfast soak`: run campaigns that damage, crash or attack a store, and count wrong results."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Self

from holdfast import report
from holdfast.cli.options import add_json_argument
from holdfast.cli.progress import work_progress
from holdfast.errors import ConfigError
from holdfast.report import Report, Row
from holdfast_bench.campaigns.campaign import (
    CAMPAIGNS,
    FORCED_SWITCH_S,
    Campaign,
    CampaignBudget,
    CampaignResult,
    selects,
)
from holdfast_bench.cli import measuring

_BOUND_95 = 3.0
"""Rule of three: after N tries without failure, the failure rate is below 3/N with 95 % confidence.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    lines = "\n".join(f"  {c.name:<9} {c.about} ({c.tries:,} {c.unit})" for c in CAMPAIGNS)
    parser.epilog = f"campaigns, and the tries of each by default:\n{lines}\n\n{parser.epilog}"
    parser.add_argument(
        "campaigns",
        nargs="*",
        metavar="CAMPAIGN",
        help="which to run, whole or a part: flips, flips.wire (default: all)",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--faults", type=int, metavar="N", help="tries of each campaign or part")
    amount.add_argument(
        "--minutes", type=float, metavar="M", help="minutes for all campaigns together"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of the random choices; the same seed repeats the same rounds "
        "(default: %(default)s)",
    )
    measuring.add_folder_argument(parser, "scratch files, 100 MiB")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the campaigns; return 0 if no result was wrong, else 1.

    The first SIGINT or SIGTERM ends the run after the current round, as an interrupt.
    """
    chosen = _chosen(args)
    console = report.console(args.json)
    sys.setswitchinterval(FORCED_SWITCH_S)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # else every injected fault is logged
    rows: list[Row] = []
    found = Report("soak", rows)
    try:
        with (
            measuring.rows_kept(found, console, args.json, ("tried", "of")),
            measuring.scratch(args.folder) as scratch,
            _Stop() as stop,
        ):
            every = CampaignBudget(
                tries=args.faults or sys.maxsize,
                seed=args.seed,
                folder=scratch,
                seconds=60 * (args.minutes or float("inf")) / len(chosen),
                stopped=lambda: stop.wanted,
            )
            for row in _every_row(chosen, every):
                rows.append(row)  # noqa: PERF402  # one by one, because the run may be interrupted
            if stop.wanted:
                raise KeyboardInterrupt
    finally:
        for row in rows:
            for words in row.more.get("failures", []):  # type: ignore[attr-defined]
                print(f"{row.what}: {words}", file=sys.stderr)
    return measuring.finish(found, args.json)


def row_of(result: CampaignResult, seed: int, seconds: float) -> Row:
    """Return the row of a campaign's result; its value is the number of wrong results."""
    bounded = result.each_may_fail and result.tried and not result.failed
    more: dict[str, object] = {
        "tried": result.tried,
        "of": result.unit,
        "bound_95": _BOUND_95 / result.tried if bounded else None,
        "counts": dict(result.counts),
        **result.figures,
        "seed": seed,
        "seconds": round(seconds, 1),
        "failures": result.failures,
    }
    if result.skipped:
        more["skipped"] = result.skipped
    ok = None if result.skipped else result.failed == 0 and result.tried > 0
    return Row(
        what=f"soak.{result.what}",
        value=float(result.failed),
        unit="wrong",
        goal=0,
        ok=ok,
        more=more,
    )


def _chosen(args: argparse.Namespace) -> Sequence[tuple[Campaign, str]]:
    """Return each chosen campaign with its chosen part; "" stands for all parts."""
    campaigns = {campaign.name: campaign for campaign in CAMPAIGNS}
    chosen = []
    for wanted in dict.fromkeys(args.campaigns or campaigns):
        name, dot, _ = wanted.partition(".")
        if name not in campaigns:
            known = ", ".join(campaigns)
            raise ConfigError(f"campaign {wanted!r} is unknown; choose from: {known}")
        parts = campaigns[name].results()
        if dot and not any(selects(wanted, part) for part in parts):
            raise ConfigError(
                f"campaign {wanted!r} is unknown; choose a part from: {', '.join(parts)}"
            )
        chosen.append((campaigns[name], wanted if dot else ""))
    for value, option in ((args.faults, "--faults"), (args.minutes, "--minutes")):
        if value is not None and not value > 0:
            raise ConfigError(f"{option}: {value:g} is not above 0; raise it")
    return chosen


def _every_row(chosen: Sequence[tuple[Campaign, str]], every: CampaignBudget) -> Iterator[Row]:
    """Run the campaigns until a stop is requested; yield the row of each result."""
    given = every.tries < sys.maxsize or every.seconds < float("inf")
    for number, (campaign, part) in enumerate(chosen, 1):
        if every.stopped():
            return
        tries = every.tries if given else campaign.tries
        budget = every._replace(tries=tries, part=part, whole=bool(part and given))
        step = f"campaign {number} of {len(chosen)}"
        unit = f"{campaign.unit} ({step}, {campaign.name})"
        with work_progress(unit, "this campaign") as show:
            yield from _rows(campaign, budget, show)


def _rows(
    campaign: Campaign, budget: CampaignBudget, show: Callable[[float, float, str], None]
) -> Iterator[Row]:
    """Run a campaign, show its progress, and yield the row of each result."""
    total = budget.tries if budget.tries < sys.maxsize else 0

    def on_progress(result: CampaignResult) -> None:
        show(result.tried, total, f"{result.what}, {result.failed} wrong")

    module = import_module(f"holdfast_bench.campaigns.{campaign.name}")
    results: Iterator[CampaignResult] = module.run(budget._replace(on_progress=on_progress))
    start = time.monotonic()
    for result in results:
        seconds, start = time.monotonic() - start, time.monotonic()
        if budget.wants(result.what) and (result.tried or not budget.stopped()):
            yield row_of(result, budget.seed, seconds)


class _Stop:
    """Handles the first SIGINT or SIGTERM: the current round completes and is counted."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, *_: object) -> None:
        self.wanted = True
        self.__exit__()
        print("\nsoak: stops after this round; interrupt again to stop at once", file=sys.stderr)
