"""`holdfast completion`: the script that completes verbs and options in a shell."""

from __future__ import annotations

import argparse
from importlib import import_module

from holdfast.cli import OK, all_verbs
from holdfast.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to write the script for")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion needs shtab: pip install 'holdfast-kv[shell]'") from error
    parser = argparse.ArgumentParser(prog="holdfast")
    verbs = parser.add_subparsers()
    for name, verb in all_verbs().items():
        of_verb = verbs.add_parser(name, help=verb.about)
        import_module(verb.module).add_arguments(of_verb)
    print(shtab.complete(parser, shell=args.shell))
    return OK
