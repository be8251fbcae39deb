"""What `sim` and `size` have in common: the options of a trace, and how it is found and read."""

from __future__ import annotations

import argparse

from holdfast.errors import ConfigError
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.shipped import find_trace
from holdfast.sim.trace import Trace

OPTIONS = ("block_tokens", "window")


def add_trace_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
) -> None:
    """Declare `--block-tokens` and `--window`: what the file of a trace may leave open."""
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="in a block, where the trace leaves it open"
    )
    parser.add_argument(
        "--window", type=float, metavar="S", help="seconds in which a trace's sessions start"
    )


def read_trace(args: argparse.Namespace) -> Trace:
    """Return the trace that `args.trace` names, a file or a shipped one.

    Raises TraceError, and ConfigError for a window that this trace has no use for.
    """
    reading = Reading(block_tokens=args.block_tokens)
    if args.window is not None:
        reading = reading._replace(window_s=args.window)
    trace = load(find_trace(args.trace), reading)
    if args.window is not None and not trace.composed:
        raise ConfigError(
            f"--window: {args.window:g} s: for sessions that were recorded one by one, but the "
            f"requests of {trace.name} have times of their own; leave it out"
        )
    return trace
