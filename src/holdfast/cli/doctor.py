"""`holdfast doctor`: check this machine, the configuration and the node."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from holdfast.assemble import configured_tier
from holdfast.cli import FAILED, OK
from holdfast.cli.machine import examine
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    connected,
    load_config,
    many,
    request_report,
    show,
)
from holdfast.cli.rehearsal import rehearse
from holdfast.codec.seal import missing
from holdfast.config import Config, HostOptions, Size, as_data
from holdfast.errors import ConfigError, HoldfastError, NodeGoneError
from holdfast.finding import Finding, problem
from holdfast.probe import memory
from holdfast.version import __version__
from holdfast.wire.local.messages import Status

ANSWER_S = 5.0
"""Timeout of the node's answers."""

_MARKS = {True: "ok", False: "PROBLEM", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them is a problem."""
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
    lines = [f"holdfast {__version__}"]
    for finding in findings:
        why = f" ({finding.why})" if finding.why else ""
        lines.append(f"{_MARKS[finding.ok]:<8} {finding.what:<16} {finding.found}{why}")
    checks = msgspec.to_builtins(findings)
    show("\n".join(lines), {"version": __version__, "checks": checks, "config": data}, args.json)
    return FAILED if any(finding.ok is False for finding in findings) else OK


def _configuration(args: argparse.Namespace, config: Config) -> Iterator[Finding]:
    source = args.config or "defaults of this machine"
    yield Finding("configuration", source, "with the environment and flags", ok=True)
    yield Finding("listen", ", ".join(config.addresses))
    yield Finding("write", config.write, f"lease_s {config.lease_s:g}")
    yield Finding("domains", ", ".join(sorted({"default", *config.domains})))
    wanted = [name for name, domain in config.domains.items() if domain.seal is not False]
    if not wanted:
        yield Finding("sealing", "no domain", "no domain has a key of its own and `seal`")
    elif lack := missing():
        yield problem("sealing", f"not {', '.join(wanted)}", lack)
    else:
        derives = config.shares and not config.keyring
        why = "data keys are derived, because nodes share no keyring;" if derives else "key ring"
        why = f"{why} {config.keyring_file or 'in memory'}"
        yield Finding("sealing", ", ".join(wanted), why, ok=True)
    for number, tier in enumerate(config.tiers):
        if not isinstance(tier, HostOptions):
            kind, options, context = configured_tier(config, number)
            yield from kind.examine(options, context)
            continue
        limit = memory()
        share = 100 * tier.capacity / limit.nbytes
        found = f"host, {tier.capacity}"
        why = f"{share:.0f} % of {Size(limit.nbytes)}, {limit.source}"
        if share > 90:  # noqa: PLR2004  # an engine and the system need memory too
            advice = f"{why}; the engine needs some: lower tiers.0.capacity"
            yield problem("tiers.0", found, advice)
        else:
            yield Finding("tiers.0", found, why, ok=True)


def _node(config: Config) -> Iterator[Finding]:
    if not config.node_address:
        yield Finding("node", "serves other nodes only", "see `holdfast inspect pool` on those")
        return
    try:
        with connected(config.node_address, "doctor") as client:
            status = request_report(client, Status(), ANSWER_S)
    except NodeGoneError as error:
        yield Finding("node", "no answer", str(error))
        return
    except HoldfastError as error:
        yield problem("node", "refuses", str(error))
        return
    blocks, faults, recovery_s = status["blocks"], status["faults"], status["recovery_s"]
    yield Finding("node", f"answers at {config.node_address}", many(blocks, "block"), ok=True)
    words = "still reading the disk" if recovery_s is None else f"took {recovery_s:.3f} s"
    yield Finding("recovery", f"{many(status['recovered_blocks'], 'block')} found", words)
    if faults:
        failed = f"{many(len(faults), 'block')} failed"
        yield problem("faults", failed, "`holdfast inspect` lists them")
