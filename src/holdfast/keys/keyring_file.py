"""The file of a key ring: the wrapped data keys of every domain; read, locked and replaced."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from holdfast.errors import FormatError, RefusedError
from holdfast.prepared import prepared
from holdfast.regular_file import locked_beside, read_regular, replace_file

RING_FORMAT = 1
RING_BYTES_MAX = 4 << 20

LOCK_S = 10.0
"""Longest wait for the lock."""

Stamp: TypeAlias = tuple[int, int, int]
"""Inode, modification time in ns and size of a file, which differ after it is replaced."""


class DataKeyEpoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data key: its creation time, and the wrapped key in hex, empty if it is derived."""

    epoch: int
    made: str
    wrapped: str = ""


class RingDomain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A domain on the ring. Epochs are oldest first; `last` is the highest ever assigned."""

    name: str
    epochs: list[DataKeyEpoch] = []
    last: int = 0
    erasures: int = 0


@prepared
class _Ring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    check: str
    domains: dict[str, RingDomain]


def stamp(path: Path) -> Stamp:
    """Return the stamp of a file's current version. Raises OSError."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(path: Path) -> tuple[dict[str, RingDomain], Stamp]:
    """Return the domains by their ids in hex, and the stamp of the file.

    Raises OSError if it cannot be read, FormatError if it is damaged or not a ring.
    """
    seen = stamp(path)
    data = read_regular(path, RING_BYTES_MAX)
    try:
        ring = msgspec.json.decode(data, type=_Ring)
        if ring.format != RING_FORMAT:
            raise FormatError(f"its format is {ring.format}, this build reads {RING_FORMAT}")
        if ring.check != check(ring.domains):
            raise FormatError("its checksum is wrong")
    except (msgspec.MsgspecError, ValueError, FormatError, RecursionError) as error:
        raise FormatError(
            f"keyring: {str(path)!r} is damaged or not a key ring: {error}; restore a copy, or "
            "move it away: blocks sealed with its keys are lost then, and are computed again"
        ) from error
    return ring.domains, seen


def write(path: Path, domains: dict[str, RingDomain]) -> Stamp:
    """Replace the file atomically, after flushing the new one to the medium; return its stamp.

    Raises RefusedError, and changes nothing, if that fails.
    """
    ring = _Ring(RING_FORMAT, check(domains), domains)
    data = msgspec.json.format(msgspec.json.encode(ring), indent=1) + b"\n"
    if len(data) > RING_BYTES_MAX:
        raise RefusedError(
            f"keyring: {str(path)!r} would have {len(data)} bytes, the limit is "
            f"{RING_BYTES_MAX}; nothing was changed; `holdfast domain retire` drops old epochs"
        )
    try:
        replace_file(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error
    return stamp(path)


@contextlib.contextmanager
def held_for_change(path: Path | None) -> Iterator[None]:
    """Hold the lock on the file, so that no other process changes it; without a path, do nothing.

    Raises RefusedError if another process holds the lock for LOCK_S, or it cannot be created.
    """
    with contextlib.ExitStack() as held:
        if path is not None:
            try:
                held.enter_context(locked_beside(path, LOCK_S))
            except TimeoutError as error:
                raise RefusedError(f"keyring: {error}") from error
            except OSError as error:
                raise _unwritable(path, error) from error
        yield


def _unwritable(path: Path, error: OSError) -> RefusedError:
    """Return the error for a ring's file, or its lock, that cannot be written."""
    return RefusedError(
        f"keyring: {str(path)!r} cannot be written: {error.strerror}; nothing was changed; make "
        "its folder writable for this user"
    )


def check(domains: dict[str, RingDomain]) -> str:
    """Return the checksum of a ring's content, in hex: it detects damage, not forgery."""
    return hashlib.blake2b(
        msgspec.json.encode(domains, order="deterministic"), digest_size=16, person=b"holdfast-ring"
    ).hexdigest()
