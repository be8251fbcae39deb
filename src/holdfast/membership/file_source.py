"""Pool members from a YAML or JSON file that is checked every second: the default source.

    members:
      - {id: flash-1, address: "tcp://10.0.0.1:7070", weight: 4}
      - {id: flash-2, address: "tcp://10.0.0.2:7070", weight: 2, state: draining}

Replace the file with a rename instead of writing into it. A partly written file usually does not
parse, and the last list stays. If it parses, the members it lacks are missing for a second only,
and `Membership` removes a member only after `dead_after_s`.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import ConfigError, MembershipError
from holdfast.limits import MIB
from holdfast.membership.member_list import read_members
from holdfast.membership.members import Member
from holdfast.membership.poller import PolledSource
from holdfast.regular_file import check_regular
from holdfast.yaml_file import read_mapping

LOOK_S = 1.0
"""Time between two checks of the file."""

FILE_BYTES_MAX = MIB


class FileSource(PolledSource):
    """A `MembershipSource` that watches the file at `path`, which need not exist yet."""

    def __init__(self, path: str, look_s: float = LOOK_S) -> None:
        self._path = Path(path)
        self._seen: tuple[int, ...] = ()
        self._error: MembershipError | None = None
        super().__init__(f"members file {path}", look_s, look_s)

    def read(self) -> tuple[Member, ...]:
        """Read the file now; raise MembershipError if it is not a list of members."""
        try:
            data = read_mapping(str(self._path), FILE_BYTES_MAX)  # JSON is YAML too
        except ConfigError as error:
            unreadable = isinstance(error.__cause__, OSError)
            raise (_UnreadableError if unreadable else MembershipError)(str(error)) from error
        return read_members(data, str(self._path))

    def _one_round(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._seen:
            # An unchanged file still has its error.
            if self._error is not None:
                raise self._error
            return
        self._seen, self._error = (), None
        try:
            members = self.read()
        except _UnreadableError:
            raise  # the contents are unknown: read it again next time
        except MembershipError as error:
            self._seen, self._error = stamp, error
            raise
        if _stamp(self._path) != stamp:
            return  # changed during the read: read it again next time
        self._tell(members)
        self._seen = stamp  # not before: a list whose receiver failed is passed on again


class _UnreadableError(MembershipError):
    """The file cannot be opened or read now."""


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        check_regular(path)  # reading a FIFO would block, and so would `close`
        stat = path.stat()
    except OSError as error:
        raise MembershipError(
            f"{path}: {error.strerror}; the members file must exist and be readable"
        ) from error
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
