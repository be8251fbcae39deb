"""A target as a node uses it: records over TCP, every call over by its deadline.

A call borrows a connection, or opens one, and owns it until its answer is here. Received bytes go
straight into the caller's buffers, in threads that the call waits for; a connection that is late
or wrong is closed before the call returns. So nothing is ever written into a buffer after that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.world import World
from holdfast.errors import ConfigError, Outcome, ProtocolError
from holdfast.limits import FRAME_PAYLOAD_BYTES_MAX, MIB
from holdfast.wire import target_messages as m
from holdfast.wire.address import tcp_endpoint
from holdfast.wire.credentials import Credentials
from holdfast.wire.frame import plain
from holdfast.wire.lanes import Lane, abreast, is_one_message, lanes_of
from holdfast.wire.messages import Refused, Report, Status
from holdfast.wire.stream import Deadline, Heard
from holdfast.wire.target_connection import Answer, Connection, connect
from holdfast.wire.window import Detour, Road
from holdfast.workers import workers

CONNECTIONS = 2
CONNECTIONS_MAX = 16
BESIDE_MAX = 4
"""Connections beside those, for what carries no records: no question waits for our own bulk."""

LANES_MAX = 2
"""How many, unless said otherwise: one for every two cores, as copying a byte keeps one busy."""

PUT_BYTES = 66 * MIB
"""What one message puts at most; the target must find room for all of it at once.

32 blocks of 2 MiB are one message, their headers included.
"""

_FETCH_SHARE = 0.8
"""How much of a deadline the target may spend before it sends; the rest is for the way."""

_OUTCOMES = {str(outcome): outcome for outcome in Outcome if outcome is not Outcome.UNSENT}

T = TypeVar("T", bound=msgspec.Struct)
_log = logging.getLogger(__name__)


class _NoneFreeError(Exception):
    """Every connection that a call might have had is in use, by calls of our own."""


class Got(NamedTuple):
    """The first `blocks` buffers hold records, unverified; `outcome` says why not more, if so."""

    blocks: int
    outcome: Outcome
    reason: str = ""


class Held(NamedTuple):
    """One byte per key, 1 if the target holds it; all 0 where `outcome` is not OK."""

    held: bytes
    outcome: Outcome


class Found(NamedTuple):
    """How many blocks a delete, stage or lease found."""

    blocks: int
    outcome: Outcome


class Target:
    """One target at `tcp://host:port`; any thread may call any method, many at once.

    Failures are outcomes: LATE past the deadline, UNSENT if no connection of ours was free by then,
    GONE where there is no target. Raised are only ConfigError, for credentials that can not be
    read, and RefusedError, where one side does not accept the other's.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        connections: int = CONNECTIONS,
        connections_max: int = CONNECTIONS_MAX,
        lanes: int = 0,
        road: Road | None = None,
    ) -> None:
        tcp_endpoint(address)
        self.address = address
        self.epoch = 0
        """Our view of the pool; goes along with every request."""
        self.seen_epoch = 0
        """The target's, as it last said."""
        self.incarnation = ""
        self.refusal = ""
        """What the target last said instead of an answer."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.late = 0
        self.gone = 0
        self.over = ""
        """What records go over, as of the last connection: nixl or tcp."""
        self._credentials = credentials or Credentials()
        self.road = road
        self._detour = Detour(road)
        self._keep = connections
        self._ways = lanes or min(LANES_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._free = connections_max + BESIDE_MAX
        self._idle: list[Connection] = []
        self._closed = False
        self._connections_max = connections_max
        self._beside: ThreadPoolExecutor | None = None

    def put(
        self, records: Sequence[memoryview], deadline_s: float, heard: Heard | None = None
    ) -> list[Outcome]:
        """Store whole, packed records: OK (held now), FULL (no room, or not what it says).

        `heard` is told how many more bytes went, where they do not go at once, and 0 if a
        connection had to be waited for, when it was there; by any thread.
        """
        deadline = Deadline.within(deadline_s, heard)
        if len(records) == 1:
            return self._put(records, deadline)
        lanes = lanes_of([*map(len, records)], self._ways, PUT_BYTES)
        if is_one_message(lanes):
            return self._put(records, deadline)

        def put_lane(lane: Sequence[slice]) -> list[Outcome]:
            return [one for span in lane for one in self._put(records[span], deadline)]

        return [one for done in abreast(put_lane, lanes, self._workers(lanes)) for one in done]

    def get(
        self,
        world: World,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,
        heard: Heard | None = None,
    ) -> Got:
        """Receive the leading run of records into buffers of `world.record_bytes` each.

        What lies in the buffers behind the run is undefined. The caller verifies every record.
        `heard` is told how many more bytes came, now and then, the first at once, and what `put`
        tells of connections; by any thread.
        """
        deadline = Deadline.within(deadline_s, heard)
        if len(into) == 1:
            return self._get(world, keys, into, deadline)
        lanes = lanes_of([*map(len, into)], self._ways, FRAME_PAYLOAD_BYTES_MAX)
        if is_one_message(lanes):
            return self._get(world, keys, into, deadline)

        def get_lane(lane: Sequence[slice]) -> Got:
            return _joined(
                (span.stop - span.start, self._get(world, keys[span], into[span], deadline))
                for span in lane
            )

        wanted = [lane[-1].stop - lane[0].start for lane in lanes]
        return _joined(zip(wanted, abreast(get_lane, lanes, self._workers(lanes)), strict=True))

    def exist(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Held:
        """Ask which of these blocks the target holds, whatever the order."""
        request = m.Exist(**m.named(world, keys), epoch=self.epoch)
        reply, outcome, _ = self._ask(request, m.Existing, Deadline.within(deadline_s))
        if reply is None or len(reply.held) != len(keys):
            return Held(bytes(len(keys)), outcome if reply is None else Outcome.GONE)
        self.seen_epoch = reply.epoch
        return Held(reply.held, outcome)

    def delete(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Found:
        """Have blocks forgotten; the next put really writes them again."""
        return self._count(m.Delete(**m.named(world, keys), epoch=self.epoch), deadline_s)

    def stage(self, world: World, keys: Sequence[bytes], deadline_s: float) -> Found:
        """Have the leading run brought to the target's memory; returns before that is done."""
        return self._count(m.Stage(**m.named(world, keys), epoch=self.epoch), deadline_s)

    def lease(self, world: World, keys: Sequence[bytes], ttl_s: float, deadline_s: float) -> Found:
        """Have the leading run brought to the target's memory and kept there for `ttl_s`."""
        request = m.Lease(**m.named(world, keys), ttl_s=ttl_s, epoch=self.epoch)
        return self._count(request, deadline_s)

    def stats(self, deadline_s: float) -> tuple[dict[str, Any], Outcome]:
        """Return what the target says of itself."""
        reply, outcome, _ = self._ask(Status(), Report, Deadline.within(deadline_s))
        return ({} if reply is None else dict(reply.data)), outcome

    def close(self) -> None:
        """Close the connections; calls under way come to their end, later ones are GONE."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._beside is not None:
            self._beside.shutdown(wait=True, cancel_futures=True)

    def _put(self, records: Sequence[memoryview], deadline: Deadline) -> list[Outcome]:
        headers = b"".join(record[:HEADER_BYTES] for record in records)
        request = m.Put(headers, self.epoch)
        reply, outcome, _ = self._ask(request, m.Stored, deadline, payload=records)
        if reply is None or len(reply.held) != len(records):
            return [outcome if reply is None else Outcome.GONE] * len(records)
        self.seen_epoch = reply.epoch
        self.sent_bytes += sum(len(record) for record in records)
        return [Outcome.OK if held else Outcome.FULL for held in reply.held]

    def _get(
        self, world: World, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline
    ) -> Got:
        share_s = max(0.0, _FETCH_SHARE * (deadline.at - time.monotonic()))
        request = m.Get(**m.named(world, keys), deadline_s=share_s, epoch=self.epoch)
        reply, outcome, nbytes = self._ask(request, m.Records, deadline, into=into)
        if reply is None:
            return Got(0, outcome)
        self.seen_epoch = reply.epoch
        self.received_bytes += nbytes
        told = _OUTCOMES.get(reply.outcome)
        nothing = told is Outcome.OK and not reply.blocks
        if told is None or nothing or reply.blocks * world.record_bytes != nbytes:
            return Got(0, Outcome.GONE, f"the target announced {reply!r:.200}")
        return Got(reply.blocks, told, reply.reason)

    def _count(self, request: msgspec.Struct, deadline_s: float) -> Found:
        reply, outcome, _ = self._ask(request, m.Counted, Deadline.within(deadline_s))
        return Found(0 if reply is None else reply.blocks, outcome)

    def _ask(
        self,
        request: msgspec.Struct,
        kind: type[T],
        deadline: Deadline,
        *,
        payload: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
    ) -> tuple[T | None, Outcome, int]:
        """Return the reply and the bytes of its payload, or None and why there is none."""
        try:
            answer = self._call(request, payload, into, deadline)
        except _NoneFreeError:
            return None, Outcome.UNSENT, 0
        except TimeoutError as error:
            self.late += 1
            _log.debug("late target=%s request=%s: %s", self.address, type(request).__name__, error)
            return None, Outcome.LATE, 0
        except (OSError, ProtocolError) as error:
            self.gone += 1
            _log.debug("gone target=%s request=%s: %s", self.address, type(request).__name__, error)
            return None, Outcome.GONE, 0
        if isinstance(answer.message, kind):
            return answer.message, Outcome.OK, answer.payload_bytes
        self.gone += 1
        said = answer.message.message if isinstance(answer.message, Refused) else "nonsense"
        words = plain(said)
        if words != self.refusal:
            self.refusal = words
            _log.warning("target=%s answers: %s", self.address, words)
        return None, Outcome.GONE, 0

    def _call(
        self,
        request: msgspec.Struct,
        payload: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: Deadline,
    ) -> Answer:
        """Ask on a connection that was idle, or on a new one if the idle one has died."""
        kept: Connection | None = self._claim(deadline, BESIDE_MAX if payload or into else 0)
        try:
            while True:
                connection, kept = kept or self._dial(deadline), None
                seasoned = connection.used
                try:
                    answer = connection.ask(request, payload, into, deadline)
                except BaseException as error:
                    self._drop(connection)
                    gone = isinstance(error, OSError) and not isinstance(error, TimeoutError)
                    if gone and seasoned:
                        continue
                    raise
                if isinstance(answer.message, Refused) and self._renewed(connection):
                    connection.close()
                    continue
                kept = connection
                return answer
        finally:
            self._give_back(kept)

    def _renewed(self, connection: Connection) -> bool:
        """Whether a connection that was refused shows an older token than there is by now.

        By the target's clock that one may be over long before it is by ours.
        """
        try:
            token = self._credentials.token()
        except ConfigError:
            return False
        return token is not None and token.text != connection.claims

    def _claim(self, deadline: Deadline, spare: int) -> Connection | None:
        """Wait for the right to use one connection; return an idle one, if there is any."""
        with self._lock:
            waits = self._free <= spare
            while self._free <= spare:
                if not self._freed.wait(max(0.0, deadline.at - time.monotonic())):
                    raise _NoneFreeError
            if self._closed:
                raise ConnectionAbortedError("closed by its owner")
            self._free -= 1
            connection = self._idle.pop() if self._idle else None
        if waits:
            deadline.note(0)
        if connection is None or not (connection.spent or self._outdated(connection)):
            return connection
        connection.close()
        return None

    def _outdated(self, connection: Connection) -> bool:
        return connection.window is None and self._detour.is_over(connection.made_s)

    def _give_back(self, connection: Connection | None) -> None:
        """Give the right back, and the connection if it is still good."""
        with self._lock:
            self._free += 1
            self._freed.notify_all()  # who comes first may wait for more than one
            keep = connection is not None and len(self._idle) < self._keep and not self._closed
            if keep and connection is not None:
                self._idle.append(connection)
        if connection is not None and not keep:
            connection.close()

    def _drop(self, connection: Connection) -> None:
        """Close a connection that failed; if records went over NIXL, they go over TCP for now."""
        if connection.window is not None:
            self._detour.begin()
        connection.close()

    def _dial(self, deadline: Deadline) -> Connection:
        window = self._detour.window()
        connection = connect(self.address, self._credentials, deadline, window)
        self.incarnation, self.seen_epoch = connection.incarnation, connection.epoch
        over = "tcp" if connection.window is None else "nixl"
        if window is not None and over != self.over:
            reason = "" if over == "nixl" else ", as NIXL is not there on its side"
            _log.info("records go over %s target=%s%s", over, self.address, reason)
        self.over = over
        return connection

    def _workers(self, lanes: Sequence[Lane]) -> ThreadPoolExecutor | None:
        """Return threads for lanes beside the caller's, started when first wanted; None: none."""
        if len(lanes) < 2:  # noqa: PLR2004  # the caller works on the first
            return None
        with self._lock:
            if self._beside is None and not self._closed and self._ways > 1:
                try:
                    self._beside = workers(self._connections_max, "holdfast-target")
                except ConfigError as error:
                    _log.warning(
                        "batches go over one connection target=%s: %s", self.address, error
                    )
                    self._ways = 1
            return None if self._closed else self._beside


def _joined(parts: Iterable[tuple[int, Got]]) -> Got:
    """Join what was got of consecutive spans of so many blocks, up to the first not whole.

    A target that has less of a span says "ok" to it: what lies behind the hole does not count.
    """
    blocks = 0
    for wanted, got in parts:
        blocks += got.blocks
        if got.blocks < wanted or got.outcome is not Outcome.OK:
            return got._replace(blocks=blocks)
    return Got(blocks, Outcome.OK if blocks else Outcome.MISS)
