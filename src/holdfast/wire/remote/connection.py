"""One connection to a target: one request at a time, owned by the calling thread.

Payloads are received directly into the caller's buffers, in the caller's thread. A failed
connection is closed and never reused, so no byte arrives in those buffers afterwards.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.address import tcp_endpoint
from holdfast.buffers import ALIGNMENT
from holdfast.errors import ProtocolError, RefusedError, printable
from holdfast.limits import HANDSHAKE_S
from holdfast.wire.frame import (
    CONNECTION_ID,
    HEADER_BYTES,
    decode_body,
    encode,
    read_head,
)
from holdfast.wire.local.messages import Refused
from holdfast.wire.remote.buffer_pool import BufferPool, consecutive, copy_parts
from holdfast.wire.remote.credentials import Credentials, client_context, tls_trouble
from holdfast.wire.remote.messages import (
    TARGET_PROTOCOL,
    Busy,
    Challenge,
    Join,
    Joined,
    RecordsFollow,
    TargetReply,
    unpack_sizes,
)
from holdfast.wire.remote.nixl import pack_spans, span_of
from holdfast.wire.remote.peer_user import check_peer, is_loopback
from holdfast.wire.remote.stream import Buffer, Deadline, PlainStream, Stream, dial, start_tls, tune
from holdfast.wire.remote.token import Token, nonce, prove, proves

T = TypeVar("T", bound=msgspec.Struct)

_DECODER: msgspec.msgpack.Decoder[TargetReply] = msgspec.msgpack.Decoder(TargetReply)
_BODY_BUFFER_BYTES = 1 << 16
_EXPIRY_MARGIN_S = 15.0
_REMEDY = (
    "find out whose it is, or use tls or tokens, or set open: true in this node's configuration if "
    "any user may answer there"
)


class TargetBusyError(Exception):
    """The target serves no further connection now: those that it has are as many as it serves."""


class TargetAnswer(NamedTuple):
    """A reply, and the lengths of the records that came with it."""

    message: TargetReply
    sizes: tuple[int, ...] = ()


class TargetConnection:
    """An authenticated connection, made by `connect`. One thread at a time."""

    def __init__(self, stream: Stream, buffer_pool: BufferPool | None = None) -> None:
        self.buffer_pool = buffer_pool
        """The NIXL buffers for records; None: records go over this connection."""
        self.made_s = time.monotonic()
        self.used = False
        """Whether a request was answered on it."""
        self.token: Token | None = None
        """The token that it was made with."""
        self._stream = stream
        self._last_id = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray(_BODY_BUFFER_BYTES))

    def ask(
        self,
        request: msgspec.Struct,
        payload: Sequence[Buffer],
        into: Sequence[memoryview],
        deadline: Deadline,
    ) -> TargetAnswer:
        """Send a request with its payload; receive its answer, the answer's payload into `into`.

        Raises OSError or ProtocolError, after which the connection must be closed.
        """
        buffer_pool, parts = self.buffer_pool, payload or into
        buffer = None
        if buffer_pool is not None:
            buffer = buffer_pool.acquire(sum(map(len, parts)))  # none for a call without records
        if buffer_pool is None or buffer is None:
            self._last_id += 1
            frame = encode(self._last_id, request, sum(map(len, payload)))
            self._stream.send([frame, *payload], deadline)
            answer = self._answer(self._last_id, into, deadline)
            self.used = True
            return answer
        # The target itself reads the records from the buffer, or writes them to it.
        records = consecutive(buffer, map(len, parts))
        copy_parts(payload, records[: len(payload)])
        spans = pack_spans([span_of(record) for record in records])
        request = msgspec.structs.replace(request, spans=spans)
        try:
            self._last_id += 1
            self._stream.send([encode(self._last_id, request, 0)], deadline)
            buffer_pool.progress_until(self._stream.arrives, deadline)
            answer = self._answer(self._last_id, None, deadline)
        except BaseException:
            buffer_pool.spoil()  # the target may still access the buffer
            raise
        self.used = True
        try:
            if isinstance(answer.message, RecordsFollow):
                sizes = unpack_sizes(answer.message.sizes)
                copy_parts(_parts(sizes, records), _parts(sizes, into))
                answer = answer._replace(sizes=sizes)
        finally:
            buffer_pool.release(buffer)
        return answer

    def challenged(self, deadline: Deadline) -> Challenge:
        """Wait for the target's challenge, its first message.

        Raises the errors of `ask`, and TargetBusyError if the target is at its limit.
        """
        answer = self._answer(CONNECTION_ID, (), deadline)
        if isinstance(answer.message, Busy):
            raise TargetBusyError(
                f"the target serves {answer.message.connections} connections, as many as it may; "
                "raise its target_connections, or let fewer hosts use it"
            )
        return _expect(answer, Challenge)

    def join(self, challenge: Challenge, token: Token | None, deadline: Deadline) -> None:
        """Answer the challenge. Raises the errors of `ask`, and RefusedError if not accepted."""
        if challenge.protocol != TARGET_PROTOCOL:
            raise RefusedError(
                f"the target speaks protocol version {challenge.protocol}, this node "
                f"{TARGET_PROTOCOL}; install the same version of holdfast on both"
            )
        ours = nonce()
        nonces = challenge.nonce + ours
        if not challenge.nixl:
            self.buffer_pool = None
        shown = self.buffer_pool.metadata if self.buffer_pool is not None else b""
        name = f"{socket.gethostname()[:80]}/{os.getpid()}"
        claims, proof = ("", b"") if token is None else (token.text, prove(token, "peer", nonces))
        join = Join(TARGET_PROTOCOL, name, ours, claims, proof, shown)
        joined = _expect(self.ask(join, (), (), deadline), Joined)
        if token is not None and not proves(token, "target", nonces, joined.proof):
            raise RefusedError(
                "the target does not know the key that the token was made with; "
                "give it that tokens.key_file, or check its address"
            )
        if not joined.nixl:
            self.buffer_pool = None
        self.token, self.used = token, False
        self.page = joined.page

    @property
    def spent(self) -> bool:
        """Whether it must be replaced, because its token expires or its buffer pool is spoiled."""
        if self.buffer_pool is not None and self.buffer_pool.spoiled:
            return True
        token = self.token
        return token is not None and time.time() >= token.claims.expires - _EXPIRY_MARGIN_S

    def close(self) -> None:
        """Close it; no byte arrives in any buffer afterwards."""
        self._stream.close()

    def _answer(
        self, request_id: int, into: Sequence[memoryview] | None, deadline: Deadline
    ) -> TargetAnswer:
        """Receive a message, and the records that it announces into `into`.

        `into` None: the records do not come over this connection.
        """
        self._stream.receive([self._head], deadline)
        deadline.note(HEADER_BYTES)  # reported at once, to measure the time to the answer's start
        head = read_head(self._head)
        if head.request_id != request_id:
            raise ProtocolError(f"the answer to request {head.request_id}, not {request_id}")
        if head.body_bytes > len(self._body):
            self._body = memoryview(bytearray(head.body_bytes))
        body = self._body[: head.body_bytes]
        self._stream.receive([body], deadline)
        message = decode_body(_DECODER, body, f"the answer to request {request_id}")
        sizes: tuple[int, ...] = ()
        if isinstance(message, RecordsFollow) and into is not None:
            sizes = unpack_sizes(message.sizes)
        if sum(sizes) != head.payload_bytes:
            raise ProtocolError(
                f"a payload of {head.payload_bytes} bytes follows records of {sum(sizes)} bytes"
            )
        if into is not None and sizes:
            self._stream.receive(_parts(sizes, into), deadline)
        return TargetAnswer(message, sizes)


def _parts(sizes: Sequence[int], buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the part of each buffer for the record that it gets.

    Raises ProtocolError for a record without a buffer, one that is longer than its buffer, and one
    that is not whole sectors.
    """
    fit = len(sizes) <= len(buffers) and all(
        0 < size <= len(buffer) and not size % ALIGNMENT
        for size, buffer in zip(sizes, buffers, strict=False)
    )
    if not fit:
        raise ProtocolError(
            f"records of {list(sizes)[:8]} bytes are announced for {len(buffers)} buffers of "
            f"{len(buffers[0]) if buffers else 0} bytes"
        )
    return [buffer[:size] for size, buffer in zip(sizes, buffers, strict=False)]


def connect(
    address: str,
    credentials: Credentials,
    deadline: Deadline,
    buffer_pool: BufferPool | None = None,
    tls_name: str = "",
) -> TargetConnection:
    """Connect and authenticate, within the deadline and `HANDSHAKE_S`.

    With TLS, the target's certificate must have `tls_name`, by default the host of the address.
    Records go through `buffer_pool` if it is given and the target has NIXL. Raises OSError or
    ProtocolError if no target answers, TargetBusyError if it is at its limit of connections,
    ConfigError if the credentials cannot be read, RefusedError if either side does not accept the
    other.
    """
    endpoint = tcp_endpoint(address)
    deadline = Deadline(min(deadline.at, time.monotonic() + HANDSHAKE_S))
    token = credentials.token()
    context = client_context(credentials.tls) if credentials.tls else None
    connected = dial(endpoint, deadline)
    opened: Stream | socket.socket = connected
    try:
        tune(connected, endpoint)
        if context is None:
            opened = PlainStream(connected)
        else:
            opened = start_tls(connected, context, deadline, tls_name or endpoint.host)
        connection = TargetConnection(opened, buffer_pool)
        challenge = connection.challenged(deadline)
        if credentials.proves_nothing and not credentials.any_user and is_loopback(connected):
            check_peer(connected, "the process behind this port", _REMEDY)
        connection.join(challenge, token, deadline)
    except BaseException as error:
        opened.close()
        # In TLS 1.3 the target's verdict on our certificate comes after the handshake.
        if isinstance(error, ssl.SSLError):
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                closed = f"target {address}: closed during the handshake"
                raise ConnectionResetError(closed) from error
            raise RefusedError(
                f"target {address}: no TLS with mutual certificates: {tls_trouble(error)}; "
                "compare tls.cert, tls.key and tls.ca on both sides, and the names in the "
                "certificates"
            ) from error
        if isinstance(error, RefusedError):
            raise RefusedError(f"target {address}: {error}") from error
        raise
    return connection


def _expect(answer: TargetAnswer, kind: type[T]) -> T:
    if isinstance(answer.message, Refused):
        raise RefusedError(printable(answer.message.message))
    if not isinstance(answer.message, kind):
        raise ProtocolError(f"{type(answer.message).__name__} instead of {kind.__name__}")
    return answer.message
