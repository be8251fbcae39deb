"""`holdfast token`: make a token that lets another node in at this pool's targets."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from pathlib import Path

from holdfast.assemble.keys import read_key
from holdfast.cli.options import add_config_arguments, load_config
from holdfast.errors import ConfigError
from holdfast.limits import TOKEN_S_MAX
from holdfast.store.audit import AuditLog
from holdfast.wire.token import VERBS, issue

_OWNER_ONLY = 0o600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--key-file", metavar="FILE", help="what the targets' tokens.key_file holds too"
    )
    parser.add_argument(
        "--peer",
        default=socket.gethostname(),
        metavar="NAME",
        help="who shows it; for the targets' logs (default: this host's name)",
    )
    parser.add_argument(
        "--may",
        action="append",
        choices=VERBS,
        help="what its bearer may do; name it again for more (default: everything)",
    )
    parser.add_argument(
        "--lifetime",
        type=float,
        default=TOKEN_S_MAX,
        metavar="SECONDS",
        help="how long new connections may be made with it (default and most: %(default)g)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write it there, mode 600, in one step; else it is printed"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the token, or replace the file that holds the last one."""
    file = args.key_file or load_config(args).tokens.key_file
    if not file:
        raise ConfigError(
            "no key to make a token with; name one with --key-file, or a --config with tokens"
        )
    key = read_key(Path(file), "tokens.key_file")
    try:
        line = issue(key, args.peer, args.may or VERBS, args.lifetime, time.time())
    except ConfigError as error:  # the command's own name stands before it already
        raise ConfigError(str(error).removeprefix("token: ")) from error
    log = load_config(args).audit_file if args.config else ""
    may = ",".join(args.may or VERBS)
    AuditLog(Path(log) if log else None).record("token", peer=args.peer, may=may, user=os.geteuid())
    if args.out:
        _replace(Path(args.out), f"{line}\n")
    else:
        print(line)
    return 0


def _replace(file: Path, text: str) -> None:
    made = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        with os.fdopen(fd, "w", encoding="ascii") as opened:
            opened.write(text)
        made.rename(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            made.unlink()  # a token lies about nowhere
        raise ConfigError(f"--out: {str(file)!r} can not be written: {error.strerror}") from error
