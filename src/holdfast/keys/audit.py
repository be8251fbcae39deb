"""The audit log: changes to domains, keys and tokens, and refused access, with the acting user.

Append-only, one JSON object a line. Each line has the hash of the previous line and of itself, so
`holdfast inspect audit` detects a changed, removed or inserted line. The hashes are not keyed: a
process that can write the file can also recompute all later hashes, or truncate the file. So only
the lines up to a hash that was copied elsewhere are certain. Keys, tokens and users' texts are
never written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.keys.denials import Denial, DenialCounts
from holdfast.limits import MIB
from holdfast.regular_file import open_regular

FIRST = "0" * 64
"""The previous hash in the first line."""

VALUE_CHARS_MAX = 256
_TAIL_BYTES = 64 << 10

_log = logging.getLogger("holdfast.audit")


class AuditVerdict(NamedTuple):
    """The result of a log's verification: whole lines, the last hash, and the errors found."""

    lines: int
    head: str
    faults: list[str]


class AuditLog:
    """Appends to one file, which several processes may share; without a path it writes nothing.

    A line that cannot be written goes to the program's log; the caller gets no error. `catch_up`
    writes the denials, because `deny` is called where a file must not be waited for.
    `start_catch_up` does so on a thread, because a file system may hang.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        """Protects the attributes below. It is never held while a file is written."""
        self._denied = DenialCounts()
        self._unwritten: list[Denial] = []
        """New denials, which `catch_up` will write; at most as many as `_denied` has."""
        self._counts = Counter[str]()
        self._lost = 0
        self._writer: threading.Thread | None = None

    def record(self, action: str, **what: str | int) -> None:
        """Append one line."""
        with self._lock:
            self._counts[action] += 1
        self._record([(action, what)])

    def _record(self, events: Sequence[tuple[str, Mapping[str, str | int]]]) -> None:
        if self.path is None or not events:
            return
        with self._writing:
            try:
                _append(self.path, events)
            except OSError as error:
                with self._lock:
                    self._lost += len(events)
                for action, what in events:
                    _log.warning("audit %s: %s; lost: %s %s", self.path, error, action, what)

    def counts(self) -> dict[str, int]:
        """Return the number of events by action since the start; `denied`: refused accesses."""
        with self._lock:
            return dict(self._counts)

    def lost(self) -> int:
        """Return the number of lines since the start that could not be written."""
        with self._lock:
            return self._lost

    def deny(self, who: str, why: str) -> None:
        """Note a refused access for `catch_up`; see `DenialCounts` for those that are counted.

        `who` is a kind and a name: "user 1000".
        """
        with self._lock:
            self._counts["denied"] += 1
            if self.path is None:
                return
            new = self._denied.note(who, why, time.monotonic())
            self._unwritten += [new] if new else []

    def catch_up(self, *, whole: bool = False) -> None:
        """Write new denials, and the counts of those whose interval is over; if `whole`, of all."""
        with self._lock:
            fresh, self._unwritten = self._unwritten, []
            late = self._denied.due(math.inf if whole else time.monotonic())
        self._record([_as_event(denial) for denial in (*fresh, *late)])

    def start_catch_up(self) -> None:
        """Call `catch_up` on a thread if there are denials, unless an earlier call still writes."""
        if not self._denied or (self._writer is not None and self._writer.is_alive()):
            return
        writer = threading.Thread(target=self.catch_up, name="holdfast-audit", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can start now: the next call tries
            writer.start()
            self._writer = writer


def _as_event(denial: Denial) -> tuple[str, Mapping[str, str | int]]:
    return "denied", {"who": denial.who, "why": denial.why, "unsaid": denial.repeats}


def _append(path: Path, events: Sequence[tuple[str, Mapping[str, str | int]]]) -> None:
    """Append the lines, durable with one `fsync`."""
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        last, before, whole = _last(fd)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        written = [] if whole else [b""]  # ends a line that a crash left incomplete
        for number, (action, what) in enumerate(events, last + 1):
            short = {
                name: value[:VALUE_CHARS_MAX] if isinstance(value, str) else value
                for name, value in what.items()
            }
            line = {"n": number, "at": at, "action": action, **short, "before": before}
            line["hash"] = before = _hash(line)
            written.append(msgspec.json.encode(line))
        data = b"\n".join([*written, b""])
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        # Unlock explicitly: a child that this process forked may have a copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def check(path: Path) -> AuditVerdict:
    """Verify a log from its first line. Raises OSError if it cannot be read.

    Without faults, every line follows from the previous one. A process that can write the file can
    forge that, but not the lines up to a hash that was copied elsewhere: they are unchanged since.
    """
    number, before, faults = 0, FIRST, []
    with os.fdopen(open_regular(path), "rb") as file:
        for at, data in enumerate(file, 1):
            line = _parsed(data)
            if line is None:
                faults.append(f"line {at} is not a whole line of the log")
                continue
            if line["n"] != number + 1 or line["before"] != before:
                faults.append(f"line {at} does not follow the one before it: lines are missing")
            if line["hash"] != _hash(line):
                faults.append(f"line {at} was changed")
            number, before = line["n"], line["hash"]
    return AuditVerdict(number, before, faults)


def _last(fd: int) -> tuple[int, str, bool]:
    """Return number and hash of the last complete line, and whether the file ends with one."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    for data in reversed(tail.splitlines(keepends=True)):
        line = _parsed(data)
        if line is not None:
            return line["n"], line["hash"], tail.endswith(b"\n")
    return 0, FIRST, not tail or tail.endswith(b"\n")


def _parsed(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n") or len(data) > MIB:
        return None
    try:
        line: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    valid = isinstance(line.get("n"), int) and isinstance(line.get("hash"), str)
    return line if valid and isinstance(line.get("before"), str) else None


def _hash(line: dict[str, Any]) -> str:
    hashed = {name: value for name, value in line.items() if name != "hash"}
    text = msgspec.json.encode(hashed, order="deterministic")
    return hashlib.blake2b(text, digest_size=32, person=b"holdfast-audit").hexdigest()
