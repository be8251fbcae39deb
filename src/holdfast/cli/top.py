"""`holdfast top`: a live view of a running node in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.byte_size import Size
from holdfast.cli import OK
from holdfast.cli.options import Ask, add_node_arguments, ask_status, connected, many, node_address
from holdfast.cli.stats import dollars_text, durable_lines, identity, quantise_line, summary
from holdfast.errors import ConfigError
from holdfast.status import NodeStatus
from holdfast.tier_totals import tier_totals

if TYPE_CHECKING:
    from rich.table import Table

EVERY_S = 1.0
EVERY_S_MIN = 0.1
EVERY_S_MAX = 3_600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_node_arguments(parser)
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY_S,
        metavar="SECONDS",
        help=f"time between two views (default: {EVERY_S:g})",
    )
    parser.add_argument(
        "--views", type=int, default=0, metavar="N", help="end after N views (default: at Ctrl-C)"
    )


def run(args: argparse.Namespace) -> int:
    """Show views until Ctrl-C; in a pipe they follow each other."""
    if not EVERY_S_MIN <= args.every <= EVERY_S_MAX:
        raise ConfigError(
            f"--every {args.every:g}: is not from {EVERY_S_MIN:g} to {EVERY_S_MAX:,.0f} seconds; "
            "choose another time"
        )
    if args.views < 0:
        raise ConfigError(f"--views {args.views}: is below 0; give 1 or more, or 0 for no end")
    try:
        from rich.console import Console, Group
        from rich.live import Live
    except ImportError as error:
        raise ConfigError(
            "top needs a package that is not installed: pip install 'holdfast-kv[demo]'; "
            "`holdfast stats` and `holdfast inspect` need none"
        ) from error
    console = Console()
    with connected(node_address(args), "top") as ask:
        views = (Group(*view) for view in _views(ask, args.every, args.views))
        if not sys.stdout.isatty():
            for view in views:
                console.print(view)
            return OK
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(view, refresh=True)
    return OK


def _views(ask: Ask, every_s: float, number: int) -> Iterator[list[str | Table]]:
    """Yield what to show every `every_s` seconds; `number` 0: without end."""
    before: NodeStatus | None = None
    shown = 0
    while not number or shown < number:
        if shown:
            time.sleep(every_s)
        status = ask_status(ask)
        lines = [identity(status), *summary(status)]
        if status.quantise.domains:
            lines.append(f"int8: {quantise_line(status.quantise)}")
        lines += [f"durable: {line}" for line in durable_lines(status)]
        yield [*lines, *_tables(status, before)]
        before, shown = status, shown + 1


def _tables(status: NodeStatus, before: NodeStatus | None) -> list[Table]:
    """Return the tables of tiers, queues and, if there are any, pool members."""
    tiers = _table(
        *("tier", "used", "of", "ratio", "records", "read", "written", "evicted", "failures"),
        "state",
    )
    past = tier_totals(before.tiers) if before else {}
    codecs = {codec.tier: codec for codec in status.codecs}
    elapsed_s = status.uptime_s - before.uptime_s if before else 0.0
    for tier, now in tier_totals(status.tiers).items():
        rates = ["", ""]
        if tier in past and elapsed_s > 0:
            old = past[tier]
            moved = now.read_bytes - old.read_bytes, now.written_bytes - old.written_bytes
            rates = [f"{Size(int(nbytes / elapsed_s))}/s" for nbytes in moved]
        capacity_bytes = now.capacity_bytes
        share = f"{100 * now.used_bytes / capacity_bytes:.0f} %" if capacity_bytes else ""
        capacity = str(Size(capacity_bytes)) if capacity_bytes else "shared"
        if now.used_bytes and not capacity_bytes:
            share, capacity = str(Size(now.used_bytes)), "no bound"
        evicted = status.evictions.get(tier, 0)
        codec = codecs.get(tier)
        shared = status.shared.get(tier)
        outage = ["out of reach"] if shared is not None and shared.outage else []
        ratio = f"{codec.held_ratio:.2f}" if codec and codec.used else ""
        tiers.add_row(
            *(tier, share, capacity, ratio, f"{now.records:,}", *rates),
            *(f"{evicted:,}", f"{now.failures:,}", ", ".join([*now.conditions, *outage])),
        )
    queues = _table("waiting writes", "leases", "reservations", "sessions", "to prestage")
    values = (
        *(status.waiting_to_write, status.leases, status.tickets),
        *(status.hints.sessions, status.hints.prestaging),
    )
    queues.add_row(*(f"{value:,}" for value in values))
    others = _table("other nodes", "requests", "received", "sent", "refused")
    if (target := status.target) is not None and (target.requests or status.role == "target"):
        rates = ["", ""]
        if before is not None and before.target is not None and elapsed_s > 0:
            received = (target.received_bytes - before.target.received_bytes) / elapsed_s
            sent = (target.sent_bytes - before.target.sent_bytes) / elapsed_s
            rates = [f"{Size(int(received))}/s", f"{Size(int(sent))}/s"]
        others.add_row(
            *(many(target.connections, "connection"), f"{target.requests:,}", *rates),
            f"{target.refused:,}",
        )
    members = _table(
        "shared", "member", "breaker", "left out", "answers in", "under way", "trouble"
    )
    for tier, shared in status.shared.items():
        for member in shared.members:
            latency_s = member.latency_s
            members.add_row(
                *(tier, member.target, member.phase, "yes" if member.ejected else ""),
                "" if latency_s is None else f"{1e3 * latency_s:.2f} ms",
                *(str(Size(member.in_flight_bytes)), member.trouble),
            )
    more = (others, _requests(status), _page_locks(status), members)
    return [tiers, queues, *(table for table in more if table.rows)]


def _requests(status: NodeStatus) -> Table:
    """Return the table of requests to media that are paid by request; empty without such a tier."""
    totals = {name: used for name, used in tier_totals(status.tiers).items() if used.requests}
    verbs = list(dict.fromkeys(verb for used in totals.values() for verb in used.requests))
    table = _table("requests of", *(verb.upper() for verb in verbs), "list price")
    for name, used in totals.items():
        counts = (f"{used.requests.get(verb, 0):,}" for verb in verbs)
        table.add_row(name, *counts, dollars_text(used.request_dollars))
    return table


def _page_locks(status: NodeStatus) -> Table:
    """Return the table of memory that engines have page-locked; without rows if there is none."""
    locks = _table("page locks", "domain", "locked", "of the domain", "without blocks", "trouble")
    domains = {domain.domain: domain for domain in status.domains}
    for engine in status.page_locks.engines:
        domain = domains.get(engine.domain)
        locked, kept = (domain.locked_bytes, domain.kept_bytes) if domain else (0, 0)
        locks.add_row(
            *(engine.engine, engine.domain, str(Size(engine.locked_bytes))),
            *(str(Size(locked)), str(Size(kept)), engine.failure),
        )
    return locks


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
