"""Client of one target: reads and writes records over TCP or NIXL, with a deadline per call.

A call takes an idle connection or opens one, and owns it until the answer has arrived. Bytes are
received directly into the caller's buffers, in threads that the call waits for; a connection that
is late or fails is closed before the call returns. So no buffer is written to after the call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.address import page_url, tcp_endpoint
from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.errors import ConfigError, Outcome, ProtocolError, printable
from holdfast.limits import FRAME_PAYLOAD_BYTES_MAX, MIB
from holdfast.status import NodeStatus, read_status
from holdfast.wire.local.messages import Refused, ReportReply, Status
from holdfast.wire.remote import messages as m
from holdfast.wire.remote.batches import BatchPart, parts_of_batch
from holdfast.wire.remote.buffer_pool import (
    FALLBACK_S,
    BufferPool,
    TransferBuffers,
    copy_parts,
)
from holdfast.wire.remote.connection import (
    TargetAnswer,
    TargetBusyError,
    TargetConnection,
    connect,
)
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.dial_pause import DialPause
from holdfast.wire.remote.stream import Deadline, OnProgress
from holdfast.wire.remote.token import WITHOUT_VERB, Verb
from holdfast.workers import parallel, workers

CONNECTIONS = 2
"""Number of idle connections that are kept, however long they are idle."""

BUSY_CONNECTIONS = 6
"""Number of idle connections that are kept for `BUSY_S`: a fetch of a long context uses as many at
once, again and again, and opening one takes several round trips."""

BUSY_S = 10.0
"""Seconds for which more than `CONNECTIONS` idle connections are kept; the end of the next call
closes the others."""

CONNECTIONS_MAX = 16
EXTRA_CONNECTIONS = 4
"""Additional connections for calls without records, so that they do not wait for bulk transfers."""

BATCH_THREADS = 4
"""Threads for the parts of batches; while all are busy, a caller works on every part itself."""

BATCH_PARTS_MAX = 2
"""Default maximum of connections per batch: one per two cores, because copying occupies a core."""

PUT_BYTES = 66 * MIB
"""Maximum payload of one put; the target must have slots for all of it at once.

32 blocks of 2 MiB are one message, their headers included.
"""

DIAL_S = 0.1
"""Seconds that a call must have left to open a connection after it waited for one in vain."""

_FETCH_SHARE = 0.8
"""Share of a deadline that the target may spend before it sends; the rest is transfer time."""

_OUTCOMES = {str(outcome): outcome for outcome in Outcome if outcome is not Outcome.UNSENT}

T = TypeVar("T", bound=msgspec.Struct)
_log = logging.getLogger(__name__)


class _NoneFreeError(Exception):
    """All connections to the target are in use, by this client or by others of the target."""


class ReceivedRecords(NamedTuple):
    """The first `blocks` buffers hold unverified records; `outcome` tells why not all do."""

    blocks: int
    outcome: Outcome
    reason: str = ""


class HeldFlags(NamedTuple):
    """One byte per key, 1 if the target holds it; all 0 if `outcome` is not OK."""

    held: bytes
    outcome: Outcome


class BlockCount(NamedTuple):
    """The number of blocks that a delete or a use found, or that a suspect deleted."""

    blocks: int
    outcome: Outcome


class TargetClient:
    """One target at `tcp://host:port`; any thread may call any method, many at once.

    Failures are outcomes: LATE after the deadline, UNSENT if no connection became free in time,
    GONE if the target cannot be reached or fails. A call that the token does not permit is UNSENT,
    too: the target is well, and its owner decided so. If the target serves no further connection,
    calls share those that this client has, and are UNSENT if it has none; after a pause the next
    call tries to open one. Raises only ConfigError, for credentials that cannot be read, and
    RefusedError, if one side does not accept the other's credentials.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        connections_max: int = CONNECTIONS_MAX,
        batch_parts: int = 0,
        transfer_buffers: TransferBuffers | None = None,
        tls_name: str = "",
    ) -> None:
        """`tls_name`: the name that the target's certificate must have; default: the host."""
        tcp_endpoint(address)
        self.address = address
        self._tls_name = tls_name
        self.refusal = ""
        """The last message with which the target refused a call; cleared by the next answer."""
        self.trouble = ""
        """Why the last call failed; empty if it was answered."""
        self.transport = ""
        """Transport of records on the last connection: nixl or tcp."""
        self.page = ""
        """URL of the target's status page, from the last connection; empty if it has none."""
        self._credentials = credentials or Credentials()
        self._missing = set[Verb]()
        """Permissions that the token lacks, as far as they were logged."""
        self.transfer_buffers = transfer_buffers
        self._tcp_until_s = 0.0
        self._ways = batch_parts or min(BATCH_PARTS_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._free = connections_max + EXTRA_CONNECTIONS
        self._idle: list[tuple[float, TargetConnection]] = []
        """Each with the time since which it is idle; the one used last is last."""
        self._open = 0
        """Number of connections, idle and in use."""
        self._dial_pause = DialPause()
        self._closed = False
        self._pool: ThreadPoolExecutor | None = None

    def put(
        self,
        records: Sequence[memoryview],
        deadline_s: float,
        on_progress: OnProgress | None = None,
    ) -> list[Outcome]:
        """Store whole, packed records: OK (held now) or FULL (no free slot, or a corrupt record).

        `on_progress` is called with the bytes sent since its last call, from any thread, and with 0
        at the end of a wait for a connection. A send that never blocks may not call it.
        """
        deadline = Deadline.within(deadline_s, on_progress)
        if len(records) == 1:  # dividing a batch takes a hundredth of such a call
            return self._put(records, deadline)
        batch_parts = parts_of_batch([*map(len, records)], self._ways, PUT_BYTES)

        def put_part(batch_part: Sequence[slice]) -> list[Outcome]:
            return [*chain.from_iterable(self._put(records[span], deadline) for span in batch_part)]

        done = parallel(put_part, batch_parts, self._workers(batch_parts))
        return [*chain.from_iterable(done)]

    def get(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline_s: float,
        on_progress: OnProgress | None = None,
    ) -> ReceivedRecords:
        """Receive the leading run of records, each into its buffer, which may be longer.

        A record that is longer than its buffer ends the run.
        The content of buffers after the run is undefined. The caller verifies every record.
        `on_progress` is called with the bytes received since its last call, first for the header,
        from any thread, and with 0 at the end of a wait for a connection.
        """
        deadline = Deadline.within(deadline_s, on_progress)
        if len(into) == 1:
            return self._get(namespace, keys, into, deadline)
        batch_parts = parts_of_batch([*map(len, into)], self._ways, FRAME_PAYLOAD_BYTES_MAX)

        def get_part(batch_part: Sequence[slice]) -> ReceivedRecords:
            return _joined(
                (span.stop - span.start, self._get(namespace, keys[span], into[span], deadline))
                for span in batch_part
            )

        wanted = [batch_part[-1].stop - batch_part[0].start for batch_part in batch_parts]
        return _joined(
            zip(wanted, parallel(get_part, batch_parts, self._workers(batch_parts)), strict=True)
        )

    def exist(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> HeldFlags:
        """Ask which of these blocks the target holds; they need not be a leading run."""
        request = self._named(m.ExistBlocks, namespace, keys)
        reply, outcome = self._ask(request, m.Existing, Deadline.within(deadline_s))
        if reply is None or len(reply.held) != len(keys):
            return HeldFlags(bytes(len(keys)), outcome if reply is None else Outcome.GONE)
        return HeldFlags(reply.held, outcome)

    def delete(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> BlockCount:
        """Delete blocks; the next put writes them again."""
        return self._count(self._named(m.DeleteBlocks, namespace, keys), deadline_s)

    def suspect(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> BlockCount:
        """Report blocks that did not verify; the target deletes those that fail its own check.

        A target of an earlier version does not know this request and deletes nothing.
        """
        return self._count(self._named(m.SuspectBlocks, namespace, keys), deadline_s)

    def use(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> BlockCount:
        """State that blocks are in use: the target evicts others first."""
        return self._count(self._named(m.UseBlocks, namespace, keys), deadline_s)

    def prestage(
        self, namespace: Namespace, keys: Sequence[bytes], in_s: float, deadline_s: float
    ) -> BlockCount:
        """Have the target read blocks into its memory within `in_s`; return how many it holds."""
        request = self._named(m.PrestageBlocks, namespace, keys, in_s=in_s)
        return self._count(request, deadline_s)

    def stats(self, deadline_s: float) -> tuple[NodeStatus, Outcome]:
        """Return the target's status; empty if the target is of a version that has another."""
        reply, outcome = self._ask(Status(), ReportReply, Deadline.within(deadline_s))
        try:
            return read_status({} if reply is None else reply.data), outcome
        except ProtocolError:
            return NodeStatus(), outcome

    def probe(self, deadline_s: float) -> Outcome:
        """Ask for the target's status only to learn whether it answers; return OK if it does.

        It does too if it refuses because the token lacks `read`: no request that costs nothing is
        permitted to every token. UNSENT if no connection became free in time.
        """
        answer, outcome = self._exchange(Status(), Deadline.within(deadline_s))
        if answer is not None:
            _, outcome = self._read(answer, ReportReply, "read")
            return Outcome.OK if outcome is Outcome.UNSENT else outcome
        return outcome

    @property
    def is_turned_away(self) -> bool:
        """Whether it has no connection because the target serves no more; `trouble` says so."""
        return self._dial_pause.is_turned_away and not self._open

    def may(self) -> Sequence[Verb]:
        """Return what the token permits; reads its file and asks no target."""
        return self._credentials.may()

    def close(self) -> None:
        """Close idle connections; calls under way complete, later ones are GONE."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._open -= len(idle)
            self._freed.notify_all()
        for _, connection in idle:
            connection.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _put(self, records: Sequence[memoryview], deadline: Deadline) -> list[Outcome]:
        headers = b"".join(record[:HEADER_BYTES] for record in records)
        request = m.PutRecords(headers)
        reply, outcome = self._ask(request, m.Stored, deadline, payload=records)
        if reply is None or len(reply.held) != len(records):
            return [outcome if reply is None else Outcome.GONE] * len(records)
        return [Outcome.OK if held else Outcome.FULL for held in reply.held]

    def _get(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        deadline: Deadline,
    ) -> ReceivedRecords:
        share_s = max(0.0, _FETCH_SHARE * (deadline.at - time.monotonic()))
        request = self._named(m.GetRecords, namespace, keys, deadline_s=share_s)
        size = namespace.slot_bytes
        buffers = [part if len(part) >= size else aligned_buffer(size) for part in into]
        reply, outcome = self._ask(request, m.RecordsFollow, deadline, into=buffers)
        if reply is None:
            return ReceivedRecords(0, outcome)
        announced, sizes = _OUTCOMES.get(reply.outcome), m.unpack_sizes(reply.sizes)
        if announced is None or (announced is Outcome.OK and not sizes):
            return ReceivedRecords(0, Outcome.GONE, f"the target announced {reply!r:.200}")
        for number, (nbytes, part, buffer) in enumerate(zip(sizes, into, buffers, strict=False)):
            if nbytes > len(part):
                return ReceivedRecords(number, Outcome.MISS, "a record is longer than its buffer")
            if buffer is not part:
                copy_parts([buffer[:nbytes]], [part[:nbytes]])
        return ReceivedRecords(len(sizes), announced, printable(reply.reason))

    def _named(
        self, kind: type[T], namespace: Namespace, keys: Sequence[bytes], **more: float
    ) -> T:
        """Return a request about these blocks."""
        return kind(**namespace._asdict(), keys=b"".join(keys), **more)

    def _count(self, request: msgspec.Struct, deadline_s: float) -> BlockCount:
        reply, outcome = self._ask(request, m.Counted, Deadline.within(deadline_s))
        return BlockCount(0 if reply is None else reply.blocks, outcome)

    def _ask(
        self,
        request: msgspec.Struct,
        kind: type[T],
        deadline: Deadline,
        *,
        payload: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
    ) -> tuple[T | None, Outcome]:
        """Return the reply and OK; without a reply None and the outcome."""
        verb = m.permission_for(type(request))
        if verb != "read" and verb not in self.may():
            self._note_missing(verb)
            return None, Outcome.UNSENT
        answer, outcome = self._exchange(request, deadline, payload, into)
        return (None, outcome) if answer is None else self._read(answer, kind, verb)

    def _exchange(
        self,
        request: msgspec.Struct,
        deadline: Deadline,
        payload: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
    ) -> tuple[TargetAnswer | None, Outcome]:
        """Return the answer, which may be a refusal, and OK; without one None and the outcome."""
        try:
            return self._call(request, payload, into, deadline), Outcome.OK
        except _NoneFreeError:
            return None, Outcome.UNSENT
        except TimeoutError as error:
            self.trouble = f"late: {error}"
            _log.debug("late target=%s request=%s: %s", self.address, type(request).__name__, error)
            return None, Outcome.LATE
        except (OSError, ProtocolError) as error:
            self.trouble = printable(str(error) or type(error).__name__)
            _log.debug("gone target=%s request=%s: %s", self.address, type(request).__name__, error)
            return None, Outcome.GONE

    def _read(self, answer: TargetAnswer, kind: type[T], verb: Verb) -> tuple[T | None, Outcome]:
        """Return the reply and OK; of a refusal None, and UNSENT if the token lacks `verb`."""
        if isinstance(answer.message, kind):
            self.trouble = self.refusal = ""
            return answer.message, Outcome.OK
        if verb not in self.may():
            self._note_missing(verb)
            return None, Outcome.UNSENT
        refusal = answer.message.message if isinstance(answer.message, Refused) else "nonsense"
        words = printable(refusal)
        self.trouble = f"refused: {words}"
        if words != self.refusal:
            self.refusal = words
            _log.warning("target=%s answers: %s", self.address, words)
        return None, Outcome.GONE

    def _note_missing(self, verb: Verb) -> None:
        """Note that the token lacks a permission; log it once."""
        may = ", ".join(self.may())
        self.refusal = f"this node's token may {may}, not {verb}; {WITHOUT_VERB[verb]}"
        if verb not in self._missing:
            self._missing.add(verb)
            _log.warning("target=%s is not asked: %s", self.address, self.refusal)

    def _call(
        self,
        request: msgspec.Struct,
        payload: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: Deadline,
    ) -> TargetAnswer:
        """Ask on an idle connection, or on a new one if the idle one was closed by the target."""
        spare = EXTRA_CONNECTIONS if payload or into else 0
        kept: TargetConnection | None = self._claim(deadline, spare)
        try:
            if kept is not None and (kept.spent or self._may_use_nixl_now(kept)):
                replaced, kept = kept, None
                self._drop(replaced)
            while True:
                connection, kept = kept or self._dial_or_wait(deadline), None
                was_used = connection.used
                try:
                    answer = connection.ask(request, payload, into, deadline)
                except BaseException as error:
                    if connection.buffer_pool is not None:
                        self._tcp_until_s = time.monotonic() + FALLBACK_S
                    self._drop(connection)
                    gone = isinstance(error, OSError) and not isinstance(error, TimeoutError)
                    if gone and was_used:
                        continue
                    raise
                if isinstance(answer.message, Refused):
                    # By the target's clock the token may expire earlier than by this node's. Ask
                    # again if there is a newer one than the connection was made with.
                    try:
                        token = self._credentials.token()
                    except ConfigError:
                        token = None
                    if token not in (None, connection.token):
                        self._drop(connection)
                        continue
                kept = connection
                return answer
        finally:
            self._give_back(kept)

    def _claim(self, deadline: Deadline, spare: int) -> TargetConnection | None:
        """Claim one of the connections, leaving `spare` unclaimed; return an idle one, or None."""
        with self._lock:
            waits = self._free <= spare
            while self._free <= spare:
                if not self._freed.wait(max(0.0, deadline.at - time.monotonic())):
                    raise _NoneFreeError
            if self._closed:
                raise ConnectionAbortedError("closed by its owner")
            self._free -= 1
            connection = self._idle.pop()[1] if self._idle else None
        if waits:
            deadline.note(0)
        return connection

    def _may_use_nixl_now(self, connection: TargetConnection) -> bool:
        """Whether a connection is without NIXL, and one made now may have it."""
        is_old = time.monotonic() >= connection.made_s + FALLBACK_S
        return connection.buffer_pool is None and is_old and self._buffer_pool() is not None

    def _buffer_pool(self) -> BufferPool | None:
        """Return the NIXL buffers; None if there are none yet, or a call over NIXL just failed."""
        if self.transfer_buffers is None or time.monotonic() < self._tcp_until_s:
            return None
        return self.transfer_buffers.buffer_pool()

    def _give_back(self, connection: TargetConnection | None) -> None:
        """End a claim, and keep the connection if it is usable; close those idle for too long."""
        now_s, ended = time.monotonic(), list[TargetConnection]()
        with self._lock:
            self._free += 1
            self._freed.notify_all()  # waiters leave different numbers unclaimed
            idle = self._idle
            if connection is not None and self._closed:
                ended.append(connection)
            elif connection is not None:
                idle.append((now_s, connection))
            while len(idle) > CONNECTIONS and (
                len(idle) > BUSY_CONNECTIONS or now_s - idle[0][0] > BUSY_S
            ):
                ended.append(idle.pop(0)[1])
            self._open -= len(ended)
        for each in ended:
            each.close()

    def _drop(self, connection: TargetConnection) -> None:
        """Close a connection that a call has claimed."""
        with self._lock:
            self._open -= 1
            self._freed.notify_all()
        connection.close()

    def _dial_or_wait(self, deadline: Deadline) -> TargetConnection:
        """Return a new connection; if the target serves no more, one that another call ends with.

        Raises _NoneFreeError if this client has none, or none becomes idle in time.
        """
        while True:
            with self._lock:
                may_dial = self._dial_pause.may_dial()
            if may_dial:
                try:
                    return self._dial(deadline)
                except TargetBusyError as error:
                    self.trouble = f"busy: {error}"
            connection = self._next_idle(deadline)
            if connection is not None and not connection.spent:
                deadline.note(0)
                return connection
            if connection is not None:
                self._drop(connection)

    def _next_idle(self, deadline: Deadline) -> TargetConnection | None:
        """Wait for an idle connection; None once a new one may be opened, and there is time to."""
        with self._lock:
            while not self._idle:
                left_s = deadline.at - time.monotonic()
                if not self._open or left_s <= 0:
                    raise _NoneFreeError
                pause_s = self._dial_pause.left_s()
                if not pause_s and left_s > DIAL_S:
                    return None
                self._freed.wait(min(left_s, pause_s or left_s))
            return self._idle.pop()[1]

    def _dial(self, deadline: Deadline) -> TargetConnection:
        buffer_pool = self._buffer_pool()
        try:
            connection = connect(
                self.address, self._credentials, deadline, buffer_pool, self._tls_name
            )
        except BaseException as error:
            with self._lock:
                if isinstance(error, TargetBusyError):
                    self._dial_pause.turned_away()
                else:
                    self._dial_pause.end()
            raise
        with self._lock:
            self._dial_pause.end()
            self._open += 1
        transport = "tcp" if connection.buffer_pool is None else "nixl"
        if buffer_pool is not None and transport != self.transport:
            reason = "" if transport == "nixl" else ", because the target has no NIXL"
            _log.info("records go over %s target=%s%s", transport, self.address, reason)
        self.transport = transport
        self.page = page_url(connection.page, self.address)
        return connection

    def _workers(self, batch_parts: Sequence[BatchPart]) -> ThreadPoolExecutor | None:
        """Return threads for all parts but the caller's, started on first use; None: no threads."""
        if len(batch_parts) < 2:  # noqa: PLR2004  # the caller works on the first
            return None
        with self._lock:
            if self._pool is None and not self._closed and self._ways > 1:
                try:
                    self._pool = workers(max(BATCH_THREADS, self._ways - 1), "holdfast-target")
                except ConfigError as error:
                    _log.warning(
                        "batches go over one connection target=%s: %s", self.address, error
                    )
                    self._ways = 1
            return None if self._closed else self._pool


def _joined(parts: Iterable[tuple[int, ReceivedRecords]]) -> ReceivedRecords:
    """Join the results of consecutive spans, as (wanted blocks, result), up to an incomplete one.

    A target that holds only part of a span answers OK, so the blocks are counted, too.
    """
    blocks = 0
    for wanted, got in parts:
        blocks += got.blocks
        if got.blocks < wanted or got.outcome is not Outcome.OK:
            return got._replace(blocks=blocks)
    return ReceivedRecords(blocks, Outcome.OK if blocks else Outcome.MISS)
