"""`holdfast serve`: run a node until a signal stops it."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gc
import logging
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast import config as configuration
from holdfast.assemble.keys import was_handed_over
from holdfast.cli.options import add_config_arguments, load_config
from holdfast.errors import ConfigError
from holdfast.node.daemon import NO_PARENT, notify, serve
from holdfast.scratch import NODE, scratch_folder

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""A line of the log as text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="unix:///path or tcp://host:port; overrides the file"
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="serve from a temporary folder that is removed at the end (for an engine's own node)",
    )
    parser.add_argument(
        "--with-parent",
        type=int,
        default=NO_PARENT,
        metavar="FD",
        help="end when the other end of the pipe on descriptor FD closes",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning"),
        help="lowest level of the log on standard error (default info)",
    )
    parser.add_argument(
        "--log-format",
        default="text",
        choices=("text", "json"),
        help="lines of text, or a JSON object a line (default text)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve; print `READY` and the addresses once peers can connect."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if args.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler])
    logging.raiseExceptions = False  # a line that cannot be written, as to a full disk, is lost
    if args.with_parent != NO_PARENT:  # before any file is opened, which could get its number
        fd, found = args.with_parent, ""
        if not was_handed_over(fd):
            found = "is not open"
        elif stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
            found = "is a file or a folder, not a pipe"
        if found:
            raise ConfigError(
                f"--with-parent: descriptor {fd} {found}; start the node with the reading end of a "
                "pipe on it, or omit the option"
            )
    configuration.arm_failpoint()
    notify_address = configuration.notify_address()
    flags = {"listen": args.listen} if args.listen else {}
    with contextlib.ExitStack() as stack:
        private = ""
        if args.private:
            parent = Path(configuration.PRIVATE_PARENT)
            private = str(stack.enter_context(scratch_folder(parent, NODE)))

        def ready(addresses: Sequence[str]) -> None:
            stack.enter_context(gc_frozen())
            print("READY", *addresses, flush=True)
            notify(notify_address, "READY=1")

        serve(load_config(args, flags, private), ready, parent_fd=args.with_parent)
        notify(notify_address, "STOPPING=1")
    return 0


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all present objects from garbage collections, until the end of the `with` block.

    A full collection over all imported modules took 12 ms, in which every request waited; it set
    the 99th percentile of fetches of 40 ms. For Holdfast's own processes, never for an engine's.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
