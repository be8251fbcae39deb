"""`holdfast inspect`: list what a node stores and plans; drop blocks; check the audit log."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli import FAILED, OK
from holdfast.cli.confirm import add_yes_argument, confirm, copies, not_counted
from holdfast.cli.options import (
    add_json_argument,
    add_node_arguments,
    connected,
    load_config,
    many,
    node_address,
    read_fingerprint,
    show,
)
from holdfast.cli.stats import (
    codec_line,
    durable_lines,
    move_lines,
    quantise_line,
    request_lines,
    summary,
)
from holdfast.config import Size
from holdfast.errors import ConfigError, NotFollowed
from holdfast.keys.audit import check
from holdfast.shared_report import SegmentMediumReport, SharedTierReport, read_shared
from holdfast.status import (
    NodeStatus,
    PlansStatus,
    read_plans,
    read_status,
)
from holdfast.tier_totals import tier_totals
from holdfast.wire.local.messages import Drop, List, Members, Plans, Request, Status

EVERYTHING = "*"

_SHORT_S = 0.1
_TINY_S = 1e-4
"""Times below these are shown in milliseconds and microseconds."""

_MINUTES_FROM_S = 120.0
_GB, _MB = 1e9, 1e6
_SLOW_GB_PER_S = 0.1
_CONTEXT_TOKENS = 1_000

_NOT_FOLLOWED: Mapping[str, str] = {
    NotFollowed.HAD: "the engine had more than it had reported",
    NotFollowed.LOST: "the engine had less than it had reported",
    NotFollowed.LATE: "the engine did not wait for the answer",
    NotFollowed.NOT_FETCHED: "the engine requested no fetch",
    NotFollowed.PREEMPTED: "the engine preempted the request",
    NotFollowed.ENDED: "the request ended before its first token",
    NotFollowed.RESET: "the engine reset its caches",
    NotFollowed.GONE: "the connection to the engine ended",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "plans", "pool", "drop", "audit"),
        help="list the stored blocks (default), the last plans (fetch or recompute) or the pool's "
        "members; drop stored blocks (asks first, or needs --yes); or check the audit log",
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="FINGERPRINT|FILE",
        help="for drop: 32 hex digits, as listed by `inspect`; for audit: the audit log (default: "
        "the configuration's)",
    )
    parser.add_argument("--all", action="store_true", help="drop all blocks")
    add_yes_argument(parser)
    add_node_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the node's answer; return 1 if the audit log was changed after it was written."""
    if args.all and args.action != "drop":
        raise ConfigError(f"{args.action}: drops no blocks; remove --all")
    if args.action == "audit":
        return _audit(args)
    fingerprint = read_fingerprint(args.what)
    if args.action == "drop" and bool(fingerprint) == args.all:
        raise ConfigError("drop: name one fingerprint, or add --all")
    if args.action != "drop" and fingerprint:
        raise ConfigError(f"{args.action}: shows all fingerprints; name none")
    requests: dict[str, Request] = {
        "list": List(),
        "plans": Plans(),
        "pool": Members(),
        "drop": Drop(fingerprint or EVERYTHING),
    }
    address = node_address(args)
    with connected(address, "inspect") as ask:
        if args.action == "drop" and not args.yes:
            found = ask(Drop(fingerprint or EVERYTHING, "preview"))
            loss = [
                f"{entry['fingerprint']}, domain {entry['domain']}: "
                f"{many(entry['blocks'], 'block')} would be dropped: {copies(entry['tiers'])}"
                for entry in found["blocks"]
            ]
            if loss or not found["complete"]:
                confirm([*loss, *not_counted(found, stays=True)], "drop them?")
        answer = ask(requests[args.action])
        if args.action == "list":
            answer = {"blocks": answer["blocks"], "status": ask(Status())}
    match args.action:
        case "drop":
            text = f"dropped {many(answer['dropped'], 'block')}"
            if not answer["complete"]:
                text += (
                    " held so far; recovery is not complete, and drops those that it finds later"
                )
        case "plans":
            text = plans_text(read_plans(answer))
        case "pool":
            text = _pools_text(read_shared(answer).shared)
        case _:
            text = "\n".join(
                [*_status_lines(read_status(answer["status"])), "", *_stored(answer["blocks"])]
            )
    show(text, {"node": address, **answer}, args.json)
    return OK


def _audit(args: argparse.Namespace) -> int:
    """Check the hash chain of an audit log, the named or the configured one; no node is needed."""
    if args.node:
        raise ConfigError("audit: reads a file of this machine, not a node; remove --node")
    file = args.what or load_config(args).audit_file
    if not file:
        raise ConfigError(
            "audit: without a disk tier there is no audit log by default; name a file"
        )
    try:
        found = check(Path(file))
    except OSError as error:
        when = "it is created when the first domain gets a data key, or a peer is refused"
        remedy = "name an audit log" if args.what else when
        raise ConfigError(f"audit: {file!r} cannot be read: {error.strerror}; {remedy}") from error
    verdict = "the chain is broken:" if found.faults else "the chain is whole"
    lines = [f"{file}: {many(found.lines, 'line')}, last hash {found.head}; {verdict}"]
    lines += [f"  {fault}" for fault in found.faults]
    show("\n".join(lines), {"file": file, **found._asdict()}, args.json)
    return FAILED if found.faults else OK


def _pools_text(pools: Sequence[SharedTierReport]) -> str:
    """Return a line for each pool and its members, with each member's health and usage."""
    lines = []
    for pool in pools:
        if pool.medium is not None:
            lines += _medium_lines(pool.tier, pool.medium)
        else:
            lines.append(f"{pool.tier}: {many(len(pool.members), 'member')}, epoch {pool.epoch}")
        if pool.lanes > 1 or pool.parity_records:
            refused = f", {pool.parity_refused:,} refused" if pool.parity_refused else ""
            lines.append(
                f"  striped over {pool.lanes}: {many(pool.parity_records, 'parity record')} "
                f"written{refused}, {many(pool.rebuilt, 'record')} rebuilt"
            )
        if pool.limits:
            lines.append(f"  {pool.limits}: `holdfast doctor` says what does not work")
        if pool.trouble:
            lines.append(f"  trouble: {pool.trouble}")
        for member in pool.members:
            health = "ejected" if member.ejected else f"breaker {member.phase}"
            for words, time_s in (
                ("answers in", member.latency_s),
                ("reads in", member.first_byte_s),
            ):
                if time_s is not None:
                    health += f", {words} {1e3 * time_s:.2f} ms"
            if member.condition is not None:
                health += f"; {member.condition}"
                if member.condition == "fine":
                    health += f" in {1e3 * member.answer_s:.1f} ms"
                health += f": {member.why}" if member.why else ""
            lines.append(
                f"  {member.id:<12} {member.address}  {member.state}, "
                f"{100 * member.share:.1f} % of keys, {health}"
            )
            lines += [
                f"    {tier:<8} {Size(used.used_bytes)} of {Size(used.capacity_bytes)} used"
                for tier, used in tier_totals(member.tiers).items()
            ]
    return "\n".join(lines or ["this node has no shared tier"])


def _medium_lines(tier: str, medium: SegmentMediumReport) -> list[str]:
    """Return what a bucket or shared folder holds, and whether it can be read and written."""
    size = f"{many(medium.segments, 'segment')} of {Size(medium.stored_bytes)}"
    lines = [f"{tier}: {medium.address}, {size} with {many(medium.blocks, 'block')} of all nodes"]
    for what, state in (("reads", medium.reads), ("writes", medium.writes)):
        lines.append(f"  {what:<6} {'work' if state == 'active' else f'fail: {state}'}")
    return lines


def _status_lines(status: NodeStatus) -> list[str]:
    """Return what the node did, and its tiers, admission rules, domains, hints and faults."""
    lines = summary(status)
    lines.append(f"node {status.incarnation}: {many(status.blocks, 'block')}")
    for tier, used in tier_totals(status.tiers).items():
        shared = status.shared.get(tier)
        limits = f"; {shared.limits}" if shared and shared.limits else ""
        failures = f"{many(used.failures, 'failure')}{limits}"
        if used.trouble:
            lines.append(f"  {tier:<8} reports no usage: {used.trouble}")
        elif used.capacity_bytes or used.used_bytes:
            of = f" of {Size(used.capacity_bytes)}" if used.capacity_bytes else ""
            lines.append(
                f"  {tier:<8} {Size(used.used_bytes)}{of} used, "
                f"{many(used.records, 'record')}, {failures}"
            )
            lines += [f"  {tier:<8} {name} {why}" for name, why in used.conditions.items()]
            if used.unlisted_records:
                found = f"{many(used.unlisted_records, 'record')}, {Size(used.unlisted_bytes)}"
                lines.append(f"  {tier:<8} cannot be opened or read, and kept: {found}")
        else:
            lines.append(
                f"  {tier:<8} shared: `holdfast inspect pool` shows its members; {failures}"
            )
    lines += [
        f"  {name:<8} out of reach: {why}"
        for name, shared in status.shared.items()
        if (why := shared.outage)
    ]
    lines += [
        f"  {name:<8} reports no members: {shared.trouble}"
        for name, shared in status.shared.items()
        if shared.trouble
    ]
    lines += [f"  calls   {line}" for line in request_lines(status)]
    lines += [f"  codec   {codec_line(codec)}" for codec in status.codecs if codec.used]
    lines += [f"  moves   {line.removeprefix('moved: ')}" for line in move_lines(status)]
    for rule in status.admission:
        figures = [f"{name} {_figure(name, value)}" for name, value in rule.figures.items()]
        lines.append(f"  admit   {rule.tier}: {', '.join(figures)}")
    for domain in status.domains:
        usage = []
        for tier, used_bytes in domain.used_bytes.items():
            most = domain.quota_bytes.get(tier)
            of = "" if most is None else f" of its {Size(most)}"
            raw_bytes = domain.raw_bytes.get(tier, used_bytes)
            raw = "" if raw_bytes == used_bytes else f" (raw {Size(raw_bytes)})"
            usage.append(f"{tier} {Size(used_bytes)}{of}{raw}")
        line = f"  domain  {domain.domain}: {', '.join(usage)}"
        if domain.reserved_bytes:
            line += f", {Size(domain.reserved_bytes)} of host reserved"
        if domain.locked_bytes:
            line += f", {Size(domain.locked_bytes)} page-locked"
        if domain.kept_bytes:
            line += f" ({Size(domain.kept_bytes)} without blocks)"
        if domain.unreadable:
            line += f", {many(domain.unreadable, 'record')} unreadable (another key ring?)"
        lines.append(f"{line}, share {domain.share:g}")
    for engine in status.page_locks.engines:
        why = f"; no more: {engine.failure}" if engine.failure else ""
        locked = f"{Size(engine.locked_bytes)} of domain {engine.domain}"
        lines.append(f"  locks   {engine.engine}: {locked}{why}")
    if recalls := status.page_locks.recalls:
        ends = ", ".join(f"{number:,} {outcome}" for outcome, number in recalls.items())
        lines.append(f"  recalls {ends}")
    if status.quantise.domains:
        lines.append(f"  int8    {quantise_line(status.quantise)}")
    lines += [f"  durable {line}" for line in durable_lines(status)]
    hints, scrub = status.hints, status.scrub
    lines.append(
        f"  hints   {many(hints.sessions, 'session')} followed, "
        f"{many(hints.prestaging, 'context')} to prestage, {Size(hints.staged_bytes)} prestaged, "
        f"{Size(hints.pinned_bytes)} pinned"
    )
    lines.append(
        f"  scrub   {many(scrub.passes, 'pass')}, {many(scrub.checked, 'copy')}, "
        f"{scrub.corrupt} corrupt"
    )
    lines += [f"  fault   {fault.tier} {fault.key}: {fault.outcome}" for fault in status.faults]
    return lines


def _figure(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return str(Size(int(value)))
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"


def _stored(namespaces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on the stored blocks of each namespace, and their copies on each tier."""
    lines = []
    for namespace in namespaces:
        lines.append(
            f"{namespace['fingerprint']}  domain {namespace['domain']}: "
            f"{many(namespace['blocks'], 'block')} of {namespace['block_tokens']} tokens, "
            f"{Size(namespace['raw_bytes'])}"
        )
        lines += [
            f"  {name:<8}{many(tier['blocks'], 'block')}, {Size(tier['bytes'])}{_raw(tier)}"
            for name, tier in namespace["tiers"].items()
        ]
    return lines or ["nothing is stored"]


def _raw(tier: Mapping[str, int]) -> str:
    raw_bytes = tier.get("raw_bytes", tier["bytes"])
    return "" if raw_bytes == tier["bytes"] else f" (raw {Size(raw_bytes)})"


def plans_text(answer: PlansStatus) -> str:
    """Return the node's answer to `Plans` as lines: estimates first, then plans, newest first."""
    lines = _estimates(answer)
    lines.append("")
    if not answer.plans:
        lines.append("nothing was planned yet")
    for plan in answer.plans:
        tokens = f"{plan.prompt_tokens:,} tokens" if plan.prompt_tokens else "some tokens"
        have = f", {plan.have_tokens:,} there" if plan.have_tokens else ""
        age = plan.age_s
        ago = f"{age:.0f} s" if age < _MINUTES_FROM_S else f"{age / 60:.0f} min"
        lines.append(f"#{plan.plan} {ago} ago, {plan.engine}, {tokens}{have}: {plan.reason}")
        outcome = []
        expected, actual, why = plan.expected, plan.actual, plan.not_followed
        if why:
            outcome.append(
                f"not carried out: {_NOT_FOLLOWED.get(why, 'the engine did something else')}"
            )
        if actual.fetched_s is not None:
            outcome.append(
                f"{many(plan.landed_blocks or 0, 'block')} in {_time(actual.fetched_s)} "
                f"(expected {_time(expected.fetched_s or 0.0)}, {plan.outcome})"
            )
        if actual.first_token_s is not None:
            counts = plan.recompute_s and not why
            estimate = f" (expected {_time(expected.first_token_s or 0.0)})" if counts else ""
            outcome.append(f"first token after {_time(actual.first_token_s)}{estimate}")
        if outcome:
            lines.append("    " + "; ".join(outcome))
    return "\n".join(lines)


def _estimates(answer: PlansStatus) -> list[str]:
    """Return lines on the speeds of tiers and engines, and on how right earlier plans were."""
    lines = []
    for tier in answer.tiers:
        speed = f"{tier.bytes_per_s / _GB:.2f} GB/s"
        if tier.bytes_per_s < _SLOW_GB_PER_S * _GB:
            speed = f"{tier.bytes_per_s / _MB:.3g} MB/s"
        queued = f", {tier.queued_bytes / 2**20:.0f} MiB queued" if tier.queued_bytes else ""
        seen = many(tier.reads, "read") if tier.reads else "assumed, not read yet"
        lines.append(f"  {tier.tier:<8} {speed} after {_time(tier.latency_s)}{queued} ({seen})")
    for engine in answer.engines:
        name, cost = f"  {engine.engine} {engine.fingerprint[:8]}", engine.cost
        if cost is None:
            lines.append(f"{name}: has not reported how fast it computes")
            continue
        lines.append(
            f"{name}: {_time(cost.b)} a token, {_time(cost.c * _CONTEXT_TOKENS)} more a "
            f"token for every {_CONTEXT_TOKENS:,} tokens before it, {_time(cost.a)} a step "
            f"({many(engine.steps, 'step')})"
        )
    right = answer.right
    if right.ended and right.median_error is not None:
        lines.append(
            f"  {right.within_25_percent} of {many(right.ended, 'plan')} within 25 % of what "
            f"was expected, half of them within {100 * right.median_error:.0f} %; "
            f"{right.late} late"
        )
    else:
        lines.append("  no plan with an expectation has ended yet")
    if right.not_followed:
        lines.append(f"  {many(right.not_followed, 'plan')} not carried out, and not counted")
    return lines


def _time(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")  # before the unit is chosen: 99.9 ms are 0.10 s
    if rounded >= _SHORT_S:
        return f"{seconds:.2f} s"
    if 0 < rounded < _TINY_S:
        return f"{1e6 * rounded:.2g} us"
    return f"{1000 * rounded:.2g} ms"
