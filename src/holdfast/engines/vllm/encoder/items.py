"""Encoder outputs as blocks: one item, such as an image, fills blocks of a fixed size.

An item has a name that says its content. Its first block begins with a header that says how long
the item is; it is written last, so an item is found only if all of its blocks were written.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

import numpy as np

from holdfast.errors import Outcome
from holdfast.limits import KIB, MIB
from holdfast.named_blocks import FIRST, NamedSession, PrefixPosition, memory_of

BLOCK_BYTES = 256 * KIB
ITEM_BYTES_MAX = 64 * MIB
"""Longest encoder output that is kept: an image of 16,384 tokens of 2,048 bfloat16."""

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Width in bytes of the elements of an encoder output."""

_HEADER = struct.Struct("<8sQII16s24x")
_MAGIC = b"hf-enc-1"


class EncoderItem(NamedTuple):
    """The encoder output of one item: `rows` vectors of `width` elements, in row-major order."""

    rows: int
    width: int
    dtype: str
    data: bytes | bytearray | memoryview


def save_item(session: NamedSession, name: bytes, item: EncoderItem) -> Outcome:
    """Save an item; return OK if all of its blocks are held now."""
    payload = np.zeros(_block_count(len(item.data)) * BLOCK_BYTES, np.uint8)
    header = _HEADER.pack(_MAGIC, len(item.data), item.rows, item.width, item.dtype.encode())
    payload[: _HEADER.size] = np.frombuffer(header, np.uint8)
    payload[_HEADER.size : _HEADER.size + len(item.data)] = np.frombuffer(item.data, np.uint8)
    blocks = payload.reshape(-1, BLOCK_BYTES)
    names = _names(name, len(blocks))
    memory = [memory_of(block) for block in blocks]
    rest = session.put(names[1:], memory[1:], PrefixPosition(names[0], 1)) if names[1:] else []
    failed = [outcome for outcome in rest if outcome is not Outcome.OK]
    return failed[0] if failed else session.put(names[:1], memory[:1], FIRST)[0]


def load_item(session: NamedSession, name: bytes, deadline_s: float) -> EncoderItem | None:
    """Return a saved item; None if it is not held whole, or cannot be read by the deadline."""
    until_s = time.monotonic() + deadline_s
    first = np.empty(BLOCK_BYTES, np.uint8)
    if session.get(_names(name, 1), [memory_of(first)], deadline_s) != [Outcome.OK]:
        return None
    magic, nbytes, rows, width, raw_dtype = _HEADER.unpack(first[: _HEADER.size].tobytes())
    dtype = raw_dtype.rstrip(b"\0").decode("ascii", "replace")
    element = DTYPES.get(dtype, 0)
    if magic != _MAGIC or not 0 < nbytes <= ITEM_BYTES_MAX or nbytes != rows * width * element:
        return None
    payload = np.empty(_block_count(nbytes) * BLOCK_BYTES, np.uint8)
    payload[:BLOCK_BYTES] = first
    rest = payload[BLOCK_BYTES:].reshape(-1, BLOCK_BYTES)
    if len(rest):
        left_s = max(0.0, until_s - time.monotonic())
        names = _names(name, 1 + len(rest))[1:]
        outcomes = session.get(names, [memory_of(block) for block in rest], left_s)
        if any(outcome is not Outcome.OK for outcome in outcomes):
            return None
    data = payload[_HEADER.size : _HEADER.size + nbytes].tobytes()
    return EncoderItem(rows, width, dtype, data)


def _block_count(nbytes: int) -> int:
    return -(-(_HEADER.size + nbytes) // BLOCK_BYTES)


def _names(name: bytes, count: int) -> list[bytes]:
    """Return the names of the first `count` blocks of an item."""
    return [name + number.to_bytes(4, "big") for number in range(count)]
