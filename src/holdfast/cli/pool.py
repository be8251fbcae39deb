"""`holdfast pool`: take a member of a pool out of placement, or put it back."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.options import add_config_arguments, load_config
from holdfast.config import PoolOptions
from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.file_source import FileSource
from holdfast.membership.member_list import as_data, read_members
from holdfast.membership.members import Member, MemberState
from holdfast.regular_file import locked_beside, replacing

LOCK_S = 10.0
"""Longest wait, in seconds, for another command that changes the same list."""

_LOCK_MODE = 0o666
"""The lock has the permissions of the list: its editors take turns, whoever made the lock."""

_STATES = {"drain": MemberState.DRAINING, "serve": MemberState.SERVING}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "action",
        choices=tuple(_STATES),
        help="drain: the member gets no new blocks and serves those that it has; serve: undo it",
    )
    parser.add_argument("member", metavar="ID", help="the member's id, as in the members file")
    parser.add_argument(
        "--members", metavar="FILE", help="the members file (default: the configuration's pool)"
    )
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Replace the members file atomically; every node watches it.

    Of a symbolic link, the target is replaced: other processes may open it by its own name.
    """
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
        file = Path(path).resolve(strict=True)
        with locked_beside(file, LOCK_S, file.stat().st_mode & _LOCK_MODE):
            _set_state(file, args.member, state)
    except TimeoutError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be changed: {error.strerror}; name the members file that the hosts "
            "read, as a user who may write to its folder"
        ) from error
    print(f"{args.member}: {state}")
    return 0


def _set_state(file: Path, member: str, state: MemberState) -> None:
    """Read the list, set one member's state, and replace the file. The caller holds its lock."""
    try:
        members = FileSource(str(file)).read()
    except MembershipError as error:
        raise ConfigError(str(error)) from error
    known = {each.id: each for each in members}
    if member not in known:
        listed = f"known: {', '.join(known)}" if known else "the list is empty"
        raise ConfigError(f"{file}: no member {member!r}; {listed}")
    known[member] = msgspec.structs.replace(known[member], state=state)
    if not any(each.takes_segments for each in known.values()):
        raise ConfigError(
            f"{file}: {member!r} is the last one that takes segments; add another member"
        )
    _replace(file, _with_state(file.read_bytes().decode(), member, tuple(known.values())))


def _with_state(text: str, member: str, wanted: tuple[Member, ...]) -> str:
    """Return a list whose member has its new state; comments, order and notation stay if they can.

    They cannot if, for example, an anchor gives several members one state.
    """
    import yaml

    state = next(each.state for each in wanted if each.id == member)
    with contextlib.suppress(yaml.YAMLError, MembershipError, KeyError, AttributeError):
        edited = _edited(text, member, state)
        if read_members(yaml.safe_load(edited), "") == wanted:
            return edited
    data = {"members": [as_data(each) for each in wanted]}
    return yaml.safe_dump(msgspec.to_builtins(data), sort_keys=False)


def _edited(text: str, member: str, state: MemberState) -> str:
    """Return a list with the state of one member replaced, or added after its last field."""
    import yaml

    def fields(mapping: Any) -> dict[str, Any]:  # noqa: ANN401  # a node of YAML
        return {key.value: value for key, value in mapping.value}

    for entry in fields(yaml.compose(text, yaml.SafeLoader))["members"].value:
        if fields(entry)["id"].value != member:
            continue
        if value := fields(entry).get("state"):
            word = f'"{state}"' if value.style == '"' else str(state)
            return text[: value.start_mark.index] + word + text[value.end_mark.index :]
        first_key, last_value = entry.value[0][0], entry.value[-1][1]
        end = last_value.end_mark.index
        if not entry.flow_style:
            end = len(text) if (newline := text.find("\n", end)) < 0 else newline
            added = f"\n{' ' * first_key.start_mark.column}state: {state}"
        elif first_key.style == '"':
            added = f', "state": "{state}"'
        else:
            added = f", state: {state}"
        return text[:end] + added + text[end:]
    raise KeyError(member)


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically, keeping its mode and, if permitted, its owner."""
    was = file.stat()
    with replacing(file) as fd, os.fdopen(fd, "wb", closefd=False) as opened:
        with contextlib.suppress(PermissionError):
            os.fchown(fd, was.st_uid, was.st_gid)
        os.fchmod(fd, stat.S_IMODE(was.st_mode))
        opened.write(text.encode())
