"""`holdfast verify`: read and verify everything that is stored; drop what fails, and say so."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.assemble import open_store
from holdfast.cli import FAILED, OK
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    load_config,
    many,
    node_address,
    read_fingerprint,
    write_json,
)
from holdfast.config import Config, DiskOptions, Size
from holdfast.errors import ConfigError, ProtocolError
from holdfast.limits import MIB
from holdfast.rig.report import check_target
from holdfast.store.scrub import Wish
from holdfast.tiers.disk.file import FILE_NAME
from holdfast.wire.client import Client
from holdfast.wire.messages import PROTOCOL, Hello, Report, Status, Verify

CONNECT_S = 5.0
ANSWER_S = 120.0
SLICE_S = 1.0
"""What is asked for at once: others are answered in between."""

Look: TypeAlias = Callable[[Wish], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "fingerprint", nargs="?", default="", help="only this one, as `holdfast inspect` lists it"
    )
    parser.add_argument("--node", metavar="ADDRESS", help="unix:///path of the node")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="no node runs: open the tiers of the configuration, verify them and close them",
    )
    parser.add_argument(
        "--rate", metavar="RATE", help="bytes a second to read at most, such as '200 MB/s'"
    )
    add_config_arguments(parser)
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Verify slice by slice; 1 if a copy failed."""
    check_target(args.json)
    wish = Wish(read_fingerprint(args.fingerprint), 0, SLICE_S, _rate(args.rate))
    if args.offline and args.node:
        raise ConfigError("--offline and --node: one or the other; drop one")
    opened = _offline(load_config(args)) if args.offline else _online(args)
    begun = time.monotonic()
    with opened as look:
        answer = _all(look, wish)
    answer["seconds"] = time.monotonic() - begun
    if args.json:
        write_json(answer, args.json)
    if args.json != "-":
        print(_text(answer))
    return FAILED if answer["bad"] else OK


def _rate(text: str | None) -> int:
    if text is None:
        return 0
    try:
        rate = Size.of(text.removesuffix("/s"))
    except ValueError as error:
        raise ConfigError(f"--rate {text}: {error}") from error
    if not rate:
        raise ConfigError("--rate 0: nothing would ever be read; raise it, or leave it out")
    return int(rate)


@contextlib.contextmanager
def _online(args: argparse.Namespace) -> Iterator[Look]:
    """Lend a way to ask a running node."""
    address = node_address(args)
    client = Client(address, Hello(PROTOCOL, "holdfast verify"), CONNECT_S)

    def ask(request: Verify | Status) -> dict[str, Any]:
        reply = client.call(request, ANSWER_S)
        if not isinstance(reply, Report):
            raise ProtocolError(f"the node answered {type(reply).__name__}, not Report")
        return reply.data

    def look(wish: Wish) -> dict[str, Any]:
        return ask(Verify(wish.fingerprint, wish.start, wish.seconds, wish.rate))

    try:
        while ask(Status())["recovery_s"] is None:
            time.sleep(SLICE_S / 10)
        yield look
    finally:
        client.close()


@contextlib.contextmanager
def _offline(config: Config) -> Iterator[Look]:
    """Lend a store over the configuration's tiers, which no node may have open."""
    for number, tier in enumerate(config.tiers):
        if isinstance(tier, DiskOptions) and not Path(tier.path, FILE_NAME).exists():
            raise ConfigError(
                f'tiers.{number}.path: "{tier.path}" has no {FILE_NAME}, so no node has stored '
                "there; name the folder of one"
            )
    with open_store(config) as store:
        store.recovery.wait()
        yield store.verify


def _all(look: Look, wish: Wish) -> dict[str, Any]:
    """Verify until nothing follows; return the sum of it."""
    checked, nbytes, bad = 0, 0, list[dict[str, str]]()
    while wish.start >= 0:
        found = look(wish)
        checked, nbytes = checked + found["checked"], nbytes + found["bytes"]
        bad += found["bad"]
        wish = wish._replace(start=found["next"])
        time.sleep(found["owes_s"] if wish.start >= 0 else 0.0)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{checked:,} copies, {nbytes / MIB:,.0f} MiB, {len(bad)} bad")
            sys.stderr.flush()
    sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
    return {"checked": checked, "bytes": nbytes, "bad": bad, "dropped": len(bad)}


def _text(answer: dict[str, Any]) -> str:
    bad = [f"  {fault['tier']}: {fault['outcome']}" for fault in answer["bad"]]
    words = f"{len(bad)} failed and were dropped:" if bad else "all are intact"
    size, seconds = Size(answer["bytes"]), answer["seconds"]
    checked = (
        f"verified {many(answer['checked'], 'stored copy')}, {size} in {seconds:.1f} s; {words}"
    )
    return "\n".join([checked, *bad])
