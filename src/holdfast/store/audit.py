"""The audit log: who did what to domains, keys and tokens, and who was turned away.

One JSON object a line, only ever appended. Each carries the hash of the line before and of itself,
so that a changed, missing or inserted line shows (`holdfast inspect audit`). A cut end shows only
to someone who kept the last hash. No key, token or text of a user is ever written.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.limits import MIB

FIRST = "0" * 64
"""What the first line names as the hash before it."""

DENIALS_APART_S = 60.0
DENIED_MAX = 256
VALUE_CHARS_MAX = 256
_TAIL_BYTES = 64 << 10
_NUMBER = re.compile(r"\d+")

_log = logging.getLogger("holdfast.audit")


class Verdict(NamedTuple):
    """What a look through a log found: whole lines, the last hash, and what is wrong where."""

    lines: int
    head: str
    faults: list[str]


class AuditLog:
    """Appends to one file; without a path it forgets. Several processes may share the file.

    A line that can not be written goes to the program's log, and nothing fails for it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._denied: dict[tuple[str, str], tuple[float, int]] = {}

    def record(self, action: str, **what: str | int) -> None:
        """Append one line."""
        if self.path is None:
            return
        with self._lock:
            try:
                self._append(self.path, action, what)
            except OSError as error:
                _log.warning("audit %s: %s; lost: %s %s", self.path, error, action, what)

    def deny(self, who: str, why: str) -> None:
        """Note that somebody was turned away; the same again within a minute is only counted.

        Reasons that differ in numbers only are the same.
        """
        if self.path is None:
            return
        now, key = time.monotonic(), (who, _NUMBER.sub("N", why))
        with self._lock:
            if key not in self._denied and len(self._denied) >= DENIED_MAX:
                key = ("others", "")
            since, times = self._denied.get(key, (-DENIALS_APART_S, 0))
            if now - since < DENIALS_APART_S:
                self._denied[key] = since, times + 1
                return
            self._denied[key] = now, 0
        self.record("denied", who=who, why=why, unsaid=times)

    def _append(self, path: Path, action: str, what: dict[str, str | int]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            number, before, whole = _last(fd)
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            short = {name: _short(value) for name, value in what.items()}
            line = {"n": number + 1, "at": at, "action": action, **short, "before": before}
            line["hash"] = _hash(line)
            os.write(fd, (b"" if whole else b"\n") + msgspec.json.encode(line) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)


def check(path: Path) -> Verdict:
    """Go through a log from its first line. Raises OSError if it can not be read."""
    number, before, faults = 0, FIRST, []
    with path.open("rb") as file:
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
    return Verdict(number, before, faults)


def _last(fd: int) -> tuple[int, str, bool]:
    """Return number and hash of the last whole line, and whether the file ends with one."""
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
    except msgspec.MsgspecError:
        return None
    right = isinstance(line.get("n"), int) and isinstance(line.get("hash"), str)
    return line if right and isinstance(line.get("before"), str) else None


def _hash(line: dict[str, Any]) -> str:
    said = {name: value for name, value in line.items() if name != "hash"}
    text = msgspec.json.encode(said, order="deterministic")
    return hashlib.blake2b(text, digest_size=32, person=b"holdfast-audit").hexdigest()


def _short(value: str | int) -> str | int:
    return value[:VALUE_CHARS_MAX] if isinstance(value, str) else value
