"""Options and functions that several verbs share: configuration, node, reports, output."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.address import socket_path
from holdfast.config import Config, default_address, load, machine_address
from holdfast.errors import ConfigError, printable
from holdfast.report import check_target, write_text
from holdfast.status import NodeStatus, read_status
from holdfast.wire.local.messages import PROTOCOL, Hello, ReportReply, Request, Status

CONNECT_S = 5.0
ANSWER_S = 60.0
"""Default timeout of a report."""

Ask: TypeAlias = Callable[[Request], dict[str, Any]]
"""Sends a request that a node answers with a report; returns the report's data."""

_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([km]?)")
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000}


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--config FILE` and `--set KEY=VALUE`."""
    parser.add_argument(
        "--config", metavar="FILE", help="configuration in YAML (default: the built-in values)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of file and environment, such as tiers.0.capacity='8 GiB'",
    )


def load_config(
    args: argparse.Namespace, flags: Mapping[str, str] | None = None, private: str = ""
) -> Config:
    """Return the configuration that the arguments select. Raises ConfigError."""
    settings: dict[str, str] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {text}: is not KEY=VALUE, such as tiers.0.capacity='8 GiB'")
        settings[key] = value
    return load(args.config or "", {**settings, **(flags or {})}, private=private)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--node ADDRESS`, and the configuration that names the node without it."""
    parser.add_argument(
        "--node",
        metavar="ADDRESS",
        help="unix:///path of the node (default: the configuration's; without one your own node, "
        f"or else {machine_address()})",
    )
    add_config_arguments(parser)


def node_address(args: argparse.Namespace) -> str:
    """Return the address of the node from `--node` or the configuration.

    Without these it is the user's own node, or the machine's if the user has none. Raises
    ConfigError.
    """
    if args.node:
        return str(args.node)
    config = load_config(args)
    if not config.node_address:
        raise ConfigError(
            f"listen: the node is at {', '.join(config.addresses)} for other nodes only; add a "
            "unix:///path to its listen, or run `holdfast inspect pool` on a node that uses it"
        )
    own_or_machine = not args.config and config.node_address == default_address()
    if own_or_machine and not _has_socket(default_address()) and _has_socket(machine_address()):
        return machine_address()
    return config.node_address


def _has_socket(address: str) -> bool:
    """Return whether the socket of an address is there, in a folder that this user may search."""
    try:
        return Path(socket_path(address)).exists()
    except PermissionError:
        return False


@contextlib.contextmanager
def connected(address: str, verb: str, timeout_s: float = ANSWER_S) -> Iterator[Ask]:
    """Connect to a node for a `with` block. Raises NodeGoneError or RefusedError."""
    from holdfast.wire.local.client import Client  # not every verb needs it

    hello = Hello(PROTOCOL, f"holdfast {verb}")
    with contextlib.closing(Client(address, hello, CONNECT_S)) as client:

        def ask(request: Request) -> dict[str, Any]:
            return client.call(request, ReportReply, timeout_s).data

        yield ask


def ask_status(ask: Ask) -> NodeStatus:
    """Return the status of the node that `ask` asks. Raises ProtocolError if it cannot be read."""
    return read_status(ask(Status()))


def read_fingerprint(text: str) -> str:
    """Return a fingerprint in lower case; empty for none. Raises ConfigError if it is invalid."""
    fingerprint = text.lower()
    if fingerprint and not re.fullmatch("[0-9a-f]{32}", fingerprint):
        raise ConfigError(
            f"fingerprint {fingerprint!r} is not 32 hex digits; `holdfast inspect` lists them"
        )
    return fingerprint


def count(text: str) -> int:
    """Parse a count such as `32000`, `32,000`, `32k` or `1.5m`; the type of an option.

    `k` and `m` are a thousand and a million.
    """
    found = _COUNT.fullmatch(text.replace(",", "").strip().lower())
    number = Decimal(found[1]) * _THOUSANDS[found[2]] if found else None
    if number is None or number % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; write 32000 or 32k")
    return int(number)


def add_output_argument(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, option: str, help_text: str
) -> None:
    """Declare an option that names a file; parsing raises ConfigError if it cannot be written."""

    def writable(target: str) -> str:
        check_target(option, target)
        return target

    parser.add_argument(option, type=writable, metavar="FILE", help=help_text)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--json FILE`; parsing raises ConfigError if the file cannot be written."""
    add_output_argument(
        parser, "--json", "write JSON to a file in an existing folder; - for standard output"
    )


def show(text: str, data: Mapping[str, object], json_target: str | None) -> None:
    """Print an answer; write its data as JSON to the file of `--json`, or print only it for `-`.

    Raises ConfigError if the file cannot be written.
    """
    if json_target:
        write_text("--json", json_target, f"{json.dumps(data, indent=2)}\n")
    if json_target != "-":
        # A path may contain bytes that are not text, which a terminal's encoding has not.
        print("\n".join(printable(line, None) for line in text.split("\n")))


def many(count: int, what: str) -> str:
    """Return a count and its noun in the right number: 1 block, 2 keys, 2 passes, 2 copies."""
    if count == 1:
        return f"1 {what}"
    if what.endswith("s"):
        return f"{count:,} {what}es"
    if what.endswith("y") and what[-2] not in "aeiou":
        return f"{count:,} {what[:-1]}ies"
    return f"{count:,} {what}s"
