"""The Valkey tier: whole records under `prefix:{segment}:key` on a Redis or Valkey server.

All blocks of a segment have one hash tag, so in a cluster they lie on one server: losing it costs
its segments, not a block of every chain. What is kept, and for how long, is the server's to say
(`maxmemory-policy allkeys-lru` suits) or `ttl_s`.
"""

from __future__ import annotations

import math
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import Any, TypeAlias

import msgspec

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError, FormatError, Outcome
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.tiers.base import Get, Place, Put, Reserved, Survivor, Usage, segment_place
from holdfast.tiers.gate import Gate
from holdfast.tiers.valkey.server import Server
from holdfast.tiers.valkey.slots import Cluster, Single
from holdfast.wire.address import HostPort, tcp_endpoint
from holdfast.wire.resp import Login, Refusal, Reply, RespConnection, check_login, command
from holdfast.wire.stream import Deadline
from holdfast.workers import workers

THREADS = 16

_INFO = re.compile(rb"(\w+):(\d+)\r\n")

Part: TypeAlias = list[int]
"""Indices into a batch that go to one server."""


class ValkeyTls(msgspec.Struct, frozen=True):
    """PEM files: who signs the server's certificate, and ours with its key if it wants one."""

    ca: str
    cert: str = ""
    key: str = ""


class ValkeyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is and how to get in; times in seconds.

    `cluster`: the addresses are of some servers of a cluster. `ttl_s`: a record is dropped so long
    after it was written; 0 leaves it to the server. `segment_blocks` of a chain lie together.
    """

    addresses: tuple[str, ...]
    cluster: bool = False
    prefix: str = "holdfast"
    ttl_s: float = 0.0
    deadline_s: float = 2.0
    ask_s: float = 0.25
    database: int = 0
    user: str = ""
    password_file: str = ""
    tls: ValkeyTls | None = None
    segment_blocks: int = SEGMENT_BLOCKS


class _Call:
    """What became of each part of a batch so far, by its number."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.outcomes: dict[int, Outcome] = {}
        self.landed: set[int] = set()
        self.moved: dict[int, tuple[str, HostPort]] = {}
        """Those whose server says that another one keeps them: its words, and who said so."""

    def land(self, number: int, server: Server, said: Outcome | Refusal) -> None:
        """Take note of what a server answered."""
        self.landed.add(number)
        if isinstance(said, Outcome):
            self.outcomes[number] = said
            return
        self.outcomes[number] = Outcome.FULL if said.code == "OOM" else Outcome.GONE
        if said.code == "MOVED":
            self.moved[number] = said.words, server.endpoint
        elif said.code != "ASK":  # a slot on its way to another server: soon it has MOVED
            server.patience.refused(f"{said.code} {said.words}")

    def fail(self, numbers: Part, outcome: Outcome) -> None:
        """Take note of what got no answer."""
        self.outcomes.update(dict.fromkeys(numbers, outcome))


class ValkeyTier:
    """See `holdfast.tiers.base.Shared`. Opens although no server answers: one may come.

    Raises ConfigError for files that can not be used.
    """

    def __init__(
        self, options: ValkeyOptions, clock: Clock | None = None, name: str = "valkey"
    ) -> None:
        self.name = name
        self.options = options
        clock = clock or SystemClock()
        endpoints = [tcp_endpoint(address) for address in options.addresses]
        login = Login(options.user, options.password_file, options.database, _context(options.tls))
        check_login(login)
        self._map: Cluster | Single
        if options.cluster:
            self._map = Cluster(endpoints, login, clock)
        else:
            self._map = Single(endpoints[0], login, clock)
        self._prefix = options.prefix.encode()
        self._gate = Gate()
        self._threads = workers(THREADS, f"holdfast-{name}")
        self._lock = threading.Lock()
        self._usage = [0, 0, 0]

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Nothing is reserved: the server finds room when records come."""
        return Reserved([Place(0)] * len(sizes), [])

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Set one key a record; FULL where the server has no memory to give."""
        names: list[bytes] = []
        keyed: Part = []
        for number, put in enumerate(batch):
            try:
                names.append(self._name(put.place, read_header(put.record)[0].key))
                keyed.append(number)
            except FormatError:
                names.append(b"")
        deadline = Deadline.within(self.options.deadline_s)
        call = _Call([put.place for put in batch])

        def store(server: Server, connection: RespConnection, part: Part) -> None:
            records = [(names[number], batch[number].record) for number in part]
            replies = connection.put(records, self.options.ttl_s, deadline)
            for number, reply in zip(part, replies, strict=True):
                stored = Outcome.OK if reply == b"OK" else Outcome.GONE
                call.land(number, server, reply if isinstance(reply, Refusal) else stored)

        self._run(call, keyed, store, deadline)
        outcomes = [call.outcomes.get(number, Outcome.CORRUPT) for number in range(len(batch))]
        landed = (len(p.record) for p, o in zip(batch, outcomes, strict=True) if o is Outcome.OK)
        self._count(1, sum(landed))
        return outcomes

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Receive records straight into their buffers; what came before a failure is OK."""
        deadline = Deadline.within(self.options.deadline_s)
        call = _Call([get.place for get in batch])

        def fetch(server: Server, connection: RespConnection, part: Part) -> None:
            wanted = [(self._name(*batch[number][:2]), batch[number].into) for number in part]
            for number, found in zip(part, connection.get(wanted, deadline), strict=True):
                landed = Outcome.OK if found is True else Outcome.MISS
                call.land(number, server, found if isinstance(found, Refusal) else landed)

        self._run(call, list(range(len(batch))), fetch, deadline)
        outcomes = [call.outcomes[number] for number in range(len(batch))]
        landed = (len(g.into) for g, o in zip(batch, outcomes, strict=True) if o is Outcome.OK)
        self._count(0, sum(landed))
        return outcomes

    def free(self, places: Sequence[Place]) -> None:
        """Nothing to forget: others may want them."""

    def survivors(self) -> Iterator[Survivor]:
        """Yield nothing: whoever needs a block asks for it."""
        return iter(())

    def held(
        self, world: World, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Count a segment at a time, all at once; then look where the first one has a hole."""
        del world  # a key is of one world only
        deadline = Deadline.within(min(self.options.ask_s, within_s))
        spans, size = [], self.options.segment_blocks
        for head in range(start - start % size, len(keys), size):
            place = segment_place(keys[head][:SEGMENT_BYTES])
            span = keys[max(head, start) : head + size]
            spans.append((place, [self._name(place, key) for key in span]))
        counts = self._exist([(place, [names]) for place, names in spans], deadline)
        found = 0
        for (place, names), count in zip(spans, counts, strict=True):
            if count != [len(names)]:
                singly = [[name] for name in names] if count[0] else []
                [each] = self._exist([(place, singly)], deadline)
                return found + next((at for at, there in enumerate(each) if not there), len(each))
            found += len(names)
        return found

    def condemn(self, batch: Sequence[Get]) -> None:
        """Delete one key a record."""
        deadline = Deadline.within(self.options.ask_s)
        call = _Call([get.place for get in batch])

        def delete(server: Server, connection: RespConnection, part: Part) -> None:
            names = [self._name(*batch[number][:2]) for number in part]
            replies = connection.ask([command(b"DEL", name) for name in names], deadline)
            for number, reply in zip(part, replies, strict=True):
                call.land(number, server, reply if isinstance(reply, Refusal) else Outcome.OK)

        self._run(call, list(range(len(batch))), delete, deadline)

    def reachable(self) -> bool:
        """Return whether any server is worth a call; `holdfast.tiers.base.Reachable`."""
        return self._map.reachable()

    def describe(self) -> dict[str, Any]:
        """Return each server known, its share of the slots, and what its memory is filled with."""
        deadline = Deadline.within(self.options.ask_s)
        shares = self._map.shares(deadline) if self._gate.enter() else None
        if shares is None:
            return {"tier": self.name, "members": []}
        try:
            fills = self._threads.map(lambda server: _fill(server, deadline), shares)
            members = [
                {**server.describe(), "share": share, "tiers": fill}
                for (server, share), fill in zip(shares.items(), fills, strict=True)
            ]
        finally:
            self._gate.leave()
        return {"tier": self.name, "members": members}

    def usage(self) -> Usage:
        """Return what went over the wire; what the server holds is the server's to say."""
        read_bytes, written_bytes, failures = self._usage
        return Usage(0, 0, 0, read_bytes, written_bytes, failures)

    def close(self) -> None:
        """Wait for calls under way, which their deadlines end, and close the connections."""
        self._gate.shut()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._map.close()

    def _name(self, place: Place, key: bytes) -> bytes:
        return b"%b:{%016x}:%b" % (self._prefix, place, key.hex().encode())

    def _exist(
        self, asked: Sequence[tuple[Place, Sequence[Sequence[bytes]]]], deadline: Deadline
    ) -> list[list[int]]:
        """Count how many of each group of names exist; 0 where nobody said so in time."""
        counts = [[0] * len(groups) for _, groups in asked]
        call = _Call([place for place, _ in asked])

        def count(server: Server, connection: RespConnection, part: Part) -> None:
            commands = [command(b"EXISTS", *group) for n in part for group in asked[n][1]]
            replies = iter(connection.ask(commands, deadline))
            for number in part:
                said = [next(replies) for _ in asked[number][1]]
                refusal = next((one for one in said if isinstance(one, Refusal)), Outcome.OK)
                call.land(number, server, refusal)
                counts[number] = [one if isinstance(one, int) else 0 for one in said]

        self._run(call, list(range(len(asked))), count, deadline)
        return counts

    def _run(
        self,
        call: _Call,
        numbers: Part,
        work: Callable[[Server, RespConnection, Part], None],
        deadline: Deadline,
    ) -> None:
        """Do the work at each server, abreast; once more where the map turns out to be old."""
        if not numbers:
            return
        if not self._gate.enter():
            call.fail(numbers, Outcome.GONE)
            return
        try:
            self._pass(call, numbers, work, deadline)
            if call.moved:
                for words, asked in call.moved.values():
                    self._map.moved(words, asked)
                self._pass(call, sorted(call.moved), work, deadline)
        finally:
            self._gate.leave()
        failed = [n for n in numbers if call.outcomes[n] in (Outcome.GONE, Outcome.LATE)]
        if failed:
            self._map.doubt()
            self._count(2, 1)

    def _pass(
        self,
        call: _Call,
        numbers: Part,
        work: Callable[[Server, RespConnection, Part], None],
        deadline: Deadline,
    ) -> None:
        call.moved.clear()
        parts: dict[Server | None, Part] = {}
        for number in numbers:
            server = self._map.server(b"%016x" % call.places[number], deadline)
            parts.setdefault(server, []).append(number)
        call.fail(parts.pop(None, []), Outcome.GONE)

        def visit(server: Server | None, part: Part) -> None:
            if server is not None:
                ended = server.call(lambda connection: work(server, connection, part), deadline)
                call.fail([n for n in part if n not in call.landed], ended)

        if len(parts) == 1:
            visit(*parts.popitem())
        started = [self._threads.submit(visit, *each) for each in parts.items()]
        wait(started)  # whatever became of one: no other uses the caller's memory then
        for done in started:
            done.result()

    def _count(self, which: int, number: int) -> None:
        with self._lock:
            self._usage[which] += number


def _fill(server: Server, deadline: Deadline) -> list[dict[str, Any]]:
    """Ask a server how full it is; a server without a limit of its own names the machine's."""
    replies: list[Reply] = []

    def ask(connection: RespConnection) -> None:
        replies.extend(connection.ask([command(b"INFO", b"memory")], deadline))

    if server.call(ask, deadline) is not Outcome.OK or not isinstance(replies[-1], bytes):
        return []
    said = dict(_INFO.findall(replies[-1]))
    limit = int(said.get(b"maxmemory", 0)) or int(said.get(b"total_system_memory", 0))
    used = int(said.get(b"used_memory", 0))
    return [{"tier": "memory", "used_bytes": used, "capacity_bytes": limit}]


def _context(tls: ValkeyTls | None) -> ssl.SSLContext | None:
    """Return what to dial with; raise ConfigError naming the file that does not do."""
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as error:
        raise ConfigError(
            f"tls_ca: {tls.ca!r} holds no certificates in PEM: {error.strerror or error}; "
            "name the file that signs the server's"
        ) from error
    try:
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key or None)
    except OSError as error:
        raise ConfigError(
            f"tls_cert, tls_key: {tls.cert!r} and {tls.key!r} are no certificate and its key in "
            f"PEM: {error.strerror or error}"
        ) from error
    return context
