"""Framing of messages: body length, request id, payload length, then the body and the payload.

    | body bytes u32 | request id u32 | payload bytes u64 | body: msgpack | payload |

All little-endian. On a Unix socket payloads are in shared memory, so the payload length is 0 and
`FrameReader` refuses any other; between nodes the payload follows the body. Lengths are checked
before memory is allocated.
"""

from __future__ import annotations

import struct
from typing import Generic, NamedTuple, TypeVar

import msgspec

from holdfast.errors import ProtocolError, printable
from holdfast.limits import FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, KIB
from holdfast.wire.local.messages import Reply, Request

_HEADER = struct.Struct("<IIQ")
HEADER_BYTES = _HEADER.size
REQUEST_ID_MAX = 0xFFFF_FFFF
CONNECTION_ID = 0
"""The request id of messages that answer no request: a target's challenge, and a refusal of the
whole connection."""

RECEIVE_BYTES = 64 * KIB
"""Maximum size of one receive from a Unix socket."""

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)

M = TypeVar("M")


class Frame(NamedTuple, Generic[M]):
    """One message and the request it belongs to."""

    request_id: int
    message: M


class FrameHead(NamedTuple):
    """What the first 16 bytes of a frame announce."""

    body_bytes: int
    request_id: int
    payload_bytes: int


def read_head(data: bytes | bytearray | memoryview) -> FrameHead:
    """Parse a frame's header; raise ProtocolError if a length exceeds its limit."""
    head = FrameHead(*_HEADER.unpack_from(data))
    if head.body_bytes > FRAME_BODY_BYTES_MAX:
        raise ProtocolError(
            f"frame of request {head.request_id} announces {head.body_bytes} bytes, "
            f"the limit is {FRAME_BODY_BYTES_MAX}"
        )
    if head.payload_bytes > FRAME_PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            f"frame of request {head.request_id} announces a payload of {head.payload_bytes} "
            f"bytes, the limit is {FRAME_PAYLOAD_BYTES_MAX}"
        )
    return head


def decode_body(
    decoder: msgspec.msgpack.Decoder[M], body: bytes | bytearray | memoryview, what: str
) -> M:
    """Return the message in a frame's body; `what` is the subject of the ProtocolError."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be decoded: {printable(error)}") from error


def encode(request_id: int, message: msgspec.Struct, payload_bytes: int = 0) -> bytearray:
    """Return the bytes of one frame, the payload left out.

    Raises ProtocolError if the body is over the limit.
    """
    frame = bytearray(HEADER_BYTES)
    _ENCODER.encode_into(message, frame, HEADER_BYTES)
    body_bytes = len(frame) - HEADER_BYTES
    if body_bytes > FRAME_BODY_BYTES_MAX:
        raise ProtocolError(
            f"{type(message).__name__} has {body_bytes} bytes, the limit is "
            f"{FRAME_BODY_BYTES_MAX}; send fewer keys at once"
        )
    _HEADER.pack_into(frame, 0, body_bytes, request_id, payload_bytes)
    return frame


class FrameReader(Generic[M]):
    """Assembles received bytes into whole messages.

    Call `next` until it returns None before more bytes are fed: then at most one largest frame and
    one receive are kept. After a ProtocolError the reader is of no more use. Not thread-safe.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._received = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Add received bytes."""
        self._received += data

    def next(self) -> Frame[M] | None:
        """Return the next message, None if it is not complete yet.

        Raises ProtocolError for what the protocol forbids, for lengths as soon as the header is
        there.
        """
        if len(self._received) < HEADER_BYTES:
            return None
        head = read_head(self._received)
        if head.payload_bytes:
            raise ProtocolError(
                f"frame of request {head.request_id} announces a payload of {head.payload_bytes} "
                "bytes; this connection carries none"
            )
        end = HEADER_BYTES + head.body_bytes
        if len(self._received) < end:
            return None
        body = self._received[HEADER_BYTES:end]
        message = decode_body(self._decoder, body, f"the message of request {head.request_id}")
        del self._received[:end]  # moves no bytes, except when the memory is halved
        return Frame(head.request_id, message)


def request_reader() -> FrameReader[Request]:
    """Return a reader for the node's side."""
    return FrameReader(_REQUESTS)


def reply_reader() -> FrameReader[Reply]:
    """Return a reader for the asking side."""
    return FrameReader(_REPLIES)
