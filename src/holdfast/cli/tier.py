"""`holdfast tier`: replace the drive of a tier of a running node, or detach it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.cli import OK
from holdfast.cli.confirm import add_yes_argument, confirm, copies
from holdfast.cli.options import (
    add_json_argument,
    add_node_arguments,
    connected,
    many,
    node_address,
    show,
)
from holdfast.errors import ConfigError
from holdfast.wire.local.messages import ReplaceMedium

_ABOUT = """\
actions:
  replace NAME   use the drive at the tier's path, or at --path: an empty folder, or one that has
                 blocks of Holdfast, which are found again. The former drive is released
  detach NAME    release the drive, so that it can be unmounted and taken out. The node serves
                 without the tier, until another drive is mounted at its path, or `replace`

The node forgets the blocks on the former drive. If it has any, the command asks on a terminal, and
elsewhere ends with 4 unless --yes is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{_ABOUT}\n\n{parser.epilog}" if parser.epilog else _ABOUT
    parser.add_argument("action", choices=("replace", "detach"), help="what to do")
    name = "a tier with a drive, such as disk; `inspect` lists them"
    parser.add_argument("name", metavar="NAME", help=name)
    parser.add_argument("--path", metavar="FOLDER", default="", help="the new folder")
    add_yes_argument(parser)
    add_node_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Have the node change the drive, after the user has confirmed what is forgotten."""
    if args.path and args.action == "detach":
        raise ConfigError("detach: --path is an option of replace; leave it out")
    path = str(Path(args.path).absolute()) if args.path else ""
    address = node_address(args)
    with connected(address, "tier") as ask:
        if not args.yes:
            found = ask(ReplaceMedium(args.action, args.name, path, "preview"))
            if found["blocks"]:
                kept = many(found["blocks"] - found["lost"], "block")
                loss = f"{copies(found['tiers'])} would be forgotten; {kept} have other copies"
                loss += ", not counting those that only a shared tier knows of"
                confirm([loss], f"{args.action} the drive of {args.name}?")
        answer = ask(ReplaceMedium(args.action, args.name, path))
    show(_text(args.action, path, answer), {"node": address, **answer}, args.json)
    return OK


def _text(action: str, path: str, answer: Mapping[str, Any]) -> str:
    forgotten = f"forgotten: {copies(answer['tiers'])}"
    if action == "detach":
        return f"{answer['tier']}: detached, the drive can be unmounted; {forgotten}"
    text = f"{answer['tier']}: replaced; {forgotten}"
    if path:
        text += f"\nset the tier's path to {path} in the configuration, for the next start"
    return text
