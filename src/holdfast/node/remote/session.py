"""One connection of another node to this target: receives and sends whole records.

An incoming record is received directly into a slot of the arena, and published when it is complete.
An outgoing record is sent directly from its slot, which is leased until then. A record without a
free slot is received into a discard buffer, so that the connection stays in sync.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import msgspec

from holdfast.blocks.envelope import HEADER_BYTES as RECORD_HEADER_BYTES
from holdfast.blocks.envelope import Header, read_header, stored_bytes
from holdfast.blocks.namespace import Namespace
from holdfast.codec.pack import lengths_agree
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import HoldfastError, Outcome, ProtocolError, RefusedError
from holdfast.fairness.fair_queue import WorkItem
from holdfast.limits import (
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
)
from holdfast.node.remote.send_budget import SMALL_BYTES
from holdfast.node.remote.service import TargetService
from holdfast.node.validation import BLOCK_TOKENS_MAX, check_bytes, check_within, unpack_chain
from holdfast.session import SECONDS_MAX, check_seconds
from holdfast.store.receive import ReceiveSlot
from holdfast.store.store import Store
from holdfast.tiers.base import NOWHERE, Place
from holdfast.wire.fields import TEXT_CHARS_MAX
from holdfast.wire.frame import HEADER_BYTES, decode_body, encode, read_head
from holdfast.wire.local.messages import List, Refused, ReportReply, Status
from holdfast.wire.remote import messages as m
from holdfast.wire.remote.nixl import MoveLostError, PeerMemory
from holdfast.wire.remote.stream import Deadline, IdleLimit, Stream
from holdfast.wire.remote.token import CLOCK_SKEW_S, TokenClaims

HANDSHAKE_BYTES_MAX = 128 << 10
"""Maximum message size before authentication: a token and NIXL metadata fit."""

_BODY_BUFFER_BYTES = 64 << 10
_BUDGET_FULL = "the send budget of this domain is used up; read what was sent, or ask later"

_DECODER: msgspec.msgpack.Decoder[m.TargetRequest] = msgspec.msgpack.Decoder(m.TargetRequest)
_log = logging.getLogger(__name__)


class ReadRequest(NamedTuple):
    """One request and the length of the payload that follows it."""

    message: m.TargetRequest
    request_id: int
    payload_bytes: int


class ReceiveBuffer:
    """Receives requests. Their ids must count up from 1, so that no request can be replayed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._last_id = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray(_BODY_BUFFER_BYTES))

    def next(
        self, idle_s: float, body_s: float, bytes_max: int = FRAME_BODY_BYTES_MAX
    ) -> ReadRequest:
        """Wait up to `idle_s` for a request to begin, then up to `body_s` for the rest of it.

        The message has at most `bytes_max`, its payload not included.
        Raises OSError on timeout and ProtocolError for an invalid request.
        """
        self._stream.receive([self._head], IdleLimit(idle_s, body_s))
        head = read_head(self._head)
        if head.request_id != self._last_id + 1:
            raise ProtocolError(f"request {head.request_id} follows request {self._last_id}")
        self._last_id = head.request_id
        if head.body_bytes > bytes_max:
            raise ProtocolError(
                f"request {head.request_id} announces {head.body_bytes} bytes, the limit is "
                f"{bytes_max}"
            )
        if head.body_bytes > len(self._body):
            self._body = memoryview(bytearray(head.body_bytes))
        body = self._body[: head.body_bytes]
        self._stream.receive([body], Deadline.within(body_s))
        message = decode_body(_DECODER, body, f"request {head.request_id}")
        if head.payload_bytes and not isinstance(message, m.PutRecords):
            raise ProtocolError(
                f"{type(message).__name__} has a payload of {head.payload_bytes} bytes, not 0"
            )
        return ReadRequest(message, head.request_id, head.payload_bytes)


class TargetSession:
    """Answers one authenticated connection, one request at a time, in the connection's thread."""

    def __init__(
        self,
        service: TargetService,
        stream: Stream,
        inbox: ReceiveBuffer,
        claims: TokenClaims | None,
        peer_memory: PeerMemory | None = None,
        peer: str = "",
    ) -> None:
        self._service = service
        self._store: Store = service.store
        self._stream = stream
        self._inbox = inbox
        self._claims = claims
        self._peer_memory = peer_memory
        self._peer = peer

    def close(self) -> None:
        """Remove the peer's memory from the NIXL agent."""
        if self._peer_memory is not None:
            self._peer_memory.close()

    def serve(self) -> None:
        """Answer until the connection ends. Raises OSError or ProtocolError, which end it."""
        limits, is_logged = self._service.limits, False
        while True:
            asked = self._inbox.next(limits.idle_s, limits.body_s)
            if not is_logged and not isinstance(asked.message, Status | List):
                # Connections of `inspect` and `doctor`, which only ask for these, are not logged.
                is_logged = True
                _log.info("session peer=%r claims=%s", self._peer, self._claims)
            self._service.counters.requests += 1
            match asked.message:
                case m.PutRecords():
                    self._reply(asked, self._put(asked.message, asked.payload_bytes))
                case m.GetRecords():
                    self._get(asked, asked.message)
                case _:
                    self._reply(asked, self._answer(asked.message))

    def _reply(self, asked: ReadRequest, reply: m.TargetReply) -> None:
        self._stream.send([encode(asked.request_id, reply)], self._service.pace())

    def _refusal(self, error: Exception) -> Refused:
        self._service.counters.refused += 1
        if isinstance(error, RefusedError) and self._claims is not None:
            self._store.audit.deny(f"peer {self._claims.peer}", str(error))
        if isinstance(error, HoldfastError):
            return Refused(str(error)[:TEXT_CHARS_MAX])
        _log.error("request failed", exc_info=error)
        return Refused(f"the target failed: {type(error).__name__}; see its log")

    def _answer(self, request: m.TargetRequest) -> m.TargetReply:
        """Answer a request that has no payload in either direction."""
        store = self._store
        try:
            self._check_may(request)
            match request:
                case m.ExistBlocks():
                    return m.Existing(store.held(*_named(request)))
                case m.DeleteBlocks():
                    return m.Counted(store.forget(*_named(request)))
                case m.SuspectBlocks():
                    return m.Counted(store.check_suspects(*_named(request)))
                case m.UseBlocks():
                    return m.Counted(store.use(*_named(request)))
                case m.PrestageBlocks():
                    check_seconds("prestage.in_s", request.in_s, SECONDS_MAX)
                    return m.Counted(store.prestage(*_named(request), request.in_s, 0.0))
                case Status():
                    return ReportReply(self._service.peer_status.read())
                case List():
                    return ReportReply(self._service.peer_listing.read())
                case _:
                    raise ProtocolError(f"{type(request).__name__} was already sent")
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            return self._refusal(error)

    def _get(self, asked: ReadRequest, request: m.GetRecords) -> None:
        """Fetch the named records and send those that are in memory in time."""
        budget, scheduler = self._service.send_budget, self._service.scheduler
        try:
            self._check_may(request)
            check_seconds("get.deadline_s", request.deadline_s, DEADLINE_S_MAX)
            namespace, keys = _named(request)
            self._store.note_indexed(namespace, keys)
            size = namespace.slot_bytes
            blocks = min(FRAME_PAYLOAD_BYTES_MAX // size, len(keys))
            if blocks * size > SMALL_BYTES:
                blocks = min(blocks, self._store.cover(namespace, keys[:blocks]).blocks)
            share = self._store.share(namespace.domain)
            work_item = WorkItem(namespace.domain, blocks * size, share)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            self._reply(asked, self._refusal(error))
            return
        late_at = time.monotonic() + request.deadline_s
        if not budget.acquire(work_item, request.deadline_s):
            self._reply(asked, m.RecordsFollow(b"", Outcome.LATE, _BUDGET_FULL))
            return
        try:
            left_s = max(0.0, late_at - time.monotonic())
            fetched = self._store.fetch_unverified(namespace, keys[:blocks], left_s)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            self._reply(asked, self._refusal(error))
        else:
            try:  # the lease keeps the records in place, however slow the peer is
                records = self._store.outgoing(namespace, fetched.lease, fetched.places)
                is_whole = len(records) == len(fetched.places)
                outcome = fetched.outcome if is_whole else Outcome.LATE
                reason = "" if outcome is Outcome.OK else fetched.reason
                reply = m.RecordsFollow(m.pack_sizes(records), outcome, reason)
                nbytes = sum(map(len, records))
                sent = work_item if nbytes == work_item.cost else work_item._replace(cost=nbytes)
                if request.spans:
                    peer_memory = self._required_memory()
                    self._service.register(namespace, list(map(Place, fetched.places)))
                    scheduler.enter(sent)
                    try:
                        peer_memory.write(request.spans, records)
                    finally:
                        scheduler.leave(sent)
                    self._reply(asked, reply)
                else:
                    frame = encode(asked.request_id, reply, nbytes)
                    scheduler.send(self._stream, [frame, *records], sent, self._service.pace())
                self._service.count_sent(namespace.domain, len(records), nbytes)
            except MoveLostError:
                raise  # the lease stays: the transfer may still read the slots
            except BaseException:
                self._store.release(fetched.lease)
                raise
            else:
                self._store.release(fetched.lease)
        finally:
            budget.release(work_item)

    def _put(self, request: m.PutRecords, payload_bytes: int) -> m.TargetReply:
        """Receive records, or read them from the peer's memory; state for each if it is held."""
        service, store = self._service, self._store
        headers = _headers(request.headers)
        sizes = [header.stored_bytes for header in headers]
        nbytes, slot_bytes = sum(sizes), sum(stored_bytes(each.raw_bytes) for each in headers)
        peer_memory = None
        if request.spans and not payload_bytes:
            peer_memory = self._required_memory()
        elif nbytes != payload_bytes:
            raise ProtocolError(f"{nbytes} bytes of records announced, {payload_bytes} follow")
        slots, refusal = list[ReceiveSlot](), None
        with service.receiving(slot_bytes, headers[0].domain) as granted:
            try:
                self._check_may(request)
                slots = store.receive_slots(headers) if granted else []
            except Exception as error:  # noqa: BLE001  # the payload must still be received
                refusal = self._refusal(error)
            try:
                if peer_memory is not None:
                    if slots:
                        self._read_from(peer_memory, request.spans, slots)
                    nbytes = sum(len(each.record) for each in slots if each.record is not None)
                else:
                    parts: list[memoryview] = []
                    for i, size in enumerate(sizes):
                        part = slots[i].record if slots else None
                        parts += service.discarding(size) if part is None else [part]
                    self._stream.receive(parts, service.pace())
            except MoveLostError:
                raise  # the slots stay allocated: the transfer may still write to them
            except BaseException:
                store.discard_received(slots)
                raise
        service.count_received(headers[0].domain, 0, nbytes)
        if refusal is not None:
            return refusal
        try:
            outcomes = store.publish_received(slots, request.headers)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            return self._refusal(error)
        service.count_received(headers[0].domain, outcomes.count(Outcome.OK), 0)
        if corrupt := outcomes.count(Outcome.CORRUPT):
            service.counters.corrupt += corrupt
        held = bytes(outcome is Outcome.OK for outcome in outcomes)
        return m.Stored(held or bytes(len(headers)))

    def _read_from(self, peer_memory: PeerMemory, spans: bytes, slots: list[ReceiveSlot]) -> None:
        """Register the slots' memory, then read the peer's records into them."""
        for each in slots:
            if each.place != NOWHERE:
                self._service.register(each.namespace, [each.place])
        peer_memory.read(spans, [each.record for each in slots])

    def _required_memory(self) -> PeerMemory:
        if self._peer_memory is None:
            raise ProtocolError("spans without an agent: NIXL was not agreed on")
        return self._peer_memory

    def _check_may(self, request: m.TargetRequest) -> None:
        if self._claims is None:
            return
        verb = m.permission_for(type(request))
        if verb not in self._claims.may:
            raise RefusedError(
                f"token: {self._claims.peer!r} may {', '.join(self._claims.may)}, not {verb}; "
                "make one with `holdfast token --may`"
            )
        over_s = time.time() - self._claims.expires - CLOCK_SKEW_S
        if over_s > 0:
            raise RefusedError(
                f"token: expired {over_s + CLOCK_SKEW_S:.0f} s ago by this target's clock, and "
                f"clocks may differ by {CLOCK_SKEW_S:g} s; connect with a new one"
            )


def _headers(data: bytes) -> list[Header]:
    if len(data) % RECORD_HEADER_BYTES or not data:
        raise ProtocolError(f"put.headers: {len(data)} bytes are no whole number of headers")
    try:
        headers = [
            read_header(data[i : i + RECORD_HEADER_BYTES])[0]
            for i in range(0, len(data), RECORD_HEADER_BYTES)
        ]
        for header in headers:
            check_within("raw_bytes", header.raw_bytes, PAYLOAD_BYTES_MAX)
            check_within("payload_bytes", header.payload_bytes, header.raw_bytes)
            if not lengths_agree(header):
                raise ProtocolError(
                    f"codec {header.codec} makes a payload of {header.payload_bytes} bytes of "
                    f"{header.raw_bytes}; codec 0 keeps the length, others shorten it"
                )
    except HoldfastError as error:
        raise ProtocolError(f"put.headers: {error}") from error
    return headers


def _named(request: m.NamedBlocks) -> tuple[Namespace, list[bytes]]:
    """Return the namespace and keys of a request; raise BlockError if they are invalid."""
    check_bytes("fingerprint", request.fingerprint)
    check_bytes("domain", request.domain)
    check_within("raw_bytes", request.raw_bytes, PAYLOAD_BYTES_MAX)
    check_within("block_tokens", request.block_tokens, BLOCK_TOKENS_MAX)
    namespace = Namespace(
        request.fingerprint, request.domain, request.raw_bytes, request.block_tokens
    )
    return namespace, unpack_chain(request.keys)
