"""`holdfast stats`: what a running node has saved since its start."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from holdfast.cli import OK
from holdfast.cli.options import (
    add_json_argument,
    add_node_arguments,
    connected,
    many,
    node_address,
    show,
)
from holdfast.wire.local.messages import Status

_UNITS = ((86_400.0, "day"), (3_600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_node_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the node's counters in three lines."""
    address = node_address(args)
    with connected(address, "stats") as ask:
        status = ask(Status())
    names = ("uptime_s", "activity", "evictions", "failed_checks")
    kept = {name: status[name] for name in names}
    show("\n".join(summary(status)), {"node": address, **kept}, args.json)
    return OK


def summary(status: Mapping[str, Any]) -> list[str]:
    """Return what a node did since its start, in lines of text."""
    activity = status["activity"]
    lookups = sum(activity["calls"].get("lookup", {}).values())
    late = activity["calls"].get("fetch", {}).get("late", 0)
    corrupt = sum(
        failed["copies"] for failed in status["failed_checks"] if failed["outcome"] == "corrupt"
    )
    tokens, loaded = activity["tokens"], activity["loaded_tokens"]
    prompts = f"{many(activity['prompts'], 'prompt')} of {many(tokens, 'token')}"
    uptime_s = status["uptime_s"]
    unit_s, unit = next((each for each in _UNITS if uptime_s >= each[0]), _UNITS[-1])
    ago = many(int(uptime_s // unit_s), unit)
    lines = [f"since start, {ago} ago: {many(lookups, 'lookup')}, {prompts}"]

    def percent(part: int) -> str:
        return f"{100 * part / tokens:.0f} %"

    if tokens:
        by_tier = ", ".join(f"{tier} {percent(n)}" for tier, n in loaded.items() if n)
        lines.append(
            f"{percent(sum(loaded.values()))} of prompt tokens from Holdfast"
            f"{f' ({by_tier})' if by_tier else ''}, "
            f"{percent(activity['engine_tokens'])} from the engines' own caches, "
            f"{percent(activity['computed_tokens'])} computed"
        )
    lines.append(
        f"{activity['saved_s'] / 60:,.1f} engine-minutes saved (estimated time of computing less "
        f"the measured time); {corrupt:,} corrupt, {late:,} late"
    )
    return lines
