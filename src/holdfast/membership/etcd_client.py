"""Client of etcd's v3 JSON gateway: read, watch and put keys, and keep leases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from holdfast.errors import MembershipError
from holdfast.membership.http_json import HttpJson, HttpTlsFiles
from holdfast.prepared import prepared

_T = TypeVar("_T")


class _Header(msgspec.Struct):
    revision: int = 0


class EtcdEntry(msgspec.Struct, frozen=True):
    """A key, its value and its lease (0: none); the value is None if the key was deleted."""

    key: bytes
    value: bytes | None = b""
    lease: int = 0


@prepared
class EtcdSnapshot(msgspec.Struct, frozen=True):
    """All entries under a prefix at the revision in `header`."""

    header: _Header
    entries: list[EtcdEntry] = msgspec.field(default_factory=list, name="kvs")


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints of etcd (`http(s)://host:port`, tried in turn) and the prefix of the members.

    Each pool on one etcd needs a prefix of its own.
    """

    endpoints: tuple[str, ...]
    prefix: str = "/holdfast/members/"
    tls: HttpTlsFiles = HttpTlsFiles()
    timeout_s: float = 5.0


class _Event(msgspec.Struct):
    kv: EtcdEntry
    type: str = "PUT"


class _Watch(msgspec.Struct):
    events: list[_Event] = []
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0


@prepared
class _Watched(msgspec.Struct):
    result: _Watch


@prepared
class _Lease(msgspec.Struct):
    id: int = msgspec.field(default=0, name="ID")
    ttl_s: int = msgspec.field(default=0, name="TTL")


@prepared
class _Alive(msgspec.Struct):
    result: _Lease


class EtcdClient:
    """Client of an etcd cluster. One thread at a time may call it; any thread may `interrupt`.

    Every failure raises MembershipError, and the next call goes to the next endpoint. The gateway
    writes keys and values in base64, as msgspec does with bytes.
    """

    def __init__(self, options: EtcdOptions) -> None:
        if not options.endpoints:
            raise MembershipError("etcd: no endpoints given; write http(s)://host:2379")
        self._servers = [
            HttpJson(url, options.tls, dict, options.timeout_s) for url in options.endpoints
        ]
        self._current = 0

    def snapshot(self, prefix: bytes) -> EtcdSnapshot:
        """Return all entries under `prefix`."""
        request = {"key": prefix, "range_end": _end(prefix)}
        return self._call("/v3/kv/range", request, EtcdSnapshot)

    def lease_of(self, key: bytes) -> int | None:
        """Return the lease of a key: 0 if it has none, None if there is no such key."""
        found = self._call("/v3/kv/range", {"key": key}, EtcdSnapshot).entries
        return found[0].lease if found else None

    def changes(
        self, prefix: bytes, revision: int, silence_s: float
    ) -> Iterator[Sequence[EtcdEntry]]:
        """Yield the changes under `prefix` from `revision` on.

        The first item is empty and says that the watch is set up. The watch ends if etcd ends it
        or sends nothing for `silence_s`; the caller then takes a new snapshot.
        """
        request = {"key": prefix, "range_end": _end(prefix), "start_revision": str(revision)}
        server = self._servers[self._current]
        try:
            body = {"create_request": request}
            for change in server.stream("POST", "/v3/watch", _Watched, body, silence_s):
                watched = change.result
                if watched.compact_revision:
                    return  # the revision was compacted: the caller needs a new snapshot
                if watched.canceled:
                    raise MembershipError(f"{server.url}: watch ended: {watched.cancel_reason}")
                yield [
                    EtcdEntry(event.kv.key, None) if event.type == "DELETE" else event.kv
                    for event in watched.events
                ]
        except MembershipError:
            self._try_next()
            raise

    def grant(self, ttl_s: int) -> int:
        """Return a new lease; etcd deletes its entries after `ttl_s` without `keep_alive`."""
        return self._call("/v3/lease/grant", {"TTL": str(ttl_s)}, _Lease).id

    def keep_alive(self, lease: int) -> int:
        """Renew a lease; return its remaining seconds, 0 if it has ended."""
        return self._call("/v3/lease/keepalive", {"ID": str(lease)}, _Alive).result.ttl_s

    def revoke(self, lease: int) -> None:
        """End a lease and delete its entries."""
        self._call("/v3/lease/revoke", {"ID": str(lease)}, dict[str, object])

    def put(self, key: bytes, value: bytes, lease: int) -> None:
        """Set a key, bound to a lease."""
        body = {"key": key, "value": value, "lease": str(lease)}
        self._call("/v3/kv/put", body, dict[str, object])

    def interrupt(self) -> None:
        """End the call in progress and make every later call fail."""
        for server in self._servers:
            server.interrupt()

    def _call(self, target: str, body: object, kind: type[_T]) -> _T:
        try:
            return self._servers[self._current].call("POST", target, kind, body)
        except MembershipError:
            self._try_next()
            raise

    def _try_next(self) -> None:
        self._current = (self._current + 1) % len(self._servers)


def _end(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
