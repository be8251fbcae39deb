"""`holdfast doctor`: check this machine, the configuration and the node."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.assemble import configured_tier
from holdfast.cli import FAILED, OK
from holdfast.cli.machine import examine
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    load_config,
    many,
    write_json,
)
from holdfast.cli.rehearsal import rehearse
from holdfast.codec.seal import missing
from holdfast.config import Config, HostOptions, Size, as_data
from holdfast.errors import ConfigError, HoldfastError, NodeGoneError
from holdfast.finding import Finding, problem
from holdfast.probe import memory
from holdfast.report import check_target
from holdfast.version import __version__
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Hello, ReportRequest, Status

ANSWER_S = 5.0
"""Timeout of the node's answers."""


_MARKS = {True: "ok", False: "PROBLEM", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them is a problem."""
    check_target(args.json)
    findings = list(examine())
    data: dict[str, object] = {}
    try:
        config = load_config(args)
    except ConfigError as error:
        findings.append(problem("configuration", "invalid", str(error)))
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
    yield Finding("configuration", source, "with the environment and flags", ok=True)
    yield Finding("listen", ", ".join(config.addresses))
    yield Finding("write", config.write, f"lease_s {config.lease_s:g}")
    yield Finding("domains", ", ".join(sorted({"default", *config.domains})))
    yield _sealing(config)
    for number, tier in enumerate(config.tiers):
        if isinstance(tier, HostOptions):
            yield _host(tier.capacity)
        else:
            kind, options, context = configured_tier(config, number)
            yield from kind.examine(options, context)


def _sealing(config: Config) -> Finding:
    """Return which domains' blocks are sealed below the host, and their key ring."""
    wanted = [name for name, domain in config.domains.items() if domain.seal is not False]
    lack = missing() if wanted else ""
    if lack:
        return problem("sealing", f"not {', '.join(wanted)}", lack)
    if not wanted:
        return Finding("sealing", "no domain", "no domain has a key of its own and `seal`")
    ring = config.keyring_file or "in memory"
    if config.shares and not config.keyring:
        why = f"data keys are derived, because nodes share no keyring; {ring}"
        return Finding("sealing", ", ".join(wanted), why, ok=True)
    return Finding("sealing", ", ".join(wanted), f"key ring {ring}", ok=True)


def _host(capacity: Size) -> Finding:
    limit = memory()
    share = 100 * capacity / limit.nbytes
    found = f"host, {capacity}"
    why = f"{share:.0f} % of {Size(limit.nbytes)}, {limit.source}"
    if share > 90:  # noqa: PLR2004  # an engine and the system need memory too
        return problem("tiers.0", found, f"{why}; the engine needs some: lower tiers.0.capacity")
    return Finding("tiers.0", found, why, ok=True)


def _node(config: Config) -> Iterator[Finding]:
    if not config.node_address:
        yield Finding("node", "serves other nodes only", "see `holdfast inspect pool` on those")
        return
    try:
        client = Client(config.node_address, Hello(PROTOCOL, "holdfast doctor"), ANSWER_S)
    except NodeGoneError as error:
        yield Finding("node", "no answer", str(error))
        return
    except HoldfastError as error:
        yield problem("node", "refuses", str(error))
        return
    try:
        reply = client.call(Status(), ANSWER_S)
    finally:
        client.close()
    status: dict[str, Any] = reply.data if isinstance(reply, ReportRequest) else {}
    yield Finding(
        "node", f"answers at {config.node_address}", many(status.get("blocks", 0), "block"), ok=True
    )
    recovery = status.get("recovery_s")
    words = "still reading the disk" if recovery is None else f"took {recovery:.3f} s"
    yield Finding("recovery", f"{many(status.get('recovered_blocks', 0), 'block')} found", words)
    faults = status.get("faults")
    count = len(faults) if isinstance(faults, list) else 0
    if count:
        yield problem("faults", f"{many(count, 'block')} failed", "`holdfast inspect` lists them")
