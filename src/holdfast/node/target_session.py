"""One connection of another node to this one: whole records in, whole records out.

A record that comes is received straight into a slot of the arena and published once all of it is
here; a record that goes is sent straight from its slot, which is kept until it is sent. What there
is no room for is received all the same, into memory that nobody reads: the connection stays in
step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.blocks.envelope import HEADER_BYTES as RECORD_HEADER_BYTES
from holdfast.blocks.envelope import Header, read_header, record_bytes
from holdfast.blocks.key import KEY_BYTES, unpack_keys
from holdfast.blocks.world import World
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import FormatError, HoldfastError, Outcome, ProtocolError, RefusedError
from holdfast.limits import (
    CHAIN_BLOCKS_MAX,
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
)
from holdfast.node.outgoing import SMALL_BYTES
from holdfast.node.target_reach import Reach
from holdfast.node.target_service import Service
from holdfast.policy.turns import Turn
from holdfast.store.adopt import Berth
from holdfast.store.fetch import Fetched
from holdfast.store.store import Store
from holdfast.wire import target_messages as m
from holdfast.wire.frame import HEADER_BYTES, Head, encode, plain, read_head
from holdfast.wire.messages import List, Refused, Report, Status
from holdfast.wire.nixl import MoveLostError
from holdfast.wire.stream import Deadline, Idle, Stream
from holdfast.wire.token import CLOCK_SKEW_S, Claims, Verb

STRANGER_BYTES_MAX = 128 << 10
"""Most bytes of a message from who has not joined: a token, and what NIXL tells of itself."""

LEASE_TTL_S_MAX = 300.0
_CLIMB_S = 5.0
_BODY_ROOM_BYTES = 64 << 10
_TOO_MUCH = "as much of this domain is being sent as may be; take it, or ask later"

T = TypeVar("T")
_DECODER = msgspec.msgpack.Decoder(m.TargetRequest)
_NEEDS: dict[type[msgspec.Struct], Verb] = {m.Put: "write", m.Delete: "delete"}
_log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """One request and the length of the payload that follows it."""

    message: m.TargetRequest
    request_id: int
    payload_bytes: int


class _Order(NamedTuple):
    """Blocks that a peer wants: where their records go (empty: behind the answer), whose turn."""

    asked: Asked
    spans: bytes
    world: World
    keys: Sequence[bytes]
    turn: Turn


class Inbox:
    """Receives requests; their ids must count up from 1, so nothing can be said twice."""

    def __init__(self, stream: Stream) -> None:
        self.body_bytes_max = STRANGER_BYTES_MAX
        """More for those who have joined: what a stranger says takes memory, too."""
        self._stream = stream
        self._last_id = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray(_BODY_ROOM_BYTES))

    def next(self, idle_s: float, body_s: float) -> Asked:
        """Wait for a request for `idle_s`, then for the rest of it.

        Raises OSError where none comes in time, ProtocolError for garbage.
        """
        self._stream.receive([self._head], Idle(idle_s, body_s))
        head = read_head(self._head)
        if head.request_id != self._last_id + 1:
            raise ProtocolError(f"request {head.request_id} follows request {self._last_id}")
        self._last_id = head.request_id
        if head.body_bytes > self.body_bytes_max:
            raise ProtocolError(
                f"request {head.request_id} announces {head.body_bytes} bytes, the limit is "
                f"{self.body_bytes_max}"
            )
        if head.body_bytes > len(self._body):
            self._body = memoryview(bytearray(head.body_bytes))
        body = self._body[: head.body_bytes]
        self._stream.receive([body], Deadline.within(body_s))
        message = self._decode(head, body)
        if head.payload_bytes and not isinstance(message, m.Put):
            raise ProtocolError(f"{type(message).__name__} with {head.payload_bytes} bytes behind")
        return Asked(message, head.request_id, head.payload_bytes)

    def _decode(self, head: Head, body: memoryview) -> m.TargetRequest:
        try:
            message: m.TargetRequest = _DECODER.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"request {head.request_id} is not ours: {plain(error)}") from error
        return message


class TargetSession:
    """Answers one joined connection, one request after the other, in the connection's thread."""

    def __init__(
        self,
        service: Service,
        stream: Stream,
        inbox: Inbox,
        claims: Claims | None,
        reach: Reach | None = None,
    ) -> None:
        self._service = service
        self._store: Store = service.store
        self._stream = stream
        self._inbox = inbox
        inbox.body_bytes_max = FRAME_BODY_BYTES_MAX
        self._claims = claims
        self._reach = reach

    def close(self) -> None:
        """Forget the peer's memory."""
        if self._reach is not None:
            self._reach.close()

    def serve(self) -> None:
        """Answer until the connection ends. Raises OSError or ProtocolError, which end it."""
        limits = self._service.limits
        while True:
            asked = self._inbox.next(limits.idle_s, limits.body_s)
            self._service.counters.requests += 1
            match asked.message:
                case m.Put():
                    self._reply(asked, self._put(asked.message, asked.payload_bytes))
                case m.Get():
                    self._get(asked, asked.message)
                case _:
                    self._reply(asked, self._answer(asked.message))

    def _reply(self, asked: Asked, reply: m.TargetReply) -> None:
        self._stream.send([encode(asked.request_id, reply)], self._service.pace())

    def _refusal(self, error: Exception) -> Refused:
        self._service.counters.refused += 1
        if isinstance(error, RefusedError) and self._claims is not None:
            self._store.audit.deny(f"peer {self._claims.peer}", str(error))
        if isinstance(error, HoldfastError):
            return Refused(str(error))
        _log.error("request failed", exc_info=error)
        return Refused(f"the target failed: {type(error).__name__}; see its log")

    def _answer(self, request: m.TargetRequest) -> m.TargetReply:
        try:
            self._check_may(request)
            return self._state(request)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            return self._refusal(error)

    def _state(self, request: m.TargetRequest) -> m.TargetReply:
        """Answer what needs no payload."""
        store, epoch = self._store, self._service.epoch
        match request:
            case m.Exist():
                return m.Existing(store.held(*_named(request)), epoch)
            case m.Delete():
                return m.Counted(store.forget(*_named(request)), epoch)
            case m.Stage():
                return m.Counted(self._service.stage(*_named(request)), epoch)
            case m.Lease():
                return m.Counted(self._lease(request), epoch)
            case Status():
                return Report({**store.status(), "target": self._service.status()})
            case List():
                return Report({"blocks": store.listing()})
            case _:
                raise ProtocolError(f"{type(request).__name__} was said already")

    def _lease(self, request: m.Lease) -> int:
        if not 0 < request.ttl_s <= LEASE_TTL_S_MAX:
            raise ProtocolError(
                f"lease.ttl_s: {request.ttl_s:g} is not above 0 and at most {LEASE_TTL_S_MAX:g}"
            )
        world, keys = _named(request)
        wanted = self._store.cover(world, keys).blocks * world.record_bytes
        with self._service.leasing(wanted, request.ttl_s) as leasing:
            lent = self._store.lend(world, keys[: leasing.granted // world.record_bytes], _CLIMB_S)
            try:
                blocks = self._store.lease(world, keys[: len(lent.places)], request.ttl_s)
            finally:
                self._store.release(lent.lease)
            leasing.taken = blocks * world.record_bytes
        return blocks

    def _get(self, asked: Asked, request: m.Get) -> None:
        kept = self._service.kept
        try:
            self._check_may(request)
            if not 0 <= request.deadline_s <= DEADLINE_S_MAX:
                raise ProtocolError(
                    f"get.deadline_s: {request.deadline_s:g} is not from 0 to {DEADLINE_S_MAX:g}"
                )
            order = self._order(asked, request)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            self._reply(asked, self._refusal(error))
            return
        late_at = time.monotonic() + request.deadline_s
        if not kept.take(order.turn, request.deadline_s):
            self._reply(asked, m.Records(0, Outcome.LATE, _TOO_MUCH, self._service.epoch))
            return
        try:
            self._lend(order, max(0.0, late_at - time.monotonic()))
        finally:
            kept.give(order.turn)

    def _order(self, asked: Asked, request: m.Get) -> _Order:
        world, keys = _named(request)
        size = world.record_bytes
        blocks = min(FRAME_PAYLOAD_BYTES_MAX // size, len(keys))
        if blocks * size > SMALL_BYTES:
            blocks = min(blocks, self._store.cover(world, keys[:blocks]).blocks)
        turn = Turn(world.domain, blocks * size, self._store.share(world.domain))
        return _Order(asked, request.spans, world, keys[:blocks], turn)

    def _lend(self, order: _Order, within_s: float) -> None:
        """Send what of an order is there in time."""
        try:
            lent = self._store.lend(order.world, order.keys, within_s)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            self._reply(order.asked, self._refusal(error))
            return
        try:
            self._send(order, lent)
        finally:
            self._store.release(lent.lease)

    def _send(self, order: _Order, lent: Fetched) -> None:
        """Send what was lent, which stays where it is meanwhile, however slow the peer is."""
        asked, world, line = order.asked, order.world, self._service.line
        records = self._store.outgoing(world, lent.lease, lent.places)
        outcome = lent.outcome if len(records) == len(lent.places) else Outcome.LATE
        reason = "" if outcome is Outcome.OK else lent.reason
        reply = m.Records(len(records), outcome, reason, self._service.epoch)
        nbytes = sum(map(len, records))
        turn = order.turn if nbytes == order.turn.cost else order.turn._replace(cost=nbytes)
        if order.spans:
            line.enter(turn)
            try:
                self._reached().deliver(order.spans, records)
            finally:
                line.leave(turn)
            self._reply(asked, reply)
        else:
            frame = encode(asked.request_id, reply, nbytes)
            line.send(self._stream, [frame, *records], turn, self._service.pace())
        self._service.counters.sent_bytes += nbytes

    def _put(self, request: m.Put, payload_bytes: int) -> m.TargetReply:
        headers = _headers(request.headers)
        sizes = [record_bytes(header.payload_bytes) for header in headers]
        if request.spans and not payload_bytes:
            return self._fetch_put(request, headers, sum(sizes))
        if sum(sizes) != payload_bytes:
            raise ProtocolError(f"{sum(sizes)} bytes of records announced, {payload_bytes} follow")
        with self._berths(request, headers, payload_bytes) as (berths, refusal):
            parts: list[memoryview] = []
            for i, size in enumerate(sizes):
                slot = berths[i].slot if berths else None
                parts += self._service.discarding(size) if slot is None else [slot]
            self._stream.receive(parts, self._service.pace())
            self._service.counters.received_bytes += payload_bytes
        return self._adopted(berths, refusal, request.headers)

    def _fetch_put(self, request: m.Put, headers: Sequence[Header], nbytes: int) -> m.TargetReply:
        """Take records out of the peer's memory, those for which there is a slot."""
        reach = self._reached()
        with self._berths(request, headers, nbytes) as (berths, refusal):
            if berths:
                reach.bring(request.spans, [each.slot for each in berths])
            brought = sum(len(each.slot) for each in berths if each.slot is not None)
            self._service.counters.received_bytes += brought
        return self._adopted(berths, refusal, request.headers)

    def _reached(self) -> Reach:
        if self._reach is None:
            raise ProtocolError("spans without an agent: NIXL was not agreed on")
        return self._reach

    def _adopted(
        self, berths: Sequence[Berth], refusal: Refused | None, announced: bytes
    ) -> m.TargetReply:
        """Publish what arrived and say of each record whether it is held now."""
        if refusal is not None:
            return refusal
        try:
            outcomes = self._store.adopt(berths, announced)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a target
            return self._refusal(error)
        if berths and Outcome.CORRUPT in outcomes:
            self._service.counters.corrupt += outcomes.count(Outcome.CORRUPT)
        held = bytes(outcome is Outcome.OK for outcome in outcomes)
        held = held or bytes(len(announced) // RECORD_HEADER_BYTES)
        return m.Stored(held, self._service.epoch)

    @contextmanager
    def _berths(
        self, request: m.Put, headers: Sequence[Header], nbytes: int
    ) -> Iterator[tuple[list[Berth], Refused | None]]:
        """Lend slots for what is to come: none where it is refused, or too much is under way."""
        berths, refusal = list[Berth](), None
        with self._service.receiving(nbytes, headers[0].domain) as granted:
            try:
                self._check_may(request)
                berths = self._store.berth(headers) if granted else []
            except Exception as error:  # noqa: BLE001  # the payload must still be received
                refusal = self._refusal(error)
            try:
                yield berths, refusal
            except MoveLostError:
                raise  # their slots are lost: somebody may write to them yet
            except BaseException:
                self._store.abandon(berths)
                raise

    def _check_may(self, request: m.TargetRequest) -> None:
        if self._claims is None:
            return
        verb = _NEEDS.get(type(request), "read")
        if verb not in self._claims.may:
            raise RefusedError(
                f"token: {self._claims.peer!r} may {', '.join(self._claims.may)}, not {verb}; "
                "make one with `holdfast token --may`"
            )
        over_s = time.time() - self._claims.expires - CLOCK_SKEW_S
        if over_s > 0:
            raise RefusedError(f"token: expired {over_s:.0f} s ago; connect with a new one")


def _headers(data: bytes) -> list[Header]:
    if len(data) % RECORD_HEADER_BYTES or not data:
        raise ProtocolError(f"put.headers: {len(data)} bytes are no whole number of headers")
    try:
        headers = [
            read_header(data[i : i + RECORD_HEADER_BYTES])[0]
            for i in range(0, len(data), RECORD_HEADER_BYTES)
        ]
    except FormatError as error:
        raise ProtocolError(f"put.headers: {error}") from error
    for header in headers:
        _check_size("put.headers", header.payload_bytes)
    return headers


def _named(request: m.Get | m.Exist | m.Delete | m.Stage | m.Lease) -> tuple[World, list[bytes]]:
    """Return the world and keys of a request; raise where they can not be."""
    for name, value in (("fingerprint", request.fingerprint), ("domain", request.domain)):
        if len(value) != KEY_BYTES:
            raise ProtocolError(f"{name} has not {KEY_BYTES} bytes")
    _check_size("payload_bytes", request.payload_bytes)
    if len(request.keys) > CHAIN_BLOCKS_MAX * KEY_BYTES:
        raise ProtocolError(f"more than {CHAIN_BLOCKS_MAX} keys; send fewer at once")
    world = World(request.fingerprint, request.domain, request.payload_bytes, request.block_tokens)
    return world, unpack_keys(request.keys)


def _check_size(what: str, payload_bytes: int) -> None:
    if not 1 <= payload_bytes <= PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            f"{what}: a payload of {payload_bytes} bytes is not from 1 to {PAYLOAD_BYTES_MAX}"
        )
