"""Members that register themselves in etcd under a lease, and the watch over them.

One key for each member, `PREFIX/ID`, holding the member as JSON. A target that dies stops keeping
its lease alive; etcd deletes the key when it ends, and `Membership` waits a little on top. An
entry that can not be read is left out with one log line: one bad target must not hide the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from holdfast.errors import MembershipError
from holdfast.tiers.pool.etcd import Entry, Etcd, EtcdOptions
from holdfast.tiers.pool.members import Member, State
from holdfast.tiers.pool.roster import MEMBERS_MAX, as_data, read_member
from holdfast.tiers.pool.rounds import Rounds

_log = logging.getLogger(__name__)

TTL_S = 10
TTL_S_MIN, TTL_S_MAX = 2, 300
SILENCE_S = 60.0
"""A watch without news is set up again after so long: the other end may be gone."""

_PAUSE_S, _PAUSE_MAX_S = 0.2, 15.0
_KEEP_ALIVES = 3
"""Tries to renew a lease within its time."""


class MemberEtcd:
    """Watches the members under a prefix. A `MembershipSource`."""

    def __init__(self, options: EtcdOptions, silence_s: float = SILENCE_S) -> None:
        self._etcd = Etcd(options)
        self._prefix = _prefix(options)
        self._silence_s = silence_s
        self._found: dict[bytes, Member] = {}
        self._bad: dict[bytes, bytes] = {}
        self._told: Callable[[Sequence[Member]], None] | None = None
        name = f"members in etcd under {options.prefix}"
        self._rounds = Rounds(name, self._round, _PAUSE_S, _PAUSE_MAX_S, self._etcd.interrupt)

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        self._told = told
        self._rounds.start()

    def trouble(self) -> str:
        return self._rounds.trouble

    def close(self) -> None:
        self._rounds.close()

    def _round(self) -> None:
        snapshot = self._etcd.snapshot(self._prefix)
        self._found.clear()
        self._apply(snapshot.entries)
        for entries in self._etcd.changes(self._prefix, snapshot.revision + 1, self._silence_s):
            if entries:
                self._apply(entries)

    def _apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._found.pop(entry.key, None)
            if entry.value is not None and (member := self._read(entry.key, entry.value)):
                self._found[entry.key] = member
        if len(self._found) > MEMBERS_MAX:
            raise MembershipError(
                f"{len(self._found)} members in etcd, at most {MEMBERS_MAX}; split the pool"
            )
        self._rounds.settle("")
        if self._told is not None:
            self._told(tuple(self._found.values()))

    def _read(self, key: bytes, value: bytes) -> Member | None:
        name = key.removeprefix(self._prefix).decode(errors="replace")
        at = f"etcd {key.decode(errors='replace')}"
        try:
            member = read_member(_object(value, at), at)
            if member.id != name:
                raise MembershipError(f"{at}.id: {member.id!r} is not the key's {name!r}")
        except MembershipError as error:
            if self._bad.get(key) != value:
                _log.warning("%s; left out", error)
            self._bad[key] = value
            return None
        self._bad.pop(key, None)
        return member


class EtcdRegistration:
    """Keeps one member registered from construction until `close`; for the target itself.

    If etcd goes away it is tried again and again; a lease that ended meanwhile is replaced. Who
    registers the same id later takes it over: this one leaves it alone then, until it is free.
    """

    def __init__(self, options: EtcdOptions, member: Member, ttl_s: int = TTL_S) -> None:
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise MembershipError(
                f"lease of {ttl_s} s: not from {TTL_S_MIN} to {TTL_S_MAX} s; correct it"
            )
        read_member(as_data(member), "member")  # refuse here what watchers would leave out
        self._options = options
        self._etcd = Etcd(options)
        self._key = _prefix(options) + member.id.encode()
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._member = member
        self._put: Member | None = None
        self._was_ours = False
        self._lease = 0
        pause_s = ttl_s / _KEEP_ALIVES
        name = f"registration of {member.id} in etcd"
        self._rounds = Rounds(name, self._round, pause_s, pause_s, self._etcd.interrupt)
        self._rounds.start()

    def trouble(self) -> str:
        """Return why the member is not registered now; empty while it is."""
        return self._rounds.trouble

    def announce(self, state: State) -> None:
        """Make the member's state known, `draining` before an orderly end; soon, not at once."""
        with self._lock:
            self._member = msgspec.structs.replace(self._member, state=state)
        self._rounds.wake()

    def close(self) -> None:
        """Take the member off the list now. If etcd can not be reached the lease's end does it."""
        self._rounds.close()
        if self._lease:
            try:
                Etcd(self._options).revoke(self._lease)
            except MembershipError as error:
                _log.warning("%s: %s; the lease ends by itself", self._rounds.name, error)

    def _round(self) -> None:
        with self._lock:
            member = self._member
        if self._lease and not self._etcd.keep_alive(self._lease):
            self._lease = 0
        if not self._lease:
            self._put = None
            self._lease = self._etcd.grant(self._ttl_s)
        owner = self._etcd.lease_of(self._key)
        if owner is None:
            self._put = None  # somebody removed it
        elif self._was_ours and owner != self._lease:
            raise MembershipError(
                f"{member.id}: another target has registered this id since; stop one of the two, "
                "or give each an id of its own"
            )
        if self._put != member:
            self._etcd.put(self._key, msgspec.json.encode(as_data(member)), self._lease)
            self._put, self._was_ours = member, True


def _prefix(options: EtcdOptions) -> bytes:
    return options.prefix.rstrip("/").encode() + b"/"


def _object(value: bytes, at: str) -> object:
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise MembershipError(f"{at}: no JSON: {error}; let the target register anew") from error
