"""`holdfast pool`: take a member of a pool out of placement, or put it back."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
from pathlib import Path

import msgspec

from holdfast.cli.options import add_config_arguments, load_config
from holdfast.config import PoolOptions
from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.file_source import FileSource
from holdfast.membership.member_list import as_data
from holdfast.membership.members import MemberState
from holdfast.regular_file import replacing

_STATES = {"drain": MemberState.DRAINING, "serve": MemberState.SERVING}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "action",
        choices=tuple(_STATES),
        help="drain: the member gets no new blocks and serves those that it has; serve: undo it",
    )
    parser.add_argument("member", metavar="NODE", help="the member's id")
    parser.add_argument(
        "--members", metavar="FILE", help="the members file (default: the configuration's pool)"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Replace the members file atomically; every node watches it."""
    path = args.members
    if not path:
        tiers = load_config(args).tiers
        pool = next((tier for tier in tiers if isinstance(tier, PoolOptions)), None)
        if pool is None:
            raise ConfigError("tiers: the configuration has no pool; name a file with --members")
        if "://" in pool.members:
            raise ConfigError(
                f"{pool.members} is not a file: drain the member in that list "
                "(kubectl, the DNS zone, or the target's own registration)"
            )
        path = pool.members
    state = _STATES[args.action]
    try:
        members = FileSource(path).read()
    except MembershipError as error:
        raise ConfigError(str(error)) from error
    known = {member.id: member for member in members}
    if args.member not in known:
        raise ConfigError(f"{path}: no member {args.member!r}; known: {', '.join(known)}")
    known[args.member] = msgspec.structs.replace(known[args.member], state=state)
    if not any(member.takes_segments for member in known.values()):
        raise ConfigError(
            f"{path}: {args.member!r} is the last one that takes segments; add another member"
        )
    _replace(Path(path), {"members": [as_data(member) for member in known.values()]})
    print(f"{args.member}: {state}")
    return 0


def _replace(path: Path, data: dict[str, object]) -> None:
    """Replace a file atomically, keeping its mode and, if permitted, its owner.

    Of a symbolic link, the target is replaced: other processes may open it by its own name.
    """
    import yaml

    try:
        file = path.resolve(strict=True)
        was = file.stat()
        text = yaml.safe_dump(msgspec.to_builtins(data), sort_keys=False)
        with replacing(file) as fd, os.fdopen(fd, "w", encoding="utf-8", closefd=False) as opened:
            with contextlib.suppress(PermissionError):
                os.fchown(fd, was.st_uid, was.st_gid)
            os.fchmod(fd, stat.S_IMODE(was.st_mode))
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
