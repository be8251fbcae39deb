"""The slot map of a cluster: which server keeps which hash slot, as the servers report it."""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.address import HostPort
from holdfast.clock import Clock
from holdfast.tiers.valkey.resp import RespErrorReply, RespLogin, command
from holdfast.tiers.valkey.server import ValkeyServer
from holdfast.wire.remote.stream import Deadline

SLOTS = 16_384
ASK_S = 0.25
"""Longest wait for one server's slot map, in seconds; at most half of the time left, so that a
silent server leaves time for the next one."""

REFRESH_S = 0.5
"""Shortest time between two requests for the slot map, in seconds."""


class SlotRange(NamedTuple):
    """Slots `first` to `last`, both included, and the address of their server."""

    first: int
    last: int
    owner: HostPort


def slot_of(tag: bytes) -> int:
    """Return the slot of all keys with this hash tag (the text in their first braces)."""
    return crc_hqx(tag, 0) % SLOTS


class ServerCluster:
    """The slot map of a cluster, requested at the first call and after each `invalidate`."""

    def __init__(self, seeds: Sequence[HostPort], login: RespLogin, clock: Clock) -> None:
        self._seeds = list(seeds)
        self._login = login
        self._clock = clock
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._servers: dict[HostPort, ValkeyServer] = {}
        self._ranges: list[SlotRange] = []
        self._moved: dict[int, HostPort] = {}
        self._stale = True
        self._refreshed_s = -REFRESH_S
        self._closed = False

    def server(self, tag: bytes, deadline: Deadline) -> ValkeyServer | None:
        """Return the server that keeps the keys with this tag; None if it is not known."""
        if self._stale:
            self._refresh(deadline)
        slot = slot_of(tag)
        with self._lock:
            if slot in self._moved:
                return self._at(self._moved[slot])
            at = bisect_right(self._ranges, slot, key=lambda slots: slots.first) - 1
            if at < 0 or self._ranges[at].last < slot:
                return None
            return self._at(self._ranges[at].owner)

    def shares(self, deadline: Deadline) -> dict[ValkeyServer, float]:
        """Return the servers, each with its share of all slots."""
        if self._stale:
            self._refresh(deadline)
        shares: dict[ValkeyServer, float] = {}
        with self._lock:
            for first, last, owner in self._ranges:
                server = self._at(owner)
                if server is not None:
                    shares[server] = shares.get(server, 0.0) + (last + 1 - first) / SLOTS
        return shares

    def moved(self, target: str, sender: HostPort) -> None:
        """Use the target `SLOT HOST:PORT` of a MOVED reply until the next refresh of the map."""
        slot, _, address = target.partition(" ")
        host, _, port = address.rpartition(":")
        self._stale = True
        if slot.isdecimal() and port.isdecimal():
            with self._lock:
                self._moved[int(slot)] = HostPort(host or sender.host, int(port))

    def reachable(self) -> bool:
        """Return whether a circuit breaker permits a call to any server, or none is known yet."""
        with self._lock:
            servers = list(self._servers.values())
        return not servers or any(server.backoff.allows() for server in servers)

    def invalidate(self) -> None:
        """Request a new map before its next use."""
        self._stale = True

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()

    def _at(self, endpoint: HostPort) -> ValkeyServer | None:
        """Return the server at an endpoint; the caller holds the lock."""
        if self._closed:
            return None
        if endpoint not in self._servers:
            self._servers[endpoint] = ValkeyServer(endpoint, self._login, self._clock)
        return self._servers[endpoint]

    def _refresh(self, deadline: Deadline) -> None:
        """Request the map from one server after the other, until the first answer.

        Concurrent callers wait for the result, but not past their deadlines.
        """
        wait_s = max(0.0, deadline.at - time.monotonic())
        if not self._refreshing.acquire(timeout=wait_s):
            return  # the caller uses the old map
        try:
            now_s = self._clock.now()
            if not self._stale or now_s - self._refreshed_s < REFRESH_S:
                return
            self._refreshed_s = now_s
            with self._lock:
                owners = [slots.owner for slots in self._ranges]
                servers = [self._at(one) for one in dict.fromkeys([*owners, *self._seeds])]
            for server in servers:
                ranges = [] if server is None else _ranges_of(server, deadline)
                if ranges:
                    self._replace(ranges)
                    return
        finally:
            self._refreshing.release()

    def _replace(self, ranges: list[SlotRange]) -> None:
        kept = {slots.owner for slots in ranges} | set(self._seeds)
        with self._lock:
            self._ranges, self._stale = ranges, False
            self._moved.clear()
            removed = [self._servers.pop(one) for one in self._servers.keys() - kept]
        for server in removed:
            server.close()


class SingleServer(ServerCluster):
    """The constant map of a single server, which keeps all slots."""

    def __init__(self, endpoint: HostPort, login: RespLogin, clock: Clock) -> None:
        super().__init__([endpoint], login, clock)
        self._replace([SlotRange(0, SLOTS - 1, endpoint)])

    def invalidate(self) -> None:
        """Do nothing."""

    def moved(self, target: str, sender: HostPort) -> None:
        """Record that the server is part of a cluster, which the options do not say."""
        with self._lock:
            server = self._at(sender)
        if server is not None:
            server.backoff.record_refusal(
                f"MOVED {target}: it is part of a cluster; set cluster: true"
            )


def _ranges_of(server: ValkeyServer, deadline: Deadline) -> list[SlotRange]:
    """Request the slot map from a server; empty without an answer."""
    now = time.monotonic()
    sooner = Deadline(now + min((deadline.at - now) / 2, ASK_S))
    reply = server.ask(command(b"CLUSTER", b"SLOTS"), sooner)
    if isinstance(reply, RespErrorReply):
        server.backoff.record_refusal(f"{reply.code} {reply.text}")
    rows: list[Any] = reply if isinstance(reply, list) else []
    ranges = []
    for each in rows:  # [first, last, [name, port, ...], replicas ...]
        match each:
            case [int(first), int(last), [bytes() | None as name, int(port), *_], *_]:
                owner = name.decode("ascii", "replace") if name else server.endpoint.host
                ranges.append(SlotRange(first, last, HostPort(owner, port)))
    return sorted(ranges)
