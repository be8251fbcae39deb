"""`holdfast inspect`: what a running node stores, what it plans and why; drop; audit."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli import FAILED, OK
from holdfast.cli.inspect_plans import plans_text
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    load_config,
    many,
    node_address,
    read_fingerprint,
    write_json,
)
from holdfast.config import Size
from holdfast.errors import ConfigError, ProtocolError
from holdfast.rig.report import check_target
from holdfast.store.audit import check
from holdfast.wire.client import Client
from holdfast.wire.messages import (
    PROTOCOL,
    Drop,
    Hello,
    List,
    Members,
    Plans,
    Report,
    Request,
    Status,
)

CONNECT_S = 5.0
ANSWER_S = 60.0

EVERYTHING = "*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "plans", "pool", "drop", "audit"),
        help="list what is stored (default), the last plans (fetch or recompute) or the pool's "
        "members; forget what is stored; or check the audit log",
    )
    parser.add_argument(
        "fingerprint", nargs="?", default="", help="32 hex digits, as `inspect` lists them"
    )
    parser.add_argument("--all", action="store_true", help="drop everything")
    parser.add_argument("--node", metavar="ADDRESS", help="unix:///path of the node")
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the node and show its answer; 1 if the audit log is not as it was written."""
    check_target(args.json)
    if args.action == "audit":
        return _audit(args)
    request = _request(args)
    address = node_address(args)
    client = Client(address, Hello(PROTOCOL, "holdfast inspect"), CONNECT_S)
    try:
        answer = _ask(client, request)
        if isinstance(request, List):
            answer = {"blocks": answer["blocks"], "status": _ask(client, Status())}
    finally:
        client.close()
    if args.json:
        write_json({"node": address, **answer}, args.json)
    if args.json != "-":
        print(_text(request, answer))
    return OK


def _audit(args: argparse.Namespace) -> int:
    """Go through the audit log that the configuration names; no node is needed."""
    config = load_config(args)
    if not config.audit_file:
        raise ConfigError("audit: there is none without a disk tier; name a file")
    try:
        found = check(Path(config.audit_file))
    except OSError as error:
        raise ConfigError(
            f"audit: {config.audit_file!r} can not be read: {error.strerror}; it begins when "
            "the first domain gets a data key, or a peer is turned away"
        ) from error
    if args.json:
        write_json({"file": config.audit_file, **found._asdict()}, args.json)
    if args.json != "-":
        verdict = "the chain is broken:" if found.faults else "the chain is whole"
        first = (
            f"{config.audit_file}: {many(found.lines, 'line')}, last hash {found.head}; {verdict}"
        )
        print("\n".join([first, *(f"  {fault}" for fault in found.faults)]))
    return FAILED if found.faults else OK


def _request(args: argparse.Namespace) -> Request:
    fingerprint = read_fingerprint(args.fingerprint)
    if args.action == "drop":
        if bool(fingerprint) == args.all:
            raise ConfigError("drop: name one fingerprint, or say --all")
        return Drop(fingerprint or EVERYTHING)
    if fingerprint:
        raise ConfigError(f"{args.action}: shows all fingerprints; name none")
    requests: dict[str, Request] = {"list": List(), "plans": Plans(), "pool": Members()}
    return requests[args.action]


def _ask(client: Client, request: Request) -> dict[str, Any]:
    reply = client.call(request, ANSWER_S)
    if not isinstance(reply, Report):
        raise ProtocolError(f"the node answered {type(reply).__name__}, not Report")
    return reply.data


def _text(request: Request, answer: Mapping[str, Any]) -> str:
    if isinstance(request, Drop):
        return f"dropped {many(answer['dropped'], 'block')}"
    if isinstance(request, Plans):
        return plans_text(answer)
    if isinstance(request, Members):
        pools = [line for pool in answer["shared"] for line in _pool(pool)]
        return "\n".join(pools or ["this node shares nothing: it has no pool tier"])
    worlds = [line for world in answer["blocks"] for line in _world(world)]
    return "\n".join([*_tiers(answer["status"]), "", *(worlds or ["nothing is stored"])])


def _pool(pool: Mapping[str, Any]) -> list[str]:
    members = pool.get("members", [])
    lines = [f"{pool['tier']}: {many(len(members), 'member')}, epoch {pool.get('epoch', 0)}"]
    if pool.get("trouble"):
        lines.append(f"  membership: {pool['trouble']}")
    return lines + [line for member in members for line in _member(member)]


def _merged(tiers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry a tier: every domain has a host tier of its own in the same memory."""
    merged: dict[str, dict[str, Any]] = {}
    for tier in tiers:
        known = merged.setdefault(tier["tier"], {**tier, "used_bytes": 0, "records": 0})
        known["used_bytes"] += tier["used_bytes"]
        known["records"] += tier["records"]
        known["failures"] = max(known["failures"], tier["failures"])
        known["capacity_bytes"] = max(known["capacity_bytes"], tier["capacity_bytes"])
    return list(merged.values())


def _member(member: Mapping[str, Any]) -> list[str]:
    answers = {"answers in": "latency_s", "reads in": "first_byte_s"}
    known = {words: member.get(name) for words, name in answers.items()}
    judged = "ejected" if member.get("ejected") else f"breaker {member.get('phase', 'closed')}"
    took = "".join(f", {words} {1e3 * s:.2f} ms" for words, s in known.items() if s is not None)
    first = (
        f"  {member['id']:<12} {member['address']}  {member['state']}, "
        f"{100 * member['share']:.1f} % of keys, {judged}{took}"
    )
    fill = [
        f"    {tier['tier']:<8} {Size(tier['used_bytes'])} of {Size(tier['capacity_bytes'])} used"
        for tier in _merged(member["tiers"])
    ]
    return [first, *fill]


def _tiers(status: Mapping[str, Any]) -> list[str]:
    lines = [f"node {status['incarnation']}: {many(status['blocks'], 'block')}"]
    lines += [_fill(tier) for tier in _merged(status["tiers"])]
    lines += [_admission(rule) for rule in status["admission"]]
    lines += [_domain(domain) for domain in status["domains"]]
    hints, scrub = status["hints"], status["scrub"]
    lines.append(
        f"  hints   {many(hints['sessions'], 'session')} followed, "
        f"{many(hints['prestaging'], 'context')} to bring up, {Size(hints['pinned_bytes'])} pinned"
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


def _fill(tier: Mapping[str, Any]) -> str:
    """Say how full a tier is; of one with no capacity of its own the far side has to be asked."""
    failures = many(tier["failures"], "failure")
    if not tier["capacity_bytes"]:
        return f"  {tier['tier']:<8} shared: `holdfast inspect pool` shows its members; {failures}"
    return (
        f"  {tier['tier']:<8} {Size(tier['used_bytes'])} of {Size(tier['capacity_bytes'])} used, "
        f"{many(tier['records'], 'record')}, {failures}"
    )


def _admission(rule: Mapping[str, Any]) -> str:
    """Say what the rule of a tier goes by, and whether its door is shut."""
    figures = [
        f"{name} {value:,.0f}" if float(value).is_integer() else f"{name} {value:.4g}"
        for name, value in rule.items()
        if name != "tier"
    ]
    return f"  admit   {rule['tier']}: {', '.join(figures)}"


def _domain(domain: Mapping[str, Any]) -> str:
    """Say what a domain holds, and may hold, on each tier."""
    fill = []
    for tier, used_bytes in domain["used_bytes"].items():
        most = domain["quota_bytes"].get(tier)
        of = "" if most is None else f" of its {Size(most)}"
        fill.append(f"{tier} {Size(used_bytes)}{of}")
    reserved = domain["reserved_bytes"]
    rest = f", {Size(reserved)} of host reserved" if reserved else ""
    return f"  domain  {domain['domain']}: {', '.join(fill)}{rest}, share {domain['share']:g}"


def _world(world: Mapping[str, Any]) -> list[str]:
    size = Size(world["payload_bytes"])
    first = (
        f"{world['fingerprint']}  domain {world['domain']}: {many(world['blocks'], 'block')} "
        f"of {world['block_tokens']} tokens, {size}"
    )
    tiers = [
        f"  {name:<8}{many(tier['blocks'], 'block')}, {Size(tier['bytes'])}"
        for name, tier in world["tiers"].items()
    ]
    return [first, *tiers]
