"""The file of a key ring: what it says of every domain, and how it is read and replaced."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import TypeAlias

import msgspec

from holdfast.errors import FormatError, RefusedError
from holdfast.prepared import prepared
from holdfast.store.keyring_lock import unwritable

RING_FORMAT = 1
RING_BYTES_MAX = 4 << 20

Stamp: TypeAlias = tuple[int, int, int]
"""Inode, time of change in ns and bytes of a file: other ones where somebody replaced it."""


class Epoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data key on the ring: when it was made, and wrapped, in hex; empty where derived."""

    epoch: int
    made: str
    wrapped: str = ""


class RingDomain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One domain on the ring, oldest epoch first; `last` was the newest ever."""

    name: str
    epochs: list[Epoch] = []
    last: int = 0
    erasures: int = 0


@prepared
class _Ring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    check: str
    domains: dict[str, RingDomain]


def stamp(path: Path) -> Stamp:
    """Return what tells one version of a file from the next. Raises OSError."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(path: Path) -> tuple[dict[str, RingDomain], Stamp]:
    """Return the domains by their ids in hex, and the stamp of the file.

    Raises OSError where it can not be read, FormatError where it is damaged or no ring.
    """
    seen = stamp(path)
    with path.open("rb") as file:
        data = file.read(RING_BYTES_MAX)
    try:
        ring = msgspec.json.decode(data, type=_Ring)
        if ring.format != RING_FORMAT:
            raise FormatError(f"its format is {ring.format}, this build reads {RING_FORMAT}")
        if ring.check != check(ring.domains):
            raise FormatError("its check sum is wrong")
    except (msgspec.MsgspecError, FormatError) as error:
        raise FormatError(
            f"keyring: {str(path)!r} is damaged or no key ring: {error}; put a copy back, or "
            "move it away: what was sealed with its keys is lost then, and is computed again"
        ) from error
    return ring.domains, seen


def write(path: Path, domains: dict[str, RingDomain]) -> Stamp:
    """Replace the file in one step; the new one is on the medium before the old one goes.

    Returns its stamp. Raises RefusedError, and changes nothing, where that fails.
    """
    ring = _Ring(RING_FORMAT, check(domains), domains)
    data = msgspec.json.format(msgspec.json.encode(ring), indent=1) + b"\n"
    if len(data) > RING_BYTES_MAX:
        raise RefusedError(
            f"keyring: {str(path)!r} would have {len(data)} bytes, the limit is "
            f"{RING_BYTES_MAX}; nothing was changed; `holdfast domain retire` drops old epochs"
        )
    made = path.with_name(path.name + ".new")
    try:
        made.unlink(missing_ok=True)
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        made.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise unwritable(path, error) from error
    return stamp(path)


def check(domains: dict[str, RingDomain]) -> str:
    """Return the check sum of what a ring says, in hex: it finds damage, not forgery."""
    return hashlib.blake2b(
        msgspec.json.encode(domains, order="deterministic"), digest_size=16, person=b"holdfast-ring"
    ).hexdigest()
