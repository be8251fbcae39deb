"""`holdfast inspect`: list what a node stores and plans; drop blocks; check the audit log."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli import FAILED, OK
from holdfast.cli.confirm import add_yes_argument, confirm, copies, not_counted
from holdfast.cli.inspect_plans import plans_text
from holdfast.cli.options import (
    add_json_argument,
    add_node_arguments,
    connected,
    load_config,
    many,
    node_address,
    read_fingerprint,
    request_report,
    show,
)
from holdfast.cli.stats import summary
from holdfast.config import Size
from holdfast.errors import ConfigError
from holdfast.keys.audit import check
from holdfast.metrics import tier_totals
from holdfast.wire.local.messages import Drop, List, Members, Plans, Request, Status

if TYPE_CHECKING:
    from holdfast.wire.local.client import Client

EVERYTHING = "*"


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
        "fingerprint", nargs="?", default="", help="32 hex digits, as listed by `inspect`"
    )
    parser.add_argument("--all", action="store_true", help="drop all blocks")
    add_yes_argument(parser)
    add_node_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the node's answer; return 1 if the audit log was changed after it was written."""
    if args.action == "audit":
        return _audit(args)
    request = _request(args)
    address = node_address(args)
    with connected(address, "inspect") as client:
        if isinstance(request, Drop) and not args.yes:
            _confirm_drop(client, request)
        answer = request_report(client, request)
        if isinstance(request, List):
            answer = {"blocks": answer["blocks"], "status": request_report(client, Status())}
    show(_text(request, answer), {"node": address, **answer}, args.json)
    return OK


def _audit(args: argparse.Namespace) -> int:
    """Check the hash chain of the configured audit log; no node is needed."""
    config = load_config(args)
    if not config.audit_file:
        raise ConfigError(
            "audit: without a disk tier there is no audit log by default; name a file"
        )
    try:
        found = check(Path(config.audit_file))
    except OSError as error:
        raise ConfigError(
            f"audit: {config.audit_file!r} cannot be read: {error.strerror}; it is created when "
            "the first domain gets a data key, or a peer is refused"
        ) from error
    verdict = "the chain is broken:" if found.faults else "the chain is whole"
    lines = [f"{config.audit_file}: {many(found.lines, 'line')}, last hash {found.head}; {verdict}"]
    lines += [f"  {fault}" for fault in found.faults]
    show("\n".join(lines), {"file": config.audit_file, **found._asdict()}, args.json)
    return FAILED if found.faults else OK


def _request(args: argparse.Namespace) -> Request:
    fingerprint = read_fingerprint(args.fingerprint)
    if args.action == "drop":
        if bool(fingerprint) == args.all:
            raise ConfigError("drop: name one fingerprint, or add --all")
        return Drop(fingerprint or EVERYTHING)
    if fingerprint:
        raise ConfigError(f"{args.action}: shows all fingerprints; name none")
    requests: dict[str, Request] = {"list": List(), "plans": Plans(), "pool": Members()}
    return requests[args.action]


def _confirm_drop(client: Client, request: Drop) -> None:
    """Show what would be dropped, and ask, unless no block would be."""
    found = request_report(client, Drop(request.fingerprint, "preview"))
    lines = [
        f"{entry['fingerprint']}, domain {entry['domain']}: {many(entry['blocks'], 'block')} would "
        f"be dropped: {copies(entry['tiers'])}"
        for entry in found["blocks"]
    ]
    if lines:
        confirm([*lines, *not_counted(found, stays=True)], "drop them?")


def _text(request: Request, answer: Mapping[str, Any]) -> str:
    if isinstance(request, Drop):
        return f"dropped {many(answer['dropped'], 'block')}"
    if isinstance(request, Plans):
        return plans_text(answer)
    if isinstance(request, Members):
        pools = [line for pool in answer["shared"] for line in _pool(pool)]
        return "\n".join(pools or ["this node has no shared tier"])
    namespaces = [line for namespace in answer["blocks"] for line in _namespace(namespace)]
    return "\n".join([*_tiers(answer["status"]), "", *(namespaces or ["nothing is stored"])])


def _pool(pool: Mapping[str, Any]) -> list[str]:
    members = pool.get("members", [])
    lines = [f"{pool['tier']}: {many(len(members), 'member')}, epoch {pool.get('epoch', 0)}"]
    if pool.get("trouble"):
        lines.append(f"  membership: {pool['trouble']}")
    return lines + [line for member in members for line in _member(member)]


def _member(member: Mapping[str, Any]) -> list[str]:
    answers = {"answers in": "latency_s", "reads in": "first_byte_s"}
    known = {words: member.get(name) for words, name in answers.items()}
    health = "ejected" if member.get("ejected") else f"breaker {member.get('phase', 'closed')}"
    took = "".join(f", {words} {1e3 * s:.2f} ms" for words, s in known.items() if s is not None)
    first = (
        f"  {member['id']:<12} {member['address']}  {member['state']}, "
        f"{100 * member['share']:.1f} % of keys, {health}{took}"
    )
    usage = [
        f"    {tier:<8} {Size(used['used_bytes'])} of {Size(used['capacity_bytes'])} used"
        for tier, used in tier_totals(member["tiers"]).items()
    ]
    condition, why = member.get("condition"), member.get("why")
    if condition is not None:
        answered = f" in {1e3 * member.get('answer_s', 0.0):.1f} ms" if condition == "fine" else ""
        first = f"{first}; {condition}{answered}{f': {why}' if why else ''}"
    return [first, *usage]


def _tiers(status: Mapping[str, Any]) -> list[str]:
    lines = summary(status)
    lines.append(f"node {status['incarnation']}: {many(status['blocks'], 'block')}")
    lines += [_usage(tier, used) for tier, used in tier_totals(status["tiers"]).items()]
    lines += [_admission(rule) for rule in status["admission"]]
    lines += [_domain(domain) for domain in status["domains"]]
    hints, scrub = status["hints"], status["scrub"]
    lines.append(
        f"  hints   {many(hints['sessions'], 'session')} followed, "
        f"{many(hints['prestaging'], 'context')} to prestage, {Size(hints['pinned_bytes'])} pinned"
    )
    lines.append(
        f"  scrub   {many(scrub['passes'], 'pass')}, {many(scrub['checked'], 'copy')}, "
        f"{scrub['corrupt']} corrupt"
    )
    lines += [
        f"  fault   {fault['tier']} {fault['key']}: {fault['outcome']}"
        for fault in status["faults"]
    ]
    return lines


def _usage(tier: str, used: Mapping[str, int]) -> str:
    """Return the line of a tier's usage; a shared tier has no capacity of its own."""
    failures = many(used["failures"], "failure")
    if not used["capacity_bytes"]:
        return f"  {tier:<8} shared: `holdfast inspect pool` shows its members; {failures}"
    return (
        f"  {tier:<8} {Size(used['used_bytes'])} of {Size(used['capacity_bytes'])} used, "
        f"{many(used['records'], 'record')}, {failures}"
    )


def _admission(rule: Mapping[str, Any]) -> str:
    """Return the line of a tier's admission rule, with its figures."""
    figures = [
        f"{name} {value:,.0f}" if float(value).is_integer() else f"{name} {value:.4g}"
        for name, value in rule.items()
        if name != "tier"
    ]
    return f"  admit   {rule['tier']}: {', '.join(figures)}"


def _domain(domain: Mapping[str, Any]) -> str:
    """Return the line of a domain's usage and quota on each tier."""
    usage = []
    for tier, used_bytes in domain["used_bytes"].items():
        most = domain["quota_bytes"].get(tier)
        of = "" if most is None else f" of its {Size(most)}"
        usage.append(f"{tier} {Size(used_bytes)}{of}")
    reserved = domain["reserved_bytes"]
    rest = f", {Size(reserved)} of host reserved" if reserved else ""
    unreadable = domain.get("unreadable", 0)
    if unreadable:
        rest += f", {many(unreadable, 'record')} unreadable (another key ring?)"
    return f"  domain  {domain['domain']}: {', '.join(usage)}{rest}, share {domain['share']:g}"


def _namespace(namespace: Mapping[str, Any]) -> list[str]:
    first = (
        f"{namespace['fingerprint']}  domain {namespace['domain']}: "
        f"{many(namespace['blocks'], 'block')} of {namespace['block_tokens']} tokens, "
        f"{Size(namespace['payload_bytes'])}"
    )
    tiers = [
        f"  {name:<8}{many(tier['blocks'], 'block')}, {Size(tier['bytes'])}"
        for name, tier in namespace["tiers"].items()
    ]
    return [first, *tiers]
