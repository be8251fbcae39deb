"""`holdfast stats`: what a running node has saved since its start."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from holdfast.cli import OK
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    many,
    node_address,
    request_report,
    write_json,
)
from holdfast.report import check_target
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Hello, Status

CONNECT_S = 5.0

_UNITS = ((86_400.0, "day"), (3_600.0, "hour"), (60.0, "minute"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--node", metavar="ADDRESS", help="unix:///path of the node")
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the node's counters in three lines."""
    check_target(args.json)
    address = node_address(args)
    client = Client(address, Hello(PROTOCOL, "holdfast stats"), CONNECT_S)
    try:
        status = request_report(client, Status())
    finally:
        client.close()
    if args.json:
        names = ("uptime_s", "activity", "evictions", "failed_checks")
        kept = {name: status[name] for name in names}
        write_json({"node": address, **kept}, args.json)
    if args.json != "-":
        print("\n".join(summary(status)))
    return OK


def summary(status: Mapping[str, Any]) -> list[str]:
    """Return what a node did since its start, in lines of text."""
    activity = status["activity"]
    lookups = sum(activity["calls"].get("lookup", {}).values())
    late = activity["calls"].get("fetch", {}).get("late", 0)
    corrupt = sum(
        failed["copies"] for failed in status["failed_checks"] if failed["outcome"] == "corrupt"
    )
    first = (
        f"since start, {_ago(status['uptime_s'])} ago: {many(lookups, 'lookup')}, "
        f"{many(activity['prompts'], 'prompt')} of {many(activity['tokens'], 'token')}"
    )
    last = (
        f"{activity['saved_s'] / 60:,.1f} engine-minutes saved (estimated time of computing less "
        f"the measured time); {corrupt:,} corrupt, {late:,} late"
    )
    return [first, *_sources(activity), last]


def _sources(activity: Mapping[str, Any]) -> list[str]:
    """Return the line of shares by source of the prompts' KV; none without a prompt."""
    tokens = activity["tokens"]
    if not tokens:
        return []
    loaded = activity["loaded_tokens"]
    by_tier = ", ".join(f"{tier} {_percent(n, tokens)}" for tier, n in loaded.items() if n)
    shares = (
        f"{_percent(sum(loaded.values()), tokens)} of prompt tokens from Holdfast"
        f"{f' ({by_tier})' if by_tier else ''}, "
        f"{_percent(activity['engine_tokens'], tokens)} from the engines' own caches, "
        f"{_percent(activity['computed_tokens'], tokens)} computed"
    )
    return [shares]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def _ago(seconds: float) -> str:
    for length_s, name in _UNITS:
        if seconds >= length_s:
            return many(int(seconds // length_s), name)
    return many(int(seconds), "second")
