"""The command line: `holdfast VERB`, one file a verb, loaded when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from holdfast import __version__
from holdfast.errors import (
    BusyError,
    ConfigError,
    FormatError,
    HoldfastError,
    NodeGoneError,
    RefusedError,
    TraceError,
)

VERBS = {
    "serve": "run a node: a store behind a socket, for the engines of this machine",
    "demo": "show a real engine getting its context back (needs vLLM)",
    "doctor": "say what was found on this machine, what was chosen, and why",
    "inspect": "look at what a running node stores; drop it",
    "verify": "read and verify everything that is stored; drop what fails",
    "domain": "show domains and their data keys; rotate, retire or erase those of one",
    "pool": "take a member of a pool out of placement, or back in",
    "token": "make a token that lets another node in at this pool's targets",
    "soak": "damage, crash, forge and fuzz a store; count what is ever served wrong",
    "sim": "run a trace through a modelled ladder: hits, times, wear, cost",
    "size": "how much of each tier, and what bandwidth, a model and its users need",
    "bench": "measure this machine, and Holdfast as a share of what it can do",
}

OK = 0
FAILED = 1
USAGE = 2
BUSY = 3
NO_NODE = 4
INTERRUPTED = 130

EXIT_CODES = """\
exit codes: 0 all is well; 1 a check or a step failed; 2 wrong usage, configuration, trace or
data folder; 3 in use by another node; 4 no node answers, or it refuses; 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. Errors of ours become one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in VERBS:
        _parser().parse_args(arguments or ["--help"])  # shows help or the error, and exits
    name = arguments[0]
    try:
        verb = import_module(f"holdfast.cli.{name}")  # takes long enough to be interrupted
        parser = argparse.ArgumentParser(
            prog=f"holdfast {name}", description=VERBS[name], epilog=EXIT_CODES
        )
        verb.add_arguments(parser)
        status: int = verb.run(parser.parse_args(arguments[1:]))
    except HoldfastError as error:
        print(f"holdfast {name}: {error}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has seen enough
        return OK
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"holdfast {name}: {where}{error.strerror or error}", file=sys.stderr)
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<9}{about}" for name, about in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="holdfast",
        usage="holdfast VERB [OPTIONS]",
        description="A shared, tiered memory for the KV caches of LLM inference.",
        epilog=f"verbs:\n{lines}\n\n`holdfast VERB --help` lists its options.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=argparse.SUPPRESS)
    return parser


def _exit_code(error: HoldfastError) -> int:
    if isinstance(error, ConfigError | FormatError | TraceError):
        return USAGE
    if isinstance(error, BusyError):
        return BUSY
    return NO_NODE if isinstance(error, NodeGoneError | RefusedError) else FAILED
