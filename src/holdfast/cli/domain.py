"""`holdfast domain`: the domains of a running node and their data keys; rotate, retire, erase."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from holdfast.cli import FAILED, OK
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    many,
    node_address,
    write_json,
)
from holdfast.errors import ConfigError, ProtocolError
from holdfast.rig.report import check_target
from holdfast.wire.client import Client
from holdfast.wire.messages import PROTOCOL, Domains, Hello, Report

CONNECT_S = 5.0
ANSWER_S = 60.0

_ABOUT = """\
actions:
  list           the domains, whether their blocks are sealed, and the epochs of their data keys
  rotate NAME    begin another epoch, which seals from now on; what older ones sealed stays readable
  retire NAME    destroy all data keys but the newest: what they sealed can not be read again;
                 refused if one to be destroyed follows from the domain's key
  erase NAME     destroy all data keys: nothing that was sealed with them can be read again, on any
                 medium; where one follows from the domain's key it says so, and ends with 1,
                 or is refused, with 4, if no keyring file would remember the erasure"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{_ABOUT}\n\n{parser.epilog}" if parser.epilog else _ABOUT
    actions = ("list", "rotate", "retire", "erase")
    parser.add_argument("action", nargs="?", default="list", choices=actions)
    parser.add_argument("name", nargs="?", default="", help="a domain, as `list` shows it")
    parser.add_argument("--node", metavar="ADDRESS", help="unix:///path of the node")
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the node and show its answer; 1 if an erased domain's keys may still be elsewhere."""
    check_target(args.json)
    if (args.action == "list") == bool(args.name):
        words = "shows all domains; name none" if args.name else "name one domain"
        raise ConfigError(f"{args.action}: {words}")
    address = node_address(args)
    client = Client(address, Hello(PROTOCOL, "holdfast domain"), CONNECT_S)
    try:
        reply = client.call(Domains(args.action, args.name), ANSWER_S)
    finally:
        client.close()
    if not isinstance(reply, Report):
        raise ProtocolError(f"the node answered {type(reply).__name__}, not Report")
    if args.json:
        write_json({"node": address, **reply.data}, args.json)
    if args.json != "-":
        print(_text(args.action, reply.data))
    return OK if reply.data.get("everywhere", True) else FAILED


def _text(action: str, answer: Mapping[str, Any]) -> str:
    name = answer.get("domain", "")
    match action:
        case "rotate":
            return f"{name}: epoch {answer['epoch']} seals from now on"
        case "retire":
            if not answer["retired"]:
                return f"{name}: nothing destroyed, there is no data key but the newest"
            return f"{name}: {many(answer['retired'], 'data key')} destroyed, the newest is left"
        case "erase":
            keys = many(answer["epochs"], "data key")
            blocks = f"{many(answer['blocks'], 'block')} gone"
            if answer["everywhere"]:
                return f"{name}: {keys} destroyed, {blocks}"
            return (
                f"{name}: {keys} dropped, {blocks} on this node. Data keys of it follow from its "
                "key: destroy that key too, on every node, to make all copies unreadable"
            )
        case _:
            rows = [line for entry in answer["domains"] for line in _entry(entry)]
            return "\n".join([f"key ring: {answer['keyring'] or 'in memory'}", *rows])


def _entry(entry: Mapping[str, Any]) -> list[str]:
    marks = ["sealed below the host" if entry["sealed"] else "not sealed"]
    marks += ["data keys derived"] if entry["derived"] else []
    marks += [f"erased {many(entry['erasures'], 'time')}"] if entry["erasures"] else []
    marks += [] if entry["configured"] else ["not configured here"]
    first = f"{entry['domain']:<16} {entry['id']}  {', '.join(marks)}"
    return [first, *(f"  epoch {each['epoch']}, from {each['made']}" for each in entry["epochs"])]
