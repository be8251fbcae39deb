"""Pool members from etcd: targets register themselves under a lease, and nodes watch the prefix.

The key `PREFIX/ID` has a member as JSON. A target that dies stops renewing its lease; etcd deletes
the key when the lease ends, and `Membership` keeps the member for `dead_after_s` more. An entry
that cannot be decoded is logged once and left out, so that it does not hide the valid ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec

from holdfast.errors import MembershipError
from holdfast.membership.etcd_client import EtcdClient, EtcdEntry, EtcdOptions
from holdfast.membership.member_list import MEMBERS_MAX, as_data, read_member
from holdfast.membership.members import Member, MemberState
from holdfast.membership.poller import PolledSource, Poller

_log = logging.getLogger(__name__)

TTL_S = 10
TTL_S_MIN, TTL_S_MAX = 2, 300
SILENCE_S = 60.0
"""Time without an event after which a watch is set up again, because the server may be gone."""

_PAUSE_S, _PAUSE_MAX_S = 0.2, 15.0
_KEEP_ALIVES = 3
"""Renewals of a lease within its time to live."""


class EtcdSource(PolledSource):
    """A `MembershipSource` that watches a prefix in etcd."""

    def __init__(self, options: EtcdOptions, silence_s: float = SILENCE_S) -> None:
        self._etcd = EtcdClient(options)
        self._prefix = _prefix(options)
        self._silence_s = silence_s
        self._found: dict[bytes, Member] = {}
        self._left_out: dict[bytes, int] = {}
        """By key, the hash of a value that was left out, so that each is logged once."""
        name = f"members in etcd under {options.prefix}"
        super().__init__(name, _PAUSE_S, _PAUSE_MAX_S, self._etcd.interrupt)

    def _one_round(self) -> None:
        snapshot = self._etcd.snapshot(self._prefix)
        self._found.clear()
        listed = {entry.key for entry in snapshot.entries}
        self._left_out = {
            key: value_hash for key, value_hash in self._left_out.items() if key in listed
        }
        self._apply(snapshot.entries)
        revision = snapshot.header.revision + 1
        for entries in self._etcd.changes(self._prefix, revision, self._silence_s):
            if entries:
                self._apply(entries)

    def _apply(self, entries: Sequence[EtcdEntry]) -> None:
        for entry in entries:
            self._found.pop(entry.key, None)
            if entry.value is None:
                self._left_out.pop(entry.key, None)
            elif member := self._read(entry.key, entry.value):
                self._found[entry.key] = member
        if len(self._found) > MEMBERS_MAX:
            raise MembershipError(
                f"{len(self._found)} members in etcd, at most {MEMBERS_MAX}; split the pool"
            )
        self.report("")
        self._tell(tuple(self._found.values()))

    def _read(self, key: bytes, value: bytes) -> Member | None:
        name = key.removeprefix(self._prefix).decode(errors="replace")
        at = f"etcd {key.decode(errors='replace')}"
        try:
            try:
                data = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise MembershipError(
                    f"{at}: not JSON: {error}; let the target register again"
                ) from error
            member = read_member(data, at)
            if member.id != name:
                raise MembershipError(f"{at}.id: {member.id!r} is not the key's {name!r}")
        except MembershipError as error:
            if self._left_out.get(key) != hash(value):
                _log.warning("%s; left out", error)
            self._left_out[key] = hash(value)
            return None
        self._left_out.pop(key, None)
        return member


class EtcdRegistration(Poller):
    """Keeps a target registered as a member, from construction until `close`.

    Retries while etcd is unreachable, which is then its `trouble`, and replaces a lease that ended.
    If another target registers the same id, this one reports the conflict and does not register
    again until the id is free.
    """

    def __init__(self, options: EtcdOptions, member: Member, ttl_s: int = TTL_S) -> None:
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise MembershipError(
                f"lease of {ttl_s} s: not from {TTL_S_MIN} to {TTL_S_MAX} s; correct it"
            )
        read_member(as_data(member), "member")  # raises for a member that watchers would leave out
        self._options = options
        self._etcd = EtcdClient(options)
        self._key = _prefix(options) + member.id.encode()
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._member = member
        self._put: Member | None = None
        self._was_ours = False
        self._lease = 0
        pause_s = ttl_s / _KEEP_ALIVES
        name = f"registration of {member.id} in etcd"
        super().__init__(name, pause_s, pause_s, self._etcd.interrupt)
        self.start()

    def announce(self, state: MemberState) -> None:
        """Publish the member's state soon, without waiting: `draining` before an orderly end."""
        with self._lock:
            self._member = msgspec.structs.replace(self._member, state=state)
        self.wake()

    def close(self) -> None:
        """Remove the member from the list; if etcd is unreachable, the end of its lease does."""
        super().close()
        if not self._lease:
            return
        etcd, fault = EtcdClient(self._options), ""
        for _ in self._options.endpoints:  # a failed call moves the client to the next endpoint
            try:
                etcd.revoke(self._lease)
            except MembershipError as error:
                fault = str(error)
            else:
                return
        _log.warning("%s: %s; the lease ends by itself", self.name, fault)

    def _one_round(self) -> None:
        with self._lock:
            member = self._member
        if self._lease and not self._etcd.keep_alive(self._lease):
            self._lease = 0
        if not self._lease:
            self._put = None
            self._lease = self._etcd.grant(self._ttl_s)
        owner = self._etcd.lease_of(self._key)
        if owner is None:
            self._put = None  # the key was deleted
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
