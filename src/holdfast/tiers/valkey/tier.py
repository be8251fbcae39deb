"""The Valkey tier: records under `prefix:{segment}:namespace:key` on a Redis or Valkey server.

The namespace is 32 hex digits of a hash of fingerprint and domain (`namespace_digest`): the
records of one domain neither hide nor replace those of another.

All blocks of a segment have the same hash tag, so a cluster keeps them on one server: the loss of a
server loses its segments, not a block of every chain. The server's eviction policy
(`maxmemory-policy allkeys-lru` is suitable) or `ttl_s` bounds the retention.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.address import HostPort, tcp_endpoint
from holdfast.blocks.envelope import header_of_record, record_length
from holdfast.blocks.namespace import Namespace, namespace_digest, namespace_of
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError, Outcome
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.regular_file import check_regular
from holdfast.tiers.base import (
    AnsweringTier,
    HeldAnswer,
    Place,
    TierGet,
    TierPut,
    TierUsage,
    chain_segments,
)
from holdfast.tiers.gate import MediumGate
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.tiers.unverified_records import UnverifiedRecords, check_again
from holdfast.tiers.valkey.resp import (
    Reply,
    RespConnection,
    RespErrorReply,
    RespLogin,
    command,
    login_commands,
)
from holdfast.tiers.valkey.server import ValkeyServer
from holdfast.tiers.valkey.slots import ServerCluster, SingleServer
from holdfast.wire.remote.stream import Deadline
from holdfast.workers import parallel, workers

if TYPE_CHECKING:
    from holdfast.tiers.valkey.kind import ValkeyOptions

THREADS = 16
"""Threads of one tier for calls to several servers in parallel."""

_INFO = re.compile(rb"(\w+):(\d+)\r\n")


class _BatchCall:
    """Outcomes of a call so far, by index of the batch."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.outcomes: dict[int, Outcome] = {}
        self.moved: dict[int, tuple[str, HostPort]] = {}
        """Items with a MOVED reply: its text, and the address of the server that sent it."""

    def record(self, number: int, server: ValkeyServer, reply: Reply, outcome: Outcome) -> None:
        """Record a server's reply for one item: it means `outcome`, unless it is an error."""
        self.outcomes[number] = outcome
        if not isinstance(reply, RespErrorReply):
            return
        self.outcomes[number] = Outcome.FULL if reply.code == "OOM" else Outcome.GONE
        if reply.code == "MOVED":
            self.moved[number] = reply.text, server.endpoint
        elif reply.code != "ASK":  # a slot in migration; its server will reply MOVED afterwards
            server.backoff.record_refusal(f"{reply.code} {reply.text}")


class ValkeyTier(AnsweringTier):
    """See `holdfast.tiers.base.SharedTier`. Opens even if no server answers yet.

    The constructor raises ConfigError if a password or certificate file cannot be used.
    """

    def __init__(
        self,
        options: ValkeyOptions,
        clock: Clock | None = None,
        name: str = "valkey",
        segment_blocks: int = SEGMENT_BLOCKS,
    ) -> None:
        self.name = name
        self.options = options
        self._segment_blocks = segment_blocks
        clock = clock or SystemClock()
        endpoints = [tcp_endpoint(address) for address in options.addresses]
        login = RespLogin(
            options.user, options.password_file, options.database, _tls_context(options)
        )
        login_commands(login)  # raises now for a password that no connection can use
        self._map = (
            ServerCluster(endpoints, login, clock)
            if options.cluster
            else SingleServer(endpoints[0], login, clock)
        )
        self._prefix = options.prefix.encode()
        self._gate = MediumGate()
        self._unverified = UnverifiedRecords()
        self._wrong_length = UnverifiedRecords()
        """Records that are longer than a slot of their block, or not whole sectors."""
        self._threads = workers(THREADS, f"holdfast-{name}")
        self._counts = TransferCounts()

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Set one key per record; FULL if the server has no memory left.

        An existing record stays and counts as written, because it may be sealed with a data key
        that only other hosts have. A record of an impossible length, or one that this host has
        marked unverified, is replaced.
        """
        names: dict[int, bytes] = {}
        replaced: dict[bytes, tuple[Namespace, bytes]] = {}
        for number, put in enumerate(batch):
            header = header_of_record(put.record)
            if header is None:
                continue
            namespace = namespace_of(header)
            name = names[number] = self._name(put.place, namespace, header.key)
            is_wrong = self._wrong_length.has(namespace, header.key)
            if is_wrong or self._unverified.is_replaced_by(namespace, header):
                replaced[name] = namespace, header.key
        deadline = Deadline.within(self.options.deadline_s)
        call = _BatchCall([put.place for put in batch])

        def store(server: ValkeyServer, connection: RespConnection, part: list[int]) -> None:
            records = [(names[number], batch[number].record) for number in part]
            replies = connection.put(records, self.options.ttl_s, deadline, replaced)
            for number, reply in zip(part, replies, strict=True):
                stored = Outcome.OK if reply in (b"OK", None) else Outcome.GONE
                call.record(number, server, reply, stored)

        self._run(call, [*names], store, deadline)
        outcomes = [call.outcomes.get(number, Outcome.CORRUPT) for number in range(len(batch))]
        for number, name in names.items():
            if outcomes[number] is Outcome.OK:
                self._counts.add(written_bytes=len(batch[number].record))
            if outcomes[number] is Outcome.OK and name in replaced:
                self._unverified.unmark(*replaced[name])
                self._wrong_length.unmark(*replaced[name])
        return outcomes

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Receive records into their buffers; records received before a failure are OK."""
        deadline = Deadline.within(self.options.deadline_s)
        call = _BatchCall([get.place for get in batch])

        def fetch(server: ValkeyServer, connection: RespConnection, part: list[int]) -> None:
            wanted = [(self._name_of(batch[number]), batch[number].into) for number in part]
            for number, found in zip(part, connection.get(wanted, deadline), strict=True):
                if found is None and len(batch[number].into) >= batch[number].namespace.slot_bytes:
                    self._wrong_length.add(batch[number].namespace, batch[number].key)
                call.record(number, server, found, Outcome.OK if found is True else Outcome.MISS)

        self._run(call, range(len(batch)), fetch, deadline)
        outcomes = [call.outcomes[number] for number in range(len(batch))]
        received = [g.into for g, o in zip(batch, outcomes, strict=True) if o is Outcome.OK]
        self._counts.add(read_bytes=sum(map(record_length, received)))
        return outcomes

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> HeldAnswer:
        """Count the blocks of all segments at once, then check each of the first incomplete one.

        OK if the server of the first missing block has answered.
        """
        deadline = Deadline.within(min(self.options.ask_s, within_s))
        spans = [
            (place, [self._name(place, namespace, keys[number]) for number in blocks])
            for place, blocks in chain_segments(keys, start, self._segment_blocks)
        ]
        counts, outcomes = self._exist([(place, [names]) for place, names in spans], deadline)
        found = 0
        for number, ((place, names), count) in enumerate(zip(spans, counts, strict=True)):
            if count == [0]:
                return HeldAnswer(found, outcomes[number])
            if count != [len(names)]:
                [each], [outcome] = self._exist([(place, [[name] for name in names])], deadline)
                run = next((at for at, held in enumerate(each) if not held), len(each))
                return HeldAnswer(found + run, outcome)
            found += len(names)
        return HeldAnswer(found, Outcome.OK)

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        """Read the records again, and delete those that fail a check without a key."""
        self.delete(check_again(self.read, batch, self._unverified))

    def delete(self, batch: Sequence[TierGet]) -> None:
        """Delete one key per record."""
        deadline = Deadline.within(self.options.ask_s)
        call = _BatchCall([get.place for get in batch])

        def delete(server: ValkeyServer, connection: RespConnection, part: list[int]) -> None:
            names = [self._name_of(batch[number]) for number in part]
            replies = connection.ask([command(b"DEL", name) for name in names], deadline)
            for number, reply in zip(part, replies, strict=True):
                call.record(number, server, reply, Outcome.OK)

        self._run(call, range(len(batch)), delete, deadline)

    def reachable(self) -> bool:
        """Return whether a circuit breaker permits a call to any server."""
        return self._map.reachable()

    def describe(self) -> dict[str, Any]:
        """Return each known server with its health, share of the slots and memory usage."""
        deadline = Deadline.within(self.options.ask_s)
        with self._gate.enter() as admitted:
            shares = self._map.shares(deadline) if admitted else {}
            usages = self._threads.map(lambda server: _memory_usage(server, deadline), shares)
            members = [
                {**server.describe(), "share": share, "tiers": usage}
                for (server, share), usage in zip(shares.items(), usages, strict=True)
            ]
        return {"tier": self.name, "members": members}

    def usage(self) -> TierUsage:
        """Return the bytes read and written and the failures; `describe` has the servers' usage."""
        return self._counts.usage()

    def close(self) -> None:
        """Wait for calls in progress, which end by their deadlines, and close the connections."""
        self._gate.shut()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._map.close()

    def _name_of(self, get: TierGet) -> bytes:
        return self._name(get.place, get.namespace, get.key)

    def _name(self, place: Place, namespace: Namespace, key: bytes) -> bytes:
        digest = namespace_digest(namespace).hex().encode()
        return b"%b:{%016x}:%b:%b" % (self._prefix, place, digest, key.hex().encode())

    def _exist(
        self, queries: Sequence[tuple[Place, Sequence[Sequence[bytes]]]], deadline: Deadline
    ) -> tuple[list[list[int]], list[Outcome]]:
        """Return how many names of each group exist, 0 without an answer in time.

        Also returns an outcome for each place: OK if its server has answered.
        """
        counts = [[0] * len(groups) for _, groups in queries]
        call = _BatchCall([place for place, _ in queries])

        def count(server: ValkeyServer, connection: RespConnection, part: list[int]) -> None:
            commands = [command(b"EXISTS", *group) for n in part for group in queries[n][1]]
            replies = iter(connection.ask(commands, deadline))
            for number in part:
                answers = [next(replies) for _ in queries[number][1]]
                errors = (one for one in answers if isinstance(one, RespErrorReply))
                call.record(number, server, next(errors, None), Outcome.OK)
                counts[number] = [one if isinstance(one, int) else 0 for one in answers]

        self._run(call, range(len(queries)), count, deadline)
        return counts, [call.outcomes[number] for number in range(len(queries))]

    def _run(
        self,
        call: _BatchCall,
        numbers: Sequence[int],
        work: Callable[[ValkeyServer, RespConnection, list[int]], None],
        deadline: Deadline,
    ) -> None:
        """Call `work` for each server in parallel; repeat it for items that have moved."""
        with self._gate.enter() as admitted:
            if not admitted:
                call.outcomes.update(dict.fromkeys(numbers, Outcome.GONE))
                return
            self._run_once(call, numbers, work, deadline)
            if call.moved:
                for target, sender in call.moved.values():
                    self._map.moved(target, sender)
                self._run_once(call, sorted(call.moved), work, deadline)
        if any(call.outcomes[n] in (Outcome.GONE, Outcome.LATE) for n in numbers):
            self._map.invalidate()
            self._counts.add(failures=1)

    def _run_once(
        self,
        call: _BatchCall,
        numbers: Sequence[int],
        work: Callable[[ValkeyServer, RespConnection, list[int]], None],
        deadline: Deadline,
    ) -> None:
        call.moved.clear()
        parts: dict[ValkeyServer, list[int]] = {}
        for number in numbers:
            server = self._map.server(b"%016x" % call.places[number], deadline)
            if server is None:
                call.outcomes[number] = Outcome.GONE
            else:
                parts.setdefault(server, []).append(number)

        def visit(server_and_part: tuple[ValkeyServer, list[int]]) -> None:
            server, part = server_and_part
            ended = server.call(lambda connection: work(server, connection, part), deadline)
            call.outcomes.update({n: ended for n in part if n not in call.outcomes})

        parallel(visit, [*parts.items()], self._threads)


def _memory_usage(server: ValkeyServer, deadline: Deadline) -> list[dict[str, Any]]:
    """Return a server's memory usage; the capacity is the machine's if it has no own limit."""
    reply = server.ask(command(b"INFO", b"memory"), deadline)
    if not isinstance(reply, bytes):
        return []
    info = dict(_INFO.findall(reply))
    limit = int(info.get(b"maxmemory", 0)) or int(info.get(b"total_system_memory", 0))
    used = int(info.get(b"used_memory", 0))
    return [{"tier": "memory", "used_bytes": used, "capacity_bytes": limit}]


def _tls_context(options: ValkeyOptions) -> ssl.SSLContext | None:
    """Return the TLS context; raise ConfigError, naming the file, if a file cannot be used."""
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    if not ca:
        return None
    try:
        check_regular(Path(ca))
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(
            f"tls_ca: {ca!r} holds no certificates in PEM: {error.strerror or error}; "
            "name the file of the CA that signs the server's certificate"
        ) from error
    try:
        if cert:
            check_regular(Path(cert))
            check_regular(Path(key or cert))
            context.load_cert_chain(cert, key or None)
    except OSError as error:
        raise ConfigError(
            f"tls_cert, tls_key: {cert!r} and {key!r} are not a certificate and its key "
            f"in PEM: {error.strerror or error}"
        ) from error
    return context
