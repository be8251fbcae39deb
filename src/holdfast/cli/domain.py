"""`holdfast domain`: the domains of a running node and their data keys; rotate, retire, erase."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from holdfast.cli import FAILED, OK
from holdfast.cli.confirm import add_yes_argument, confirm, copies, not_counted
from holdfast.cli.options import (
    Ask,
    add_json_argument,
    add_node_arguments,
    connected,
    many,
    node_address,
    show,
)
from holdfast.errors import ConfigError
from holdfast.wire.local.messages import Domains

_ABOUT = """\
actions:
  list           list the domains, whether their blocks are sealed, and the epochs of their data
                 keys
  rotate NAME    begin a new epoch: new blocks are sealed with a new data key; blocks of earlier
                 epochs stay readable
  retire NAME    destroy all data keys except the newest; blocks sealed with them become unreadable.
                 If there are or may be such blocks, the command asks on a terminal, and elsewhere
                 ends with 4 unless --yes is given. It also ends with 4 if one of the keys is
                 derived from the domain's key
  erase NAME     destroy all data keys; all blocks sealed with them become unreadable, on all media.
                 The command always asks, or needs --yes. If a data key is derived from the domain's
                 key, the command reports it and ends with 1; or with 4 if there is no keyring file
                 that would record the erasure"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{_ABOUT}\n\n{parser.epilog}" if parser.epilog else _ABOUT
    actions = ("list", "rotate", "retire", "erase")
    parser.add_argument("action", nargs="?", default="list", choices=actions, help="default list")
    name = "a domain, as listed by `list`"
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help=name)
    add_yes_argument(parser)
    add_node_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the node's answer; return 1 if keys of an erased domain may exist elsewhere."""
    if (args.action == "list") == bool(args.name):
        words = "shows all domains; name none" if args.name else "name one domain"
        raise ConfigError(f"{args.action}: {words}")
    address = node_address(args)
    with connected(address, "domain") as ask:
        answer = ask(_request(ask, args))
    show(_text(args.action, answer), {"node": address, **answer}, args.json)
    return OK if answer.get("everywhere", True) else FAILED


def _request(ask: Ask, args: argparse.Namespace) -> Domains:
    """Return the request to send, after the user has confirmed what it destroys."""
    if args.action not in ("retire", "erase"):
        return Domains(args.action, args.name)
    if args.yes:
        return Domains(args.action, args.name, "confirmed")
    found = ask(Domains(args.action, args.name, "preview"))
    unknown = not_counted(found)
    if args.action == "erase":
        keys = many(found["epochs"], "data key")
        blocks = f"{many(found['blocks'], 'block')} become unreadable: {copies(found['tiers'])}"
        first = f"{found['domain']}: {keys} would be destroyed, and {blocks}"
        confirm([first, *unknown], f"erase {args.name}?")
    elif found["retired"] and (found["blocks"] or unknown):
        keys = many(found["retired"], "data key")
        first = f"{found['domain']}: {keys} would be destroyed; copies of {copies(found['tiers'])}"
        in_memory = found["blocks"] - found["lost"]
        kept = f"; {many(in_memory, 'block')} of them have other copies" if in_memory else ""
        first = f"{first} are sealed with them and become unreadable{kept}"
        confirm([first, *unknown], f"retire the old data keys of {args.name}?")
    else:  # no block needs the keys; the node checks again, and refuses if one does now
        return Domains(args.action, args.name)
    return Domains(args.action, args.name, "confirmed")


def _text(action: str, answer: Mapping[str, Any]) -> str:
    name = answer.get("domain", "")
    match action:
        case "rotate":
            return f"{name}: epoch {answer['epoch']} seals from now on"
        case "retire":
            if not answer["retired"]:
                return f"{name}: nothing destroyed, the newest data key is the only one"
            keys = f"{name}: {many(answer['retired'], 'data key')} destroyed, the newest remains"
            if not answer["blocks"]:
                return keys
            kept = answer["blocks"] - answer["lost"]
            rest = f"; {many(kept, 'block')} of them have other copies" if kept else ""
            return f"{keys}; unreadable and dropped: {copies(answer['tiers'])}{rest}"
        case "erase":
            keys = many(answer["epochs"], "data key")
            where = f": {copies(answer['tiers'])}" if answer["blocks"] else ""
            blocks = f"{many(answer['blocks'], 'block')} gone{where}"
            if answer["everywhere"]:
                return f"{name}: {keys} destroyed, {blocks}"
            return (
                f"{name}: {keys} dropped; on this node {blocks}. Data keys follow from its "
                "key: destroy that key too, on every node, to make all copies unreadable"
            )
    is_sealed = any(entry["sealed"] for entry in answer["domains"])
    no_file = "in memory" if is_sealed else "none, because no domain is sealed"
    lines = [f"key ring: {answer['keyring'] or no_file}"]
    for entry in answer["domains"]:
        marks = ["sealed below the host" if entry["sealed"] else "not sealed"]
        marks += ["data keys derived"] if entry["derived"] else []
        marks += [f"erased {many(entry['erasures'], 'time')}"] if entry["erasures"] else []
        marks += [] if entry["configured"] else ["not configured here"]
        lines.append(f"{entry['domain']:<16} {entry['id']}  {', '.join(marks)}")
        lines += [f"  epoch {each['epoch']}, from {each['made']}" for each in entry["epochs"]]
    return "\n".join(lines)
