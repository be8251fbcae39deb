"""`holdfast soak`: run campaigns that damage, crash or attack a store, and count wrong results."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Self

from holdfast import report
from holdfast.cli import INTERRUPTED
from holdfast.cli.options import add_json_argument
from holdfast.cli.progress import work_progress
from holdfast.errors import ConfigError
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetService
from holdfast.report import Report, Row
from holdfast.store.store import Store
from holdfast_bench.campaigns.campaign import (
    CAMPAIGNS,
    FORCED_SWITCH_S,
    Campaign,
    CampaignBudget,
    CampaignResult,
)
from holdfast_bench.cli import measuring

_BOUND_95 = 3.0
"""Rule of three: after N tries without failure, the failure rate is below 3/N with 95 % confidence.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
    """Run the campaigns; return 0 if no result was wrong, else 1."""
    chosen = _chosen(args)
    console = report.console(args.json)
    sys.setswitchinterval(FORCED_SWITCH_S)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # else every injected fault is logged
    rows: list[Row] = []
    with measuring.scratch(args.folder) as scratch, _Stop() as stop:
        every = CampaignBudget(
            tries=args.faults or sys.maxsize,
            seed=args.seed,
            folder=scratch,
            target=open_target,
            seconds=60 * (args.minutes or float("inf")) / len(chosen),
            stopped=lambda: stop.wanted,
        )
        budgets = [(campaign, _budget_of(campaign, part, every)) for campaign, part in chosen]
        for number, (campaign, budget) in enumerate(budgets):
            if not stop.wanted:
                step = f"campaign {number + 1} of {len(budgets)}"
                with work_progress(f"{campaign.unit} ({step}, {campaign.name})") as show:
                    rows += _rows(campaign, budget, show)
    found = Report("soak", rows, broken_off=stop.wanted)
    report.show(console, found, also=("tried", "of"))
    for row in rows:
        for words in row.more.get("failures", []):  # type: ignore[attr-defined]
            print(f"{row.what}: {words}", file=sys.stderr)
    status = measuring.finish(found, args.json)
    return INTERRUPTED if stop.wanted else status


@contextlib.contextmanager
def open_target(store: Store) -> Iterator[str]:
    """Serve a store to other nodes on a loopback address, within this process."""
    listener = bind("tcp://127.0.0.1:0")
    server = TargetServer(listener, TargetService(store), EntryRules())
    server.start()
    with contextlib.closing(server):
        yield address_of(listener)


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
        chosen.append((campaigns[name], wanted if dot else ""))
    for value, option in ((args.faults, "--faults"), (args.minutes, "--minutes")):
        if value is not None and not value > 0:
            raise ConfigError(f"{option}: {value:g} is not above 0; raise it")
    return chosen


def _budget_of(campaign: Campaign, part: str, every: CampaignBudget) -> CampaignBudget:
    """Return the budget of one campaign or part; its own number of tries if none was given.

    Raises ConfigError if the campaign has no such part.
    """
    given = every.tries < sys.maxsize or every.seconds < float("inf")
    tries = every.tries if given else campaign.tries
    budget = every._replace(tries=tries, part=part, whole=bool(part and given))
    if part:
        # Refuse an unknown part now, before other campaigns run for hours.
        parts = [each.what for each in _run(campaign, budget._replace(part=f"{campaign.name}."))]
        if not any(map(budget.wants, parts)):
            raise ConfigError(
                f"campaign {part!r} is unknown; choose a part from: {', '.join(parts)}"
            )
    return budget


def _run(campaign: Campaign, budget: CampaignBudget) -> Iterator[CampaignResult]:
    module = import_module(f"holdfast_bench.campaigns.{campaign.name}")
    results: Iterator[CampaignResult] = module.run(budget)
    return results


def _rows(
    campaign: Campaign, budget: CampaignBudget, show: Callable[[float, float, str], None]
) -> Iterator[Row]:
    """Run a campaign, show its progress, and yield the row of each result."""
    total = budget.tries if budget.tries < sys.maxsize else 0

    def on_progress(result: CampaignResult) -> None:
        show(result.tried, total, f"{result.what}, {result.failed} wrong")

    start = time.monotonic()
    for result in _run(campaign, budget._replace(on_progress=on_progress)):
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
