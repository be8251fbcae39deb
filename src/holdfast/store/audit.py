"""The audit log: who did what to domains, keys and tokens, and who was turned away.

One JSON object a line, only ever appended. Each carries the hash of the line before and of itself,
so that a line that was changed, removed or inserted shows (`holdfast inspect audit`), unless all
hashes behind it were made anew: they have no key. So only what led to a hash that was kept
elsewhere is certain; what comes after it can be rewritten, and cut, by who can write the file. No
key, token or text of a user is ever written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.limits import MIB

FIRST = "0" * 64
"""What the first line names as the hash before it."""

DENIALS_APART_S = 60.0
DENIED_MAX = 256
"""Of so many users, of so many hosts and of so many peers denials are told apart in a minute."""

REASONS_MAX = 8
"""So many reasons are told apart for each of them."""

VALUE_CHARS_MAX = 256
_TAIL_BYTES = 64 << 10
_SWEEP_S = 1.0

_log = logging.getLogger("holdfast.audit")


class Verdict(NamedTuple):
    """What a look through a log found: whole lines, the last hash, and what is wrong where."""

    lines: int
    head: str
    faults: list[str]


class _Told(NamedTuple):
    """When a denial was written, and how many like it were not, since."""

    at: float
    who: str
    why: str
    unsaid: int = 0


class AuditLog:
    """Appends to one file; without a path it forgets. Several processes may share the file.

    A line that can not be written goes to the program's log, and nothing fails for it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._denied: dict[str, dict[str, dict[str, _Told]]] = {}
        self._swept_at = 0.0

    def record(self, action: str, **what: str | int) -> None:
        """Append one line."""
        self._record([(action, what)])

    def _record(self, deeds: Sequence[tuple[str, Mapping[str, str | int]]]) -> None:
        if self.path is None or not deeds:
            return
        with self._lock:
            try:
                _append(self.path, deeds)
            except OSError as error:
                for action, what in deeds:
                    _log.warning("audit %s: %s; lost: %s %s", self.path, error, action, what)

    def deny(self, who: str, why: str) -> None:
        """Note that somebody was turned away; the same again within a minute is only counted.

        `who` is a kind and a name: "user 1000". Whoever is turned away for many reasons, or under
        many names, hides no denial of another kind, and of its own kind for a minute at most.
        """
        if self.path is None:
            return
        # Cut first: both may hold what a stranger sent.
        now, who, why = time.monotonic(), who[:VALUE_CHARS_MAX], why[:VALUE_CHARS_MAX]
        with self._lock:
            late = self._sweep(now)
            kind = self._denied.setdefault(who.partition(" ")[0] if " " in who else "", {})
            reasons = kind.setdefault(who if who in kind or len(kind) < DENIED_MAX else "", {})
            reason = why if why in reasons or len(reasons) < REASONS_MAX else ""
            known = reasons.get(reason)
            if known is None:
                reasons[reason] = _Told(now, who, why)
            else:
                reasons[reason] = known._replace(unsaid=known.unsaid + 1)
        fresh = [_Told(now, who, why)] if known is None else []
        self._record([_denial(told) for told in (*late, *fresh)])

    def catch_up(self, *, whole: bool = False) -> None:
        """Write how many denials were only counted, once their minute is over; `whole`: of all."""
        with self._lock:
            late = self._sweep(math.inf if whole else time.monotonic())
        self._record([_denial(told) for told in late])

    def _sweep(self, now: float) -> list[_Told]:
        """Forget denials older than a minute; return those that stand for others, not written."""
        late: list[_Told] = []
        if now - self._swept_at < _SWEEP_S:
            return late
        self._swept_at = now
        for kind in self._denied.values():
            for who, reasons in list(kind.items()):
                over = [why for why, told in reasons.items() if now - told.at >= DENIALS_APART_S]
                late += [told for why in over if (told := reasons.pop(why)).unsaid]
                if not reasons:
                    del kind[who]
        return late


def _denial(told: _Told) -> tuple[str, Mapping[str, str | int]]:
    return "denied", {"who": told.who, "why": told.why, "unsaid": told.unsaid}


def _append(path: Path, deeds: Sequence[tuple[str, Mapping[str, str | int]]]) -> None:
    """Append a line for each, all of them durable with one `fsync`."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        last, before, whole = _last(fd)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        written = [] if whole else [b""]  # ends what a crash left of a line
        for number, (action, what) in enumerate(deeds, last + 1):
            short = {name: _short(value) for name, value in what.items()}
            line = {"n": number, "at": at, "action": action, **short, "before": before}
            line["hash"] = before = _hash(line)
            written.append(msgspec.json.encode(line))
        data = b"\n".join([*written, b""])
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)


def check(path: Path) -> Verdict:
    """Go through a log from its first line. Raises OSError if it can not be read.

    No fault means that every line follows from the one before. Who can write the file can also
    make it so: what is after the last hash kept elsewhere can be rewritten, all of it if none was
    kept. The lines up to one that bears a kept hash are as they were when that was kept.
    """
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
