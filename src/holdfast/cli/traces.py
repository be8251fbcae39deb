"""Options and reading of a trace, for `sim` and `size`."""

from __future__ import annotations

import argparse

from holdfast.cli.options import count
from holdfast.errors import ConfigError
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.shipped import find_trace
from holdfast.sim.trace import Trace

OPTIONS = ("block_tokens", "window")


def add_trace_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare `--block-tokens` and `--window`, which some trace formats do not contain."""
    parser.add_argument(
        "--block-tokens",
        type=count,
        metavar="N",
        help="tokens in a block, if the trace has no block size",
    )
    parser.add_argument(
        "--window",
        type=float,
        metavar="S",
        help="period in which the trace's sessions start, in seconds",
    )


def read_trace(args: argparse.Namespace) -> Trace:
    """Return the trace that `args.trace` names, a file or a shipped one.

    Raises TraceError, and ConfigError for a window if the trace's requests have times.
    """
    reading = Reading(block_tokens=args.block_tokens)
    if args.window is not None:
        reading = reading._replace(window_s=args.window)
    trace = load(find_trace(args.trace), reading)
    if args.window is not None and not trace.composed:
        raise ConfigError(
            f"--window: {args.window:g} s: for sessions without start times, but the requests of "
            f"{trace.name} have times of their own; omit it"
        )
    return trace
