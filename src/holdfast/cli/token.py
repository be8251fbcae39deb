"""`holdfast token`: make a token that admits another node to a pool's targets."""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

from holdfast.assemble.keys import read_key
from holdfast.cli.options import add_config_arguments, load_config
from holdfast.errors import ConfigError
from holdfast.keys.audit import AuditLog
from holdfast.limits import TOKEN_S_MAX
from holdfast.regular_file import replace_file
from holdfast.wire.remote.token import CLOCK_SKEW_S, VERBS, issue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--key-file", metavar="FILE", help="the key file of the targets (tokens.key_file)"
    )
    parser.add_argument(
        "--peer",
        default=socket.gethostname(),
        metavar="NAME",
        help="name of the bearer, for the targets' logs (default: this host's name)",
    )
    parser.add_argument(
        "--may",
        action="append",
        choices=VERBS,
        help="a permission of the bearer; repeat it for more (default: all)",
    )
    parser.add_argument(
        "--lifetime",
        type=float,
        default=TOKEN_S_MAX,
        metavar="SECONDS",
        help="period in which it is valid (default and maximum: %(default)g); the "
        f"clocks of this machine and a target may differ by {CLOCK_SKEW_S:g} s",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write it to a file of mode 600, atomically (default: print it)",
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the token, or replace the file with the last one."""
    config = load_config(args) if args.config or args.set or not args.key_file else None
    file = args.key_file or (config.tokens.key_file if config else "")
    if not file:
        raise ConfigError(
            "no key to make a token with; name one with --key-file, or a --config with tokens"
        )
    key = read_key(Path(file), "tokens.key_file")
    line = issue(key, args.peer, args.may or VERBS, args.lifetime, time.time())
    log = config.audit_file if config else ""
    may = ",".join(args.may or VERBS)
    AuditLog(Path(log) if log else None).record("token", peer=args.peer, may=may, user=os.geteuid())
    if args.out:
        try:
            replace_file(Path(args.out), f"{line}\n".encode())
        except OSError as error:
            raise ConfigError(
                f"--out: {args.out!r} cannot be written: {error.strerror}; choose another file"
            ) from error
    else:
        print(line)
    return 0
