"""`holdfast verify`: read and verify all stored blocks; report bad ones, drop corrupt ones."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.assemble import open_store
from holdfast.cli import FAILED, OK
from holdfast.cli.options import (
    add_json_argument,
    add_node_arguments,
    ask_status,
    connected,
    load_config,
    many,
    node_address,
    read_fingerprint,
    show,
)
from holdfast.cli.progress import work_progress
from holdfast.config import Config, DiskOptions, Size
from holdfast.errors import ConfigError, Outcome
from holdfast.store.scrub import ScrubRequest
from holdfast.tiers.disk.kind import FILE_NAME
from holdfast.wire.local.messages import Verify

ANSWER_S = 120.0
SLICE_S = 1.0
"""Duration of one verify request, so that the node answers other requests in between."""

Verifier: TypeAlias = Callable[[ScrubRequest], dict[str, Any]]
"""Verifies one slice of the stored blocks, in this process or in a node."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "fingerprint",
        nargs="?",
        default="",
        metavar="FINGERPRINT",
        help="verify only this one, as listed by `holdfast inspect`",
    )
    add_node_arguments(parser)
    parser.add_argument(
        "--offline",
        action="store_true",
        help="open and verify the tiers of the configuration; no node may be running",
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=0,
        metavar="RATE",
        help="maximum read rate, such as '200 MB/s' (default: no limit)",
    )
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Verify slice by slice; return 1 if a copy failed."""
    request = ScrubRequest(read_fingerprint(args.fingerprint), 0, SLICE_S, args.rate)
    if args.offline and args.node:
        raise ConfigError("--offline and --node exclude each other; omit one")
    opened = _offline(load_config(args)) if args.offline else _online(args)
    begun = time.monotonic()
    with opened as verify:
        checked, nbytes, bad = 0, 0, list[dict[str, str]]()
        with work_progress("copies") as show_progress:
            while request.start >= 0:
                found = verify(request)
                checked, nbytes = checked + found["checked"], nbytes + found["bytes"]
                bad += found["bad"]
                request = request._replace(start=found["next"])
                time.sleep(found["owes_s"] if request.start >= 0 else 0.0)
                show_progress(checked, 0, f"{Size(nbytes)}, {len(bad)} bad")
    seconds = time.monotonic() - begun
    dropped = sum(fault["outcome"] == Outcome.CORRUPT for fault in bad)
    words = f"{len(bad)} failed, {dropped} corrupt ones were dropped:" if bad else "all are intact"
    lines = [
        f"verified {many(checked, 'stored copy')}, {Size(nbytes)} in {seconds:.1f} s; {words}",
        *(f"  {fault['tier']}: {fault['outcome']}" for fault in bad),
    ]
    answer = {
        "checked": checked,
        "bytes": nbytes,
        "bad": bad,
        "dropped": dropped,
        "seconds": seconds,
    }
    show("\n".join(lines), answer, args.json)
    return FAILED if bad else OK


def _rate(text: str) -> int:
    try:
        rate = Size.of(text.removesuffix("/s"))
    except ValueError as error:
        raise ConfigError(f"--rate {text}: {error}") from error
    if not rate:
        raise ConfigError("--rate 0: nothing would be read; raise it, or omit it")
    return int(rate)


@contextlib.contextmanager
def _online(args: argparse.Namespace) -> Iterator[Verifier]:
    """Connect to a running node; yield a function that requests slices."""
    with connected(node_address(args), "verify", ANSWER_S) as ask:
        while ask_status(ask).recovery_s is None:
            time.sleep(SLICE_S / 10)
        yield lambda it: ask(Verify(it.fingerprint, it.start, it.seconds, it.rate))


@contextlib.contextmanager
def _offline(config: Config) -> Iterator[Verifier]:
    """Open a store over the configuration's tiers, which no node may have open."""
    for number, tier in enumerate(config.tiers):
        if isinstance(tier, DiskOptions) and not Path(tier.path, FILE_NAME).exists():
            raise ConfigError(
                f'tiers.{number}.path: "{tier.path}" has no {FILE_NAME}: no node has stored '
                "blocks there; name the folder of a disk tier"
            )
    with open_store(config) as store:
        store.recovery.wait()
        yield store.verify
