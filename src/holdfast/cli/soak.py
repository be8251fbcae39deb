"""`holdfast soak`: damage, crash, forge and fuzz, count, and say what was ever served wrong."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Self

from holdfast.cli import INTERRUPTED, measuring
from holdfast.cli.options import add_json_argument
from holdfast.errors import ConfigError
from holdfast.node.target import Entry, TargetServer, address_of, bind
from holdfast.node.target_service import Service
from holdfast.rig import report
from holdfast.rig.report import Report, Row
from holdfast.store.store import Store
from holdfast.testing.campaign import CAMPAIGNS, FORCED_SWITCH_S, Campaign, Order, Tally

_LOOK_S = 0.5
_BOUND_95 = 3.0
"""No failure in N tries: with 95 % confidence fewer than 3/N fail."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = "\n".join(f"  {c.name:<9} {c.about} ({c.tries:,} {c.unit})" for c in CAMPAIGNS)
    parser.epilog = f"campaigns, and how much each does if not told:\n{lines}\n\n{parser.epilog}"
    parser.add_argument(
        "campaigns",
        nargs="*",
        metavar="CAMPAIGN",
        help="which to run, whole or a part: flips, flips.wire (default: all)",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--faults", type=int, metavar="N", help="how many of each named")
    amount.add_argument("--minutes", type=float, metavar="M", help="for so long, all together")
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed does the same (default: %(default)s)"
    )
    measuring.add_folder_argument(parser, "scratch files, 100 MiB")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the campaigns; 0 if nothing was ever wrong, else 1."""
    chosen = _chosen(args)
    console = report.console(args.json)
    sys.setswitchinterval(FORCED_SWITCH_S)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # every fault would be told
    rows: list[Row] = []
    with measuring.scratch(args.folder) as scratch, _Stop() as stop:
        every = Order(
            tries=args.faults or sys.maxsize,
            seed=args.seed,
            folder=scratch,
            target=open_target,
            seconds=60 * (args.minutes or float("inf")) / len(chosen),
            stopped=lambda: stop.wanted,
        )
        orders = [(campaign, _order_of(campaign, part, every)) for campaign, part in chosen]
        for campaign, order in orders:
            _check_part(campaign, order)
        for number, (campaign, order) in enumerate(orders):
            if not stop.wanted:
                shown = _Progress(f"{number + 1}/{len(orders)}")
                rows += _rows(campaign, order._replace(said=shown))
    sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
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
    service = Service(store)
    server = TargetServer(listener, service, Entry())
    server.start()
    try:
        yield address_of(listener)
    finally:
        server.close()
        service.close()


def row_of(tally: Tally, seed: int, seconds: float) -> Row:
    """Return a tally as a row: its value is how often something was wrong."""
    bounded = tally.each_may_fail and tally.tried and not tally.failed
    more: dict[str, object] = {
        "tried": tally.tried,
        "of": tally.unit,
        "bound_95": _BOUND_95 / tally.tried if bounded else None,
        "counts": dict(tally.counts),
        **tally.figures,
        "seed": seed,
        "seconds": round(seconds, 1),
        "failures": tally.failures,
    }
    if tally.skipped:
        more["skipped"] = tally.skipped
    ok = None if tally.skipped else tally.failed == 0 and tally.tried > 0
    return Row(
        what=f"soak.{tally.what}", value=float(tally.failed), unit="wrong", goal=0, ok=ok, more=more
    )


def _chosen(args: argparse.Namespace) -> Sequence[tuple[Campaign, str]]:
    """Return each campaign that was named, and the part of it: "" for all of it."""
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


def _order_of(campaign: Campaign, part: str, every: Order) -> Order:
    """Turn what was ordered of every campaign into what is of this one, or of a part of it."""
    told = every.tries < sys.maxsize or every.seconds < float("inf")
    tries = every.tries if told else campaign.tries
    return every._replace(tries=tries, part=part, whole=bool(part and told))


def _check_part(campaign: Campaign, order: Order) -> None:
    """Raise ConfigError where a campaign has no such part: before hours of others are lost."""
    if not order.part:
        return
    module = import_module(f"holdfast.testing.{campaign.name}")
    nothing = order._replace(part=f"{campaign.name}.", said=lambda _: None)
    parts = [tally.what for tally in module.run(nothing)]
    if not any(map(order.wants, parts)):
        raise ConfigError(
            f"campaign {order.part!r} is unknown; choose a part from: {', '.join(parts)}"
        )


def _rows(campaign: Campaign, order: Order) -> Iterator[Row]:
    module = import_module(f"holdfast.testing.{campaign.name}")
    start = time.monotonic()
    for tally in module.run(order):
        seconds, start = time.monotonic() - start, time.monotonic()
        if order.wants(tally.what) and (tally.tried or not order.stopped()):
            yield row_of(tally, order.seed, seconds)


class _Stop:
    """Within it the first interrupt lets the round under way end, so that its count is told."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _heard(self, *_: object) -> None:
        self.wanted = True
        signal.signal(signal.SIGINT, self._before)
        print("\nsoak: stops after this round; once more, and at once", file=sys.stderr)


class _Progress:
    """Shows how far a campaign is: one line, on a terminal only."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._shown_at = 0.0

    def __call__(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _LOOK_S and sys.stderr.isatty():
            self._shown_at = now
            sys.stderr.write(
                f"\r\x1b[K{self._where} {tally.what}: {tally.tried:,} {tally.unit}, "
                f"{tally.failed} wrong"
            )
            sys.stderr.flush()
