"""What several verbs have in common: the options that name a configuration, and JSON output."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config import Config, load
from holdfast.errors import ConfigError
from holdfast.rig.report import check_target


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--config FILE` and `--set KEY=VALUE`."""
    parser.add_argument("--config", metavar="FILE", help="YAML; without it, defaults apply")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key over file and environment, such as tiers.0.capacity='8 GiB'",
    )


def load_config(
    args: argparse.Namespace, flags: Mapping[str, str] | None = None, private: str = ""
) -> Config:
    """Read the configuration that the arguments name. Raises ConfigError."""
    settings: dict[str, str] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {text}: not KEY=VALUE, such as tiers.0.capacity='8 GiB'")
        settings[key] = value
    return load(args.config or "", {**settings, **(flags or {})}, private=private)


def node_address(args: argparse.Namespace) -> str:
    """Return the node that `--node` or the configuration names. Raises ConfigError."""
    if args.node:
        return str(args.node)
    config = load_config(args)
    if not config.node_address:
        raise ConfigError(
            f"listen: the node is at {', '.join(config.addresses)} for other nodes only; add a "
            "unix:///path to its listen, or ask a host with `holdfast inspect pool`"
        )
    return config.node_address


def read_fingerprint(text: str) -> str:
    """Return a fingerprint as it was listed, empty for none. Raises ConfigError."""
    fingerprint = text.lower()
    if fingerprint and not re.fullmatch("[0-9a-f]{32}", fingerprint):
        raise ConfigError(
            f"fingerprint {fingerprint!r} is not 32 hex digits; `holdfast inspect` lists them"
        )
    return fingerprint


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--json FILE`; what takes it checks with `check_target` before it begins."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write JSON to a file in a folder that is there; - for standard output",
    )


def write_json(data: Any, target: str) -> None:  # noqa: ANN401  # whatever JSON can hold
    """Write plain data to a file, or to standard output for `-`. Raises ConfigError."""
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    check_target(target)
    Path(target).write_text(text, encoding="utf-8")


def many(count: int, what: str) -> str:
    """Return how many there are of something: 1 block, 2 keys, 2 passes, 2 copies."""
    if count == 1:
        return f"1 {what}"
    if what.endswith("s"):
        return f"{count} {what}es"
    copies = what.endswith("y") and what[-2] not in "aeiou"  # and keys
    return f"{count} {what[:-1]}ies" if copies else f"{count} {what}s"
