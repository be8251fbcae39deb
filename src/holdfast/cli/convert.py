"""`holdfast convert`: write a trace, or the log of a gateway or server, as a trace without text."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.options import add_output_argument, many
from holdfast.cli.traces import add_formats, add_trace_arguments, read_trace
from holdfast.report import write_text
from holdfast.sim.evidence import paced, trace_notes
from holdfast.sim.formats.written import mooncake_lines
from holdfast.sim.reuse import reuse
from holdfast.sim.trace import share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the log, the file to write, and the options of the log."""
    parser.add_argument("trace", metavar="LOG", help="a log or a trace, in a format listed below")
    add_output_argument(parser, "--out", "file to write (default: standard output)")
    add_trace_arguments(parser)
    parser.set_defaults(drop_longer=None)  # no model, no limit
    add_formats(parser)


def run(args: argparse.Namespace) -> int:
    """Write the trace, and say on standard error what is in it."""
    trace = read_trace(args, None)
    if args.rate is not None:
        trace = paced(trace, args.rate)
    write_text("--out", args.out or "-", "".join(mooncake_lines(trace)))
    runs = reuse(trace)
    reused = share(float(runs.blocks.sum()), trace.blocks)
    times = "without times" if trace.untimed else f"in {trace.span_s:,.0f} s"
    print(
        f"{trace.name}: {many(trace.requests, 'request')} {times}, "
        f"{trace.input_tokens.sum():,} tokens in, {trace.output_tokens.sum():,} out; "
        + (
            f"{reused:.1%} of its blocks of {trace.block_tokens} tokens were used before"
            if trace.content
            else "lengths only: no text or tokens of prompts, so reuse is unknown"
        ),
        file=sys.stderr,
    )
    for note in trace_notes(trace):
        print(f"- {note}", file=sys.stderr)
    return 0
