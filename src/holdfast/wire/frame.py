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

from holdfast.errors import ProtocolError
from holdfast.limits import FRAME_BODY_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, KIB
from holdfast.wire.local.messages import Reply, Request

_HEADER = struct.Struct("<IIQ")
HEADER_BYTES = _HEADER.size
REQUEST_ID_MAX = 0xFFFF_FFFF
CONNECTION_ID = 0
"""The request id of messages that answer no request: a target's challenge, and a refusal of the
whole connection."""

WORDS_CHARS_MAX = 300
"""Maximum characters of a peer's text in logs and errors."""

_ROOM_BYTES = 64 * KIB
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


def read_head(data: memoryview | bytes, at: int = 0) -> FrameHead:
    """Parse a frame's header; raise ProtocolError if a length exceeds its limit."""
    head = FrameHead(*_HEADER.unpack_from(data, at))
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


def plain(words: object) -> str:
    """Return what a peer said as one short line without control characters, fit for a log."""
    kept = str(words)[:WORDS_CHARS_MAX]
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in kept)


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

    `room()` is where the next bytes go; `took(n)` says how many came; `next()` returns a message
    or None while it is not whole yet. After a ProtocolError the reader is of no more use. Holds at
    most one largest frame and 64 KiB. Not thread-safe.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._memory = memoryview(bytearray(_ROOM_BYTES))
        self._start = 0
        self._end = 0

    def room(self) -> memoryview:
        """Return free memory, never empty, behind what was taken."""
        if self._start == self._end:
            self._start = self._end = 0
        head = self._head()
        wanted = HEADER_BYTES + (head.body_bytes if head else 0)
        if self._start + wanted > len(self._memory) or self._end == len(self._memory):
            self._move(wanted)
        return self._memory[self._end :]

    def took(self, nbytes: int) -> None:
        """Note that `nbytes` were written to the last `room()`."""
        self._end += nbytes

    def next(self) -> Frame[M] | None:
        """Return the next whole frame; raise ProtocolError for what the protocol forbids."""
        head = self._head()
        if head is None:
            return None
        begin = self._start + HEADER_BYTES
        end = begin + head.body_bytes
        if self._end < end:
            return None
        try:
            message = self._decoder.decode(self._memory[begin:end])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(
                f"the message of request {head.request_id} cannot be decoded: {plain(error)}"
            ) from error
        self._start = end
        if self._start == self._end and len(self._memory) > _ROOM_BYTES:
            self._move(_ROOM_BYTES)
        return Frame(head.request_id, message)

    def _head(self) -> FrameHead | None:
        """Return the header of the frame at hand; None while it is not whole."""
        if self._end - self._start < HEADER_BYTES:
            return None
        head = read_head(self._memory, self._start)
        if head.payload_bytes:
            raise ProtocolError(
                f"frame of request {head.request_id} announces a payload of {head.payload_bytes} "
                "bytes; this connection carries none"
            )
        return head

    def _move(self, wanted: int) -> None:
        """Bring what is at hand to the front of memory that has room for `wanted` bytes."""
        held = bytes(self._memory[self._start : self._end])
        size = max(_ROOM_BYTES, wanted, len(held) + HEADER_BYTES)
        if size != len(self._memory):
            self._memory = memoryview(bytearray(size))
        self._memory[: len(held)] = held
        self._start, self._end = 0, len(held)


def request_reader() -> FrameReader[Request]:
    """Return a reader for the node's side."""
    return FrameReader(_REQUESTS)


def reply_reader() -> FrameReader[Reply]:
    """Return a reader for the asking side."""
    return FrameReader(_REPLIES)
