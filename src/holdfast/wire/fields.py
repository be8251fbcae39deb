"""Types of the fields of messages: each has a bound, which msgspec checks when it decodes.

The bounds limit what a peer can make this process keep, hash or log. The receiver checks narrower
ranges by name, so that a refusal can state value, limit and remedy without ending the connection.
That includes floats: NaN lies in no range.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from holdfast.limits import (
    CHAIN_BLOCKS_MAX,
    FRAME_BODY_BYTES_MAX,
    GROUPS_MAX,
    KIB,
    LOCK_CHUNKS_MAX,
    OBSERVED_MAX,
)

TEXT_CHARS_MAX = 64 * KIB
SHORT_BYTES_MAX = 4 * KIB
TIERS_MAX = 256
"""Maximum entries of a map from tiers to a number or an outcome; a ladder has about five."""

REPORT_PARTS_MAX = 4 * KIB
"""Maximum entries of a report; their content is bounded by the frame."""

Integer: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A 64-bit signed integer: MessagePack's unsigned ones do not fit everywhere."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
ShortBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=SHORT_BYTES_MAX)]
"""A key, nonce, proof or secret."""

PackedBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=FRAME_BODY_BYTES_MAX)]
"""Keys, headers or spans, one after the other, or one byte for each block."""

Trace: TypeAlias = Annotated[str, msgspec.Meta(max_length=FRAME_BODY_BYTES_MAX)]
"""A `traceparent`; see `traceparent`. A user's request may have set it to any text."""

T = TypeVar("T")
ObservedList: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=OBSERVED_MAX)]
Places: TypeAlias = Annotated[list[Integer], msgspec.Meta(max_length=CHAIN_BLOCKS_MAX)]
Chunks: TypeAlias = Annotated[list[Integer], msgspec.Meta(max_length=LOCK_CHUNKS_MAX)]
"""Numbers of chunks of an arena, counted from its start."""

Groups: TypeAlias = Annotated[list[T], msgspec.Meta(max_length=GROUPS_MAX)]
"""One entry for each KV group of a model but the first."""

ByTier: TypeAlias = Annotated[dict[Text, T], msgspec.Meta(max_length=TIERS_MAX)]
Report: TypeAlias = Annotated[dict[Text, object], msgspec.Meta(max_length=REPORT_PARTS_MAX)]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent(text: str) -> str:
    """Return the text if it is a `traceparent` of W3C Trace Context, 55 characters; else nothing.

    Parsers of OpenTelemetry take quadratic time for long texts.
    """
    return text if _TRACEPARENT.fullmatch(text) else ""
