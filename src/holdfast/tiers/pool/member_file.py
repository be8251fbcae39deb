"""Members from a YAML or JSON file that is looked at every second: the default source.

    members:
      - {id: flash-1, address: "tcp://10.0.0.1:7070", weight: 4}
      - {id: flash-2, address: "tcp://10.0.0.2:7070", weight: 2, state: draining}

Replace the file (write beside it, rename over it) rather than write into it. One that is half
written mostly does not parse, and the last list stays; should it parse, what is missing from it
is missing for a second, which `Membership` does not believe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import ConfigError, MembershipError
from holdfast.limits import MIB
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.roster import read_members
from holdfast.tiers.pool.rounds import Rounds
from holdfast.yaml_file import read_mapping

LOOK_S = 1.0
FILE_BYTES_MAX = MIB


class MemberFile:
    """Watches the file at `path`, which need not exist yet. A `MembershipSource`."""

    def __init__(self, path: str, look_s: float = LOOK_S) -> None:
        self._path = Path(path)
        self._seen: tuple[int, ...] = ()
        self._error: MembershipError | None = None
        self._told: Callable[[Sequence[Member]], None] | None = None
        self._rounds = Rounds(f"members file {path}", self._look, look_s, look_s)

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        self._told = told
        self._rounds.start()

    def trouble(self) -> str:
        return self._rounds.trouble

    def close(self) -> None:
        self._rounds.close()

    def read(self) -> tuple[Member, ...]:
        """Read the file now; raise MembershipError saying what is wrong with it."""
        return _read(str(self._path))

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._seen:
            # Nothing new: what was wrong with the file is still wrong.
            if self._error is not None:
                raise self._error
            return
        self._seen, self._error = (), None
        try:
            members = self.read()
        except _UnreadableError:
            raise  # says nothing about what is in it: read it again
        except MembershipError as error:
            self._seen, self._error = stamp, error
            raise
        if _stamp(self._path) != stamp:
            return  # changed while we read: look again before believing it
        self._seen = stamp
        if self._told is not None:
            self._told(members)


class _UnreadableError(MembershipError):
    """The file can not be opened or read now."""


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError as error:
        raise MembershipError(_unreadable(path, error)) from error
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(path: str) -> tuple[Member, ...]:
    try:
        data = read_mapping(path, FILE_BYTES_MAX)  # JSON is YAML too
    except ConfigError as error:
        said = _UnreadableError if isinstance(error.__cause__, OSError) else MembershipError
        raise said(str(error)) from error
    return read_members(data, path)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror}; the members file must exist and be readable"
