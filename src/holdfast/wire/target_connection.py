"""One connection to a target: a request, its answer, then the next; whoever uses it owns it.

Payloads are received straight into the caller's buffers, in the caller's thread. A connection that
failed is closed for good, so nothing can arrive in those buffers afterwards.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.errors import ProtocolError, RefusedError
from holdfast.limits import HANDSHAKE_S
from holdfast.wire.address import tcp_endpoint
from holdfast.wire.credentials import Credentials, client_context
from holdfast.wire.dial import dial
from holdfast.wire.frame import HEADER_BYTES, Head, encode, plain, read_head
from holdfast.wire.messages import Refused
from holdfast.wire.nixl import pack_spans
from holdfast.wire.stream import Buffer, Deadline, PlainStream, Stream, seal, tune
from holdfast.wire.target_messages import (
    TARGET_PROTOCOL,
    Challenge,
    Get,
    Join,
    Joined,
    Put,
    Records,
    TargetReply,
)
from holdfast.wire.token import Token, nonce, prove, proves
from holdfast.wire.window import Lane, Window

T = TypeVar("T", bound=msgspec.Struct)

_DECODER = msgspec.msgpack.Decoder(TargetReply)
_ROOM_BYTES = 1 << 16
_EXPIRY_MARGIN_S = 15.0


class Answer(NamedTuple):
    """A reply, and how many bytes of payload came with it."""

    message: TargetReply
    payload_bytes: int


class Connection:
    """A joined connection. Made by `connect`; one thread at a time."""

    def __init__(self, stream: Stream, window: Window | None = None) -> None:
        self.incarnation = ""
        self.epoch = 0
        self.window = window
        """What records go through; None where they go over this connection."""
        self.made_s = time.monotonic()
        self.used = False
        """Whether a request was answered on it."""
        self.claims = ""
        """Those of the token that it was made with, if there was one."""
        self.good_until = float("inf")
        """When the target will end it, in Unix seconds."""
        self._stream = stream
        self._last_id = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray(_ROOM_BYTES))

    def ask(
        self,
        request: msgspec.Struct,
        payload: Sequence[Buffer],
        into: Sequence[memoryview],
        deadline: Deadline,
    ) -> Answer:
        """Send a request with its payload; receive its answer, the answer's payload into `into`.

        Raises OSError or ProtocolError, after which the connection must be closed.
        """
        lane = None
        if self.window is not None and isinstance(request, Put | Get):
            lane = self.window.lend(sum(len(part) for part in payload or into))
        if self.window is not None and lane is not None:
            return self._through(self.window, lane, request, payload or into, deadline)
        self._last_id += 1
        frame = encode(self._last_id, request, sum(map(len, payload)))
        self._stream.send([frame, *payload], deadline)
        answer = self._answer(self._last_id, into, deadline)
        self.used = True
        return answer

    def _through(
        self,
        window: Window,
        lane: Lane,
        request: msgspec.Struct,
        parts: Sequence[Buffer],
        deadline: Deadline,
    ) -> Answer:
        """Like `ask`, the records through a lane that the target reads or fills itself."""
        spans = pack_spans(lane.spans([len(part) for part in parts]))
        request = msgspec.structs.replace(request, spans=spans)
        if isinstance(request, Put):
            lane.fill(parts)
        try:
            self._last_id += 1
            self._stream.send([encode(self._last_id, request, 0)], deadline)
            window.attend(self._stream.arrives, deadline)
            answer = self._answer(self._last_id, (), deadline)
        except BaseException:
            window.spoil()  # the target may be at it yet
            raise
        self.used = True
        if isinstance(answer.message, Records):
            filled = [memoryview(part) for part in parts[: answer.message.blocks]]
            lane.empty(filled)
            answer = answer._replace(payload_bytes=sum(len(part) for part in filled))
        window.give_back(lane)
        return answer

    def join(self, token: Token | None, deadline: Deadline) -> None:
        """Say hello. Raises what `ask` does, and RefusedError for a target without the key."""
        challenge = _expect(self._answer(0, (), deadline), Challenge)
        if challenge.protocol != TARGET_PROTOCOL:
            raise RefusedError(
                f"the target speaks protocol version {challenge.protocol}, this node "
                f"{TARGET_PROTOCOL}; install the same version of holdfast on both"
            )
        ours = nonce()
        nonces = challenge.nonce + ours
        if not challenge.nixl:
            self.window = None
        shown = self.window.metadata if self.window is not None else b""
        name = f"{socket.gethostname()[:80]}/{os.getpid()}"
        join = Join(TARGET_PROTOCOL, name, ours, nixl=shown)
        if token is not None:
            claims, proof = token.text, prove(token, "peer", nonces)
            join = msgspec.structs.replace(join, claims=claims, proof=proof)
        joined = _expect(self.ask(join, (), (), deadline), Joined)
        if token is not None:
            if not proves(token, "target", nonces, joined.proof):
                raise RefusedError(
                    "the target does not know the key that the token was made with; "
                    "give it that tokens.key_file, or check its address"
                )
            self.claims = token.text
            self.good_until = token.claims.expires - _EXPIRY_MARGIN_S
        if not joined.nixl:
            self.window = None
        self.incarnation, self.epoch, self.used = joined.incarnation, joined.epoch, False

    @property
    def spent(self) -> bool:
        """Whether it is about to end, because its token does or its window is spoiled."""
        return time.time() >= self.good_until or (self.window is not None and self.window.spoiled)

    def cut(self) -> None:
        """Wake the thread that uses it; any thread."""
        self._stream.cut()

    def close(self) -> None:
        """Close it; nothing arrives in anybody's buffers any more."""
        self._stream.close()

    def _answer(self, request_id: int, into: Sequence[memoryview], deadline: Deadline) -> Answer:
        self._stream.receive([self._head], deadline)
        deadline.note(HEADER_BYTES)  # at once: it says how long the answer took to begin
        head = read_head(self._head)
        if head.request_id != request_id:
            raise ProtocolError(f"the answer to request {head.request_id}, not {request_id}")
        if head.body_bytes > len(self._body):
            self._body = memoryview(bytearray(head.body_bytes))
        body = self._body[: head.body_bytes]
        self._stream.receive([body, *_first(into, head)], deadline)
        try:
            return Answer(_DECODER.decode(body), head.payload_bytes)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(
                f"the answer to request {request_id} is not ours: {plain(error)}"
            ) from error


def connect(
    address: str, credentials: Credentials, deadline: Deadline, window: Window | None = None
) -> Connection:
    """Dial and join, within the deadline and the time for a handshake.

    Records go through `window` if there is one and the target can reach into it.

    Raises OSError or ProtocolError where there is no target, ConfigError where our credentials can
    not be read, RefusedError where the target, or we, do not accept the other side.
    """
    endpoint = tcp_endpoint(address)
    deadline = Deadline(min(deadline.at, time.monotonic() + HANDSHAKE_S))
    token = credentials.token()
    context = client_context(credentials.tls) if credentials.tls else None
    connected = dial(endpoint, deadline)
    stream: Stream
    try:
        tune(connected, endpoint)
        if context is None:
            stream = PlainStream(connected)
        else:
            stream = seal(connected, context, deadline, endpoint.host)
    except ssl.SSLError as error:
        connected.close()
        raise _unsealed(address, error) from error
    except BaseException:
        connected.close()
        raise
    connection = Connection(stream, window)
    try:
        connection.join(token, deadline)
    except ssl.SSLError as error:  # what the target thinks of our certificate comes this late
        connection.close()
        raise _unsealed(address, error) from error
    except RefusedError as error:
        connection.close()
        raise RefusedError(f"target {address}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _unsealed(address: str, error: ssl.SSLError) -> Exception:
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ConnectionResetError(f"target {address}: closed during the handshake")
    return RefusedError(
        f"target {address}: no TLS with mutual certificates: {error.reason or error}; compare "
        "tls.cert, tls.key and tls.ca on both sides, and the names in the certificates"
    )


def _first(into: Sequence[memoryview], head: Head) -> list[memoryview]:
    """Return the leading buffers that the announced payload fills exactly."""
    left, parts = head.payload_bytes, []
    for part in into:
        if left < len(part):
            break
        parts.append(part)
        left -= len(part)
        if not left:
            break
    if left:
        raise ProtocolError(
            f"a payload of {head.payload_bytes} bytes, which is no whole number of the records "
            "that were asked for"
        )
    return parts


def _expect(answer: Answer, kind: type[T]) -> T:
    if isinstance(answer.message, Refused):
        raise RefusedError(plain(answer.message.message))
    if not isinstance(answer.message, kind):
        raise ProtocolError(f"{type(answer.message).__name__} instead of {kind.__name__}")
    return answer.message
