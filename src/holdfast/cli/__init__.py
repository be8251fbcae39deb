"""The command line, `holdfast VERB`: one module per verb, imported when the verb is run."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from holdfast.errors import (
    BusyError,
    ConfigError,
    FormatError,
    HoldfastError,
    NodeGoneError,
    RefusedError,
    TraceError,
)
from holdfast.version import __version__

ENTRY_POINTS = "holdfast.verbs"
"""Group of the entry points of other packages; each entry point is a dict of `Verb` by name."""


class Verb(NamedTuple):
    """A command: the module with its `add_arguments` and `run`, and its help line."""

    module: str
    about: str
    example: str
    """Options of a typical call, shown by `--help`."""
    starts_processes: bool = False
    """Whether it starts processes and fills folders, so that SIGTERM must end it as Ctrl-C does."""


VERBS = {
    name: Verb(f"holdfast.cli.{name}", about, example)
    for name, about, example in (
        (
            "serve",
            "run a node: a store behind a socket, for the engines of this machine",
            "--config /etc/holdfast/node.yaml",
        ),
        ("doctor", "show what was found on this machine, what was chosen, and why", "--json -"),
        (
            "stats",
            "show what a running node has saved since its start",
            "--node unix:///run/holdfast/node.sock",
        ),
        (
            "top",
            "watch a running node: tiers, rates, queues, pool members",
            "--node unix:///run/holdfast/node.sock",
        ),
        ("inspect", "list what a running node stores and plans; drop stored blocks", "plans"),
        ("verify", "read and verify all stored blocks; drop those that fail", "--offline"),
        (
            "domain",
            "list domains and their data keys; rotate, retire or erase data keys",
            "rotate default",
        ),
        (
            "tier",
            "replace the drive of a tier while the node runs, or detach it",
            "replace disk --path /mnt/new/holdfast",
        ),
        ("pool", "take a member of a pool out of placement, or back in", "drain flash-2"),
        (
            "token",
            "make a token that admits another node to a pool's targets",
            "--key-file tokens.key --peer host-7",
        ),
        ("completion", "print the script that completes verbs and options in a shell", "bash"),
        (
            "sim",
            "simulate a trace on a modelled ladder: hits, times, wear, cost",
            "conversation --model Llama-3.1-70B --ladder four-tiers --workers 4 --router soonest",
        ),
        (
            "convert",
            "write a trace, or the log of a gateway or of vLLM, as a trace without text",
            "litellm-spend-logs.json --out trace.jsonl",
        ),
        (
            "size",
            "compute the capacity and bandwidth of each tier that a model and its users need",
            "--model llama-3.1-70b --users 2000 --context 32000",
        ),
    )
}
"""The verbs of this package; `serve` handles SIGTERM itself."""

OK = 0
FAILED = 1
USAGE = 2
BUSY = 3
NO_NODE = 4
INTERRUPTED = 130

EXIT_CODES = """\
exit codes: 0 all is well; 1 a check or a step failed; 2 wrong usage, configuration, trace or
data folder; 3 in use by another node; 4 no node answers, or it refuses; 130 interrupted"""


class OptionParser(argparse.ArgumentParser):
    """A parser whose errors suggest an option in place of one that does not exist."""

    _words: Sequence[str] = ()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words after the command's name. A wrong one ends the process with code 2."""
        self._words = words
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Print the usage, the error and a suggestion; exit with code 2."""
        from difflib import get_close_matches  # takes longer to import than most verbs

        options = [name for name in self._option_string_actions if name.startswith("--")]
        for word in (word.partition("=")[0] for word in self._words if word.startswith("--")):
            if not any(option.startswith(word) for option in options) and (
                close := get_close_matches(word, options, n=1)
            ):
                message += f"; did you mean {close[0]} instead of {word}?"
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. A HoldfastError becomes a line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbs = VERBS if arguments and arguments[0] in VERBS else all_verbs()
    if not arguments or arguments[0] not in verbs:
        _explain(arguments, verbs)
    name = arguments[0]
    verb = verbs[name]
    try:
        with _terminated_as_interrupted(verb):
            parser = parser_of(name, verb)  # here, because Ctrl-C may interrupt the import
            status: int = import_module(verb.module).run(parser.parse(arguments[1:]))
            return status
    except HoldfastError as error:
        print(f"holdfast {name}: {error}", file=sys.stderr)
        if isinstance(error, ConfigError | FormatError | TraceError):
            return USAGE
        if isinstance(error, BusyError):
            return BUSY
        return NO_NODE if isinstance(error, NodeGoneError | RefusedError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output closed the pipe
        return OK
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"holdfast {name}: {where}{error.strerror or error}", file=sys.stderr)
        return FAILED


def all_verbs() -> dict[str, Verb]:
    """Return the verbs of this package and of all installed packages."""
    offered: dict[str, Verb] = {}
    for module, attribute in _entry_points():
        offered |= getattr(import_module(module), attribute)
    return VERBS | offered


def _entry_points() -> Iterator[tuple[str, str]]:
    """Yield the modules and attributes that installed packages name in the group ENTRY_POINTS.

    Reads the packages' files, because importing `importlib.metadata` took 40 % of the time of
    `--help`. A file that cannot be read names nothing.
    """
    for folder in sys.path:
        for file in Path(folder).glob("*.dist-info/entry_points.txt"):
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            _, _, group = text.partition(f"[{ENTRY_POINTS}]\n")
            for line in group.partition("\n[")[0].splitlines():
                module, colon, attribute = line.partition("=")[2].strip().partition(":")
                if colon:
                    yield module, attribute


def parser_of(name: str, verb: Verb) -> OptionParser:
    """Import a verb, and return the parser of its options."""
    parser = OptionParser(
        prog=f"holdfast {name}",
        description=f"{verb.about[0].upper()}{verb.about[1:]}.",
        epilog=f"example:\n  holdfast {name} {verb.example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    import_module(verb.module).add_arguments(parser)
    return parser


@contextmanager
def _terminated_as_interrupted(verb: Verb) -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C while a verb runs that starts processes, so that it ends them."""
    if not verb.starts_processes or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _explain(arguments: Sequence[str], verbs: Mapping[str, Verb]) -> NoReturn:
    """Show the help, the version, or which verb was meant; exit."""
    if not arguments or arguments[0].startswith("-"):
        width = max(map(len, verbs)) + 2
        lines = "\n".join(f"  {name:<{width}}{verb.about}" for name, verb in verbs.items())
        parser = argparse.ArgumentParser(
            prog="holdfast",
            usage="holdfast VERB [OPTIONS]",
            description="A shared, tiered memory for the KV caches of LLM inference.",
            epilog=f"verbs:\n{lines}\n\n`holdfast VERB --help` lists its options.\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
        parser.parse_args(arguments or ["--help"])
        parser.error("name a verb")  # for arguments that it skips, such as --
    from difflib import get_close_matches  # takes longer to import than most verbs

    close = get_close_matches(arguments[0], verbs, n=1)
    advice = f"did you mean `holdfast {close[0]}`?" if close else "see `holdfast --help`"
    print(f"holdfast: there is no verb {arguments[0]!r}; {advice}", file=sys.stderr)
    raise SystemExit(USAGE)
