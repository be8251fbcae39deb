"""Which server of a cluster keeps which slot, as the servers themselves tell it."""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.clock import Clock
from holdfast.errors import Outcome
from holdfast.tiers.valkey.server import Server
from holdfast.wire.address import HostPort
from holdfast.wire.resp import Login, Refusal, Reply, RespConnection, command
from holdfast.wire.stream import Deadline

SLOTS = 16_384
ASK_S = 0.25
"""A server that has not described the cluster by then, or in half of the time left, is passed
over: one that is mute must leave time for the next."""

REFRESH_S = 0.5
"""The map is asked for at most this often."""


class Range(NamedTuple):
    """Slots `first` to `last` are kept by the server at `owner`."""

    first: int
    last: int
    owner: HostPort


def slot_of(tag: bytes) -> int:
    """Return the slot of every key that has this tag between its first braces."""
    return crc_hqx(tag, 0) % SLOTS


class Single:
    """One server for everything."""

    def __init__(self, endpoint: HostPort, login: Login, clock: Clock) -> None:
        self._server = Server(endpoint, login, clock)

    def server(self, tag: bytes, deadline: Deadline) -> Server | None:
        """Return the server."""
        del tag, deadline
        return self._server

    def shares(self, deadline: Deadline) -> dict[Server, float]:
        """Return the server and its share of all slots: every one."""
        del deadline
        return {self._server: 1.0}

    def reachable(self) -> bool:
        """Return whether the server is worth a call."""
        return self._server.patience.lets_through()

    def doubt(self) -> None:
        """Nothing to learn anew."""

    def moved(self, words: str, asked: HostPort) -> None:
        """Say that there is nobody else to ask."""
        del asked
        self._server.patience.refused(f"MOVED {words}: it is of a cluster; set cluster: true")

    def close(self) -> None:
        """Close its connections."""
        self._server.close()


class Cluster:
    """The map of a cluster; it is learnt at the first call, and again when it is in doubt."""

    def __init__(self, seeds: Sequence[HostPort], login: Login, clock: Clock) -> None:
        self._seeds = list(seeds)
        self._login = login
        self._clock = clock
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._servers: dict[HostPort, Server] = {}
        self._ranges: list[Range] = []
        self._moved: dict[int, HostPort] = {}
        self._doubted = True
        self._learnt_s = -REFRESH_S
        self._closed = False

    def server(self, tag: bytes, deadline: Deadline) -> Server | None:
        """Return who keeps the keys with this tag; None if nobody is known to."""
        if self._doubted:
            self._learn(deadline)
        slot = slot_of(tag)
        with self._lock:
            if slot in self._moved:
                return self._at(self._moved[slot])
            at = bisect_right(self._ranges, slot, key=lambda known: known.first) - 1
            if at < 0 or self._ranges[at].last < slot:
                return None
            return self._at(self._ranges[at].owner)

    def shares(self, deadline: Deadline) -> dict[Server, float]:
        """Return the servers and what share of all slots each one keeps."""
        if self._doubted:
            self._learn(deadline)
        shares: dict[Server, float] = {}
        with self._lock:
            for first, last, owner in self._ranges:
                server = self._at(owner)
                if server is not None:
                    shares[server] = shares.get(server, 0.0) + (last + 1 - first) / SLOTS
        return shares

    def moved(self, words: str, asked: HostPort) -> None:
        """Believe a server that says `SLOT HOST:PORT`, until the map is learnt anew."""
        slot, _, address = words.partition(" ")
        host, _, port = address.rpartition(":")
        self._doubted = True
        if slot.isdecimal() and port.isdecimal():
            with self._lock:
                self._moved[int(slot)] = HostPort(host or asked.host, int(port))

    def reachable(self) -> bool:
        """Return whether any server is worth a call, or none is known yet."""
        with self._lock:
            servers = list(self._servers.values())
        return not servers or any(server.patience.lets_through() for server in servers)

    def doubt(self) -> None:
        """Learn the map anew before it is used again."""
        self._doubted = True

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            servers, self._servers = self._servers, {}
        for server in servers.values():
            server.close()

    def _at(self, endpoint: HostPort) -> Server | None:
        """Return the server at an endpoint; call under the lock."""
        if self._closed:
            return None
        if endpoint not in self._servers:
            self._servers[endpoint] = Server(endpoint, self._login, self._clock)
        return self._servers[endpoint]

    def _learn(self, deadline: Deadline) -> None:
        """Ask one server after the other; who does not learn waits for who does, as it may."""
        wait_s = max(0.0, deadline.at - time.monotonic())
        if not self._learning.acquire(timeout=wait_s):
            return  # what was known before is all there is
        try:
            now_s = self._clock.now()
            if not self._doubted or now_s - self._learnt_s < REFRESH_S:
                return
            self._learnt_s = now_s
            with self._lock:
                known = [each.owner for each in self._ranges]
                asked = [self._at(one) for one in dict.fromkeys([*known, *self._seeds])]
            for server in asked:
                ranges = [] if server is None else _ranges_of(server, deadline)
                if ranges:
                    self._adopt(ranges)
                    return
        finally:
            self._learning.release()

    def _adopt(self, ranges: list[Range]) -> None:
        kept = {each.owner for each in ranges} | set(self._seeds)
        with self._lock:
            self._ranges, self._doubted = ranges, False
            self._moved.clear()
            left = [self._servers.pop(one) for one in self._servers.keys() - kept]
        for server in left:
            server.close()


def _ranges_of(server: Server, deadline: Deadline) -> list[Range]:
    """Ask a server who keeps what; empty if it does not say."""
    replies: list[Reply] = []
    now = time.monotonic()
    soon = Deadline(now + min((deadline.at - now) / 2, ASK_S))

    def ask(connection: RespConnection) -> None:
        replies.extend(connection.ask([command(b"CLUSTER", b"SLOTS")], soon))

    if server.call(ask, soon) is not Outcome.OK:
        return []
    if isinstance(replies[-1], Refusal):
        server.patience.refused(f"{replies[-1].code} {replies[-1].words}")
    return sorted(_read_ranges(replies[-1], server.endpoint.host))


def _read_ranges(reply: Reply, host: str) -> list[Range]:
    """Read `[[first, last, [host, port, ...], replicas ...], ...]`; no host means the asked one."""
    rows: list[Any] = reply if isinstance(reply, list) else []
    ranges = []
    for each in rows:
        match each:
            case [int(first), int(last), [bytes() | None as name, int(port), *_], *_]:
                owner = name.decode("ascii", "replace") if name else host
                ranges.append(Range(first, last, HostPort(owner, port)))
    return ranges
