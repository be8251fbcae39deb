"""`holdfast doctor`: what was found on this machine, what was chosen, and why."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.cli import FAILED, OK
from holdfast.cli.machine import Finding, direct_io, examine, nearest, problem
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    load_config,
    many,
    write_json,
)
from holdfast.cli.rehearsal import disk_problem, rehearse
from holdfast.codec.seal import missing
from holdfast.config import (
    Config,
    CxlOptions,
    DiskOptions,
    HostOptions,
    MooncakeOptions,
    PoolOptions,
    Size,
    ValkeyOptions,
    as_data,
)
from holdfast.errors import ConfigError, HoldfastError, MembershipError, NodeGoneError
from holdfast.probe import memory
from holdfast.rig.report import check_target
from holdfast.tiers.cxl.medium import describe
from holdfast.tiers.pool.member_file import MemberFile
from holdfast.wire.address import tcp_endpoint
from holdfast.wire.client import Client
from holdfast.wire.messages import PROTOCOL, Hello, Report, Status

ANSWER_S = 5.0
REACH_S = 1.0
_MARKS = {True: "ok", False: "PROBLEM", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Examine machine, configuration and node; 1 if something needs a person."""
    check_target(args.json)
    findings = list(examine())
    data: dict[str, object] = {}
    try:
        config = load_config(args)
    except ConfigError as error:
        findings.append(problem("configuration", "can not be used", str(error)))
    else:
        data = as_data(config)
        findings += _configuration(args, config)
        findings += rehearse(config)
        findings += _node(config)
    if args.json:
        checks = [msgspec.to_builtins(finding) for finding in findings]
        write_json({"version": __version__, "checks": checks, "config": data}, args.json)
    if args.json != "-":
        print(f"holdfast {__version__}")
        print("\n".join(_line(finding) for finding in findings))
    return FAILED if any(finding.ok is False for finding in findings) else OK


def _line(finding: Finding) -> str:
    why = f" ({finding.why})" if finding.why else ""
    return f"{_MARKS[finding.ok]:<8} {finding.what:<16} {finding.found}{why}"


def _configuration(args: argparse.Namespace, config: Config) -> Iterator[Finding]:
    source = args.config or "defaults of this machine"
    yield Finding("configuration", source, "environment and flags on top", ok=True)
    yield Finding("listen", ", ".join(config.addresses))
    yield Finding("write", config.write, f"lease_s {config.lease_s:g}")
    yield Finding("domains", ", ".join(sorted({"default", *config.domains})))
    yield _sealing(config)
    for number, tier in enumerate(config.tiers):
        match tier:
            case HostOptions():
                yield _host(tier.capacity)
            case CxlOptions():
                yield _cxl(number, tier)
            case DiskOptions():
                yield from _disk(config, number, tier)
            case PoolOptions():
                yield _pool(number, tier)
            case ValkeyOptions():
                yield _store(number, "valkey", tier.addresses)
            case MooncakeOptions():
                yield _store(number, "mooncake", [tier.master])


def _sealing(config: Config) -> Finding:
    """Say which domains' blocks are sealed below the host, and with which key ring."""
    wanted = [name for name, domain in config.domains.items() if domain.seal is not False]
    lack = missing() if wanted else ""
    if lack:
        return problem("sealing", f"not {', '.join(wanted)}", lack)
    if not wanted:
        return Finding("sealing", "no domain", "none has a key of its own that is to seal")
    ring = config.keyring_file or "in memory"
    if config.shares and not config.keyring:
        why = f"data keys derived, as nodes share no keyring; {ring}"
        return Finding("sealing", ", ".join(wanted), why, ok=True)
    return Finding("sealing", ", ".join(wanted), f"key ring {ring}", ok=True)


def _host(capacity: Size) -> Finding:
    limit = memory()
    share = 100 * capacity / limit.nbytes
    found = f"host, {capacity}"
    why = f"{share:.0f} % of {Size(limit.nbytes)}, {limit.source}"
    if share > 90:  # noqa: PLR2004  # an engine and the system need memory too
        return problem("tiers.0", found, f"{why}; leave the engine some: lower tiers.0.capacity")
    return Finding("tiers.0", found, why, ok=True)


def _cxl(number: int, tier: CxlOptions) -> Finding:
    """Look at the node or the device, and take nothing of it."""
    from holdfast.assemble.cxl import cxl_memory

    name, found = f"tiers.{number}", f"cxl, {tier.capacity}"
    try:
        return Finding(name, found, describe(cxl_memory(tier, name, "cxl")), ok=True)
    except ConfigError as error:
        return problem(name, found, str(error))


def _pool(number: int, tier: PoolOptions) -> Finding:
    name, found = f"tiers.{number}", f"pool, members from {tier.members}"
    if "://" in tier.members:
        return Finding(name, found, "`holdfast inspect pool` asks the node who is in")
    try:
        members = MemberFile(tier.members).read()
    except MembershipError as error:
        return problem(name, found, str(error))
    return Finding(name, found, many(len(members), "member"), ok=True)


def _store(number: int, kind: str, addresses: Sequence[str]) -> Finding:
    """Look whether one of the addresses of a store of another make can be reached."""
    name, found, why = f"tiers.{number}", f"{kind} at {', '.join(addresses)}", ""
    for address in addresses:
        try:
            socket.create_connection(tcp_endpoint(address), timeout=REACH_S).close()
            return Finding(name, found, "can be reached", ok=True)
        except OSError as error:
            why = str(error)
    return problem(name, found, f"{why}; start it, or correct the address")


def _disk(config: Config, number: int, tier: DiskOptions) -> Iterator[Finding]:
    name = f"tiers.{number}"
    there = nearest(tier.path)
    stat = os.statvfs(there)
    free, file = stat.f_bavail * stat.f_frsize, Path(tier.path, "blocks.holdfast")
    held = file.stat().st_size if file.exists() else 0
    found = f"disk, {tier.capacity} in {tier.path}"
    if not os.access(there, os.W_OK):
        yield problem(name, found, f"{there} is not writable for user {os.geteuid()}; chown it")
    elif wrong := disk_problem(config, number, tier):
        yield problem(name, found, wrong)
    elif held:
        yield Finding(name, found, f"{Size(held)} laid out, {Size(free)} more free", ok=True)
    elif tier.capacity > free:
        yield problem(name, found, f"{Size(free)} free; lower {name}.capacity")
    else:
        yield Finding(name, found, f"made at the first start; {Size(free)} free", ok=True)
    yield direct_io(f"{name} direct I/O", there)


def _node(config: Config) -> Iterator[Finding]:
    if not config.node_address:
        yield Finding("node", "serves other machines only", "`holdfast inspect pool` asks those")
        return
    try:
        client = Client(config.node_address, Hello(PROTOCOL, "holdfast doctor"), ANSWER_S)
    except NodeGoneError as error:
        yield Finding("node", "none answers", str(error))
        return
    except HoldfastError as error:
        yield problem("node", "refuses", str(error))
        return
    try:
        reply = client.call(Status(), ANSWER_S)
    finally:
        client.close()
    status: dict[str, Any] = reply.data if isinstance(reply, Report) else {}
    yield Finding(
        "node", f"answers at {config.node_address}", many(status.get("blocks", 0), "block"), ok=True
    )
    recovery = status.get("recovery_s")
    words = "still reading the disk" if recovery is None else f"took {recovery:.3f} s"
    yield Finding(
        "recovery", f"{many(status.get('recovered_blocks', 0), 'block')} found again", words
    )
    faults = status.get("faults")
    count = len(faults) if isinstance(faults, list) else 0
    if count:
        yield problem("faults", f"{many(count, 'block')} failed", "`holdfast inspect` lists them")
