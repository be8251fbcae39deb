"""Options and reading of a trace, for `sim` and `size`."""

from __future__ import annotations

import argparse

from holdfast.cli.options import count
from holdfast.errors import ConfigError
from holdfast.sim.evidence import without_longer
from holdfast.sim.formats.arrivals import UNITS_S
from holdfast.sim.formats.load import formats_text, load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.shipped import find_trace
from holdfast.sim.trace import Trace

OPTIONS = ("rate", "block_tokens", "window", "time_unit", "drop_longer")
"""The options of a trace, as names of arguments; None if not given."""


def add_trace_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options for what a trace does not contain, or what a model cannot take."""
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests a second (default: the trace's own); needed if a trace has no times",
    )
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
    parser.add_argument(
        "--time-unit",
        choices=tuple(UNITS_S),
        help="unit of the trace's times, if it is not that of the format",
    )


def add_drop_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare `--drop-longer`."""
    parser.add_argument(
        "--drop-longer",
        action="store_true",
        default=None,
        help="leave out requests that are longer than the model's maximum context",
    )


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Add the list of formats to the help of a command; each is known by the fields beside it."""
    parser.add_argument_group("formats of traces, and their fields or lines", formats_text())


def read_trace(args: argparse.Namespace, model: ModelShape | None) -> Trace:
    """Return the trace that `args.trace` names, a file or a shipped one, as the options say.

    `--rate` is left to the caller. Raises TraceError; and ConfigError for a window if the trace's
    requests have times, or for `--drop-longer` without a model.
    """
    reading = Reading(block_tokens=args.block_tokens, time_unit=args.time_unit)
    if args.window is not None:
        reading = reading._replace(window_s=args.window)
    trace = load(find_trace(args.trace), reading)
    if args.window is not None and not trace.composed:
        raise ConfigError(
            f"--window: {args.window:g} s: for sessions without start times, but the requests of "
            f"{trace.name} have times of their own; omit it"
        )
    if args.drop_longer and model is None:
        raise ConfigError("--drop-longer: needs a model, whose maximum context it applies")
    return without_longer(trace, model) if args.drop_longer and model else trace
