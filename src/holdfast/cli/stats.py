"""`holdfast stats`: what a running node has saved since its start, or other capacities would."""

from __future__ import annotations

import argparse

import msgspec

from holdfast.byte_size import Size
from holdfast.cli import OK
from holdfast.cli.options import (
    add_json_argument,
    add_node_arguments,
    ask_status,
    connected,
    many,
    node_address,
    show,
)
from holdfast.status import (
    CodecStatus,
    CurveStatus,
    NodeStatus,
    QuantiseStatus,
    TargetStatus,
    read_curve,
)
from holdfast.tier_totals import tier_totals
from holdfast.wire.local.messages import Curve

_MULTIPLES = ("0.5", "1", "2", "10")
_CENTS_FROM = 10.0
_UNITS = ((86_400.0, "day"), (3_600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--curve",
        action="store_true",
        help="show what half, twice and ten times the capacity would have hit of recent requests",
    )
    add_node_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print what the node did, in a few lines."""
    address = node_address(args)
    with connected(address, "stats") as ask:
        if args.curve:
            curve = read_curve(ask(Curve()))
            data = {"node": address, **msgspec.to_builtins(curve)}
            show("\n".join(curve_lines(curve)), data, args.json)
            return OK
        status = ask_status(ask)
    names = (
        *("version", "host", "role", "addresses", "uptime_s", "activity", "evictions"),
        *("moves", "dropped_unmoved", "failed_checks", "durable"),
        *("codecs", "quantise", "target", "credentials", "tiers"),
    )
    data = msgspec.to_builtins(status)
    kept = {name: data[name] for name in names}
    lines = summary(status)
    lines += [f"codec: {codec_line(codec)}" for codec in status.codecs if codec.used]
    if status.quantise.domains:
        lines.append(f"int8: {quantise_line(status.quantise)}")
    lines += move_lines(status)
    lines += request_lines(status)
    lines += [f"durable: {line}" for line in durable_lines(status)]
    show("\n".join(lines), {"node": address, **kept}, args.json)
    return OK


def summary(status: NodeStatus) -> list[str]:
    """Return what a node did since its start, for engines and for other nodes, in lines of text.

    Certificates and tokens that expire soon, or cannot be used, have a line each.
    """
    activity, target = status.activity, status.target
    lookups = sum(activity.calls.get("lookup", {}).values())
    is_target = target is not None and (target.requests > 0 or status.role == "target")
    lines = []
    if lookups or activity.prompts or not is_target:
        lines += _for_engines(status, lookups)
    if target is not None and is_target:
        lines += _for_other_nodes(status, target)
    unit_s, unit = next((each for each in _UNITS if status.uptime_s >= each[0]), _UNITS[-1])
    ago = many(int(status.uptime_s // unit_s), unit)
    lines += [
        f"{state.setting} {state.file}: {state.trouble or state.period}"
        for state in status.credentials
        if state.trouble or state.soon
    ]
    return [f"since start, {ago} ago: {lines[0]}", *lines[1:]]


def move_lines(status: NodeStatus) -> list[str]:
    """Return the moves between tiers below memory, and those that came too late, in lines."""
    lines = [
        f"moved: {many(move.blocks, 'block')} from {move.source} to {move.target} "
        f"({move.reason}, {Size(move.nbytes)})"
        for move in status.moves
        if move.reason != "save" and move.blocks
    ]
    lines += [
        f"{tier} evicted {many(number, 'block')} before they were moved"
        for tier, number in status.dropped_unmoved.items()
    ]
    return lines


def request_lines(status: NodeStatus) -> list[str]:
    """Return a line for each tier whose medium is paid by request: how many, and their price."""
    lines = []
    for tier, used in tier_totals(status.tiers).items():
        if used.requests:
            counts = ", ".join(
                f"{number:,} {verb.upper()}" for verb, number in used.requests.items()
            )
            lines.append(f"{tier}: {counts}; {dollars_text(used.request_dollars)} at list price")
    return lines


def durable_lines(status: NodeStatus) -> list[str]:
    """Return a line on durable blocks, if any: how many, and which their tier does not hold yet."""
    durable = status.durable
    if durable is None or not (durable.marked or durable.lost or durable.syncs):
        return []
    parts = [f"{many(durable.marked, 'block')} to keep on {durable.tier}"]
    if durable.waiting:
        waiting = f"{durable.waiting:,} ({Size(durable.waiting_bytes)}) not there yet"
        parts.append(f"{waiting}, the oldest for {durable.oldest_s:.0f} s")
    if durable.syncs:
        waiting = f"{many(durable.syncs, 'sync')} waiting, the first for {durable.deadline_s:.0f}"
        parts.append(f"{waiting} s more")
    if durable.lost:
        parts.append(f"{durable.lost:,} lost before they were written")
    if durable.evicted:
        parts.append(f"{durable.evicted:,} evicted or lost by it within their time")
    return ["; ".join(parts)]


def dollars_text(dollars: float) -> str:
    """Return an amount: "$12.30", with parts of a cent below ten dollars."""
    return f"${dollars:,.2f}" if dollars >= _CENTS_FROM else f"${dollars:.4f}"


def codec_line(codec: CodecStatus) -> str:
    """Return what a tier's codec saves, does and has done, in one line."""
    does = "encodes" if codec.encodes else "keeps raw records"
    parts = [f"{codec.tier} {does} ({codec.mode})"]
    if codec.held_raw_bytes != codec.held_bytes:
        parts.append(
            f"{Size(codec.held_raw_bytes)} of blocks in {Size(codec.held_bytes)} "
            f"({codec.held_ratio:.2f})"
        )
    quantised = f" ({codec.quantised:,} by int8)" if codec.quantised else ""
    parts.append(f"{codec.encoded:,} encoded{quantised}")
    parts.append(f"{codec.kept_raw:,} kept raw")
    parts.append(f"{codec.decoded:,} decoded")
    if codec.mismatches:
        parts.append(f"{codec.mismatches:,} decoded to other bytes and were stored raw")
    if codec.undecodable:
        parts.append(f"{codec.undecodable:,} could not be decoded")
    return ", ".join(parts)


def quantise_line(quantise: QuantiseStatus) -> str:
    """Return what the lossy codec did for the domains that ask for it, in one line."""
    line = (
        f"{', '.join(quantise.domains)}: {many(quantise.quantised, 'block')} quantised "
        f"({Size(quantise.raw_bytes)}), {quantise.left_exact:,} left exact"
    )
    if quantise.refusals:
        line += f"; {many(quantise.refusals, 'session')} exact without a gate record"
    return line


def curve_lines(curve: CurveStatus) -> list[str]:
    """Return the hits of recent requests by capacity, as a table with what they were counted of."""
    if not curve.requests:
        return ["no request since the start of the node, so hits at other capacities are unknown"]
    distinct = Size(round(curve.unique_blocks * curve.block_bytes))
    unit_s, unit = next((each for each in _UNITS if curve.span_s >= each[0]), _UNITS[-1])
    what = (
        f"hits of the last {many(curve.requests, 'request')}, in "
        f"{many(int(curve.span_s // unit_s), unit)}: {many(curve.tokens, 'token')}, "
        f"{many(curve.unique_blocks, 'distinct block')} ({distinct})"
    )
    lines = [
        what,
        f"{'':<10}{'capacity':>12}{'half':>10}{'present':>10}{'twice':>10}{'ten times':>12}",
    ]
    for tier in curve.tiers:
        half, present, twice, ten = (
            f"{100 * tier.hits.get(multiple, 0.0):.1f} %" for multiple in _MULTIPLES
        )
        size = str(Size(tier.capacity_bytes))
        lines.append(f"{tier.tier:<10}{size:>12}{half:>10}{present:>10}{twice:>10}{ten:>12}")
    lines.append(f"{'unlimited':<22}{100 * curve.unlimited:>30.1f} %")
    if any(tier.capacity_bytes > curve.unique_blocks * curve.block_bytes for tier in curve.tiers):
        lines.append(
            "a capacity larger than the distinct blocks cannot hit more of these requests; it may "
            "of longer traffic: record it with `record`, and give it to `holdfast sim`"
        )
    if curve.left_out:
        lines.append(f"{many(curve.left_out, 'request')} with another block size are left out")
    lines.append(
        "exact LRU, each tier as the only store; blocks that engines have in their own caches count"
    )
    return lines


def identity(status: NodeStatus) -> str:
    """Return role, host, version and addresses of a node in one line."""
    where = ", ".join(status.addresses)
    return f"{status.role} on {status.host}, version {status.version}, at {where}"


def _for_engines(status: NodeStatus, lookups: int) -> list[str]:
    activity = status.activity
    late = activity.calls.get("fetch", {}).get("late", 0)
    corrupt = sum(failed.copies for failed in status.failed_checks if failed.outcome == "corrupt")
    tokens, loaded = activity.tokens, activity.loaded_tokens
    prompts = f"{many(activity.prompts, 'prompt')} of {many(tokens, 'token')}"
    lines = [f"{many(lookups, 'lookup')}, {prompts}"]

    def percent(part: int) -> str:
        return f"{100 * part / tokens:.0f} %"

    if tokens:
        by_tier = ", ".join(f"{tier} {percent(n)}" for tier, n in loaded.items() if n)
        lines.append(
            f"{percent(sum(loaded.values()))} of prompt tokens from Holdfast"
            f"{f' ({by_tier})' if by_tier else ''}, "
            f"{percent(activity.engine_tokens)} from the engines' own caches, "
            f"{percent(activity.computed_tokens)} computed"
        )
    lines.append(
        f"{activity.saved_s / 60:,.1f} engine-minutes saved (estimated time of computing less "
        f"the measured time); {corrupt:,} corrupt, {late:,} late"
    )
    return lines


def _for_other_nodes(status: NodeStatus, target: TargetStatus) -> list[str]:
    """Return lines on what a target received and sent, in all and by domain."""
    refused = f" ({target.refused:,} refused)" if target.refused else ""
    away = f" ({target.turned_away:,} turned away)" if target.turned_away else ""
    line = (
        f"{many(target.requests, 'request')} of other nodes{refused}: received "
        f"{many(target.received_blocks, 'block')} ({Size(target.received_bytes)}), sent "
        f"{many(target.sent_blocks, 'block')} ({Size(target.sent_bytes)}); "
        f"{many(target.connections, 'connection')}{away}, {many(status.blocks, 'block')} held"
    )
    by_domain = [
        f"  {domain.domain}: received {Size(domain.received_bytes)}, sent {Size(domain.sent_bytes)}"
        for domain in target.domains
    ]
    return [line, *by_domain]
