"""Names for blocks: keyed hashes of tokens, chained so that one key names a whole prefix.

`key[i] = BLAKE2b-128(domain key; fingerprint, key[i-1], tokens of block i, extras of block i)`
with the fingerprint as the parent of the first block. The exact bytes are in
docs/reference/format.md. Engines' own hashes never name a block: some are 64 bits wide, some
depend on the process, and none is keyed.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from holdfast.errors import BlockError
from holdfast.limits import SEGMENT_BLOCKS

if TYPE_CHECKING:  # a node never sees a token, and numpy takes longer to load than all of us
    import numpy as np
    import numpy.typing as npt

KEY_BYTES = 16
SEGMENT_BYTES = 8
DOMAIN_KEY_BYTES = 32

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"

TOKEN_ID_MAX = 0xFFFF_FFFF

_UINT32 = "I" if array("I").itemsize == 4 else "L"  # noqa: PLR2004  # four bytes a token
_NO_EXTRAS = (0).to_bytes(4, "little")


class Chain:
    """The keys of one context, in order; grows as tokens arrive.

    `extras[i]` are byte strings that change the meaning of block `i` beyond its tokens
    (hashes of images, salts). They must be given before block `i` is full. `segment_blocks` of them
    are placed together.
    """

    __slots__ = ("_base", "_extras", "block_tokens", "fingerprint", "keys", "segment_blocks")

    def __init__(
        self,
        domain_key: bytes,
        fingerprint: bytes,
        block_tokens: int,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        segment_blocks: int = SEGMENT_BLOCKS,
    ) -> None:
        if len(domain_key) != DOMAIN_KEY_BYTES:
            raise BlockError(f"domain key has {len(domain_key)} bytes, not {DOMAIN_KEY_BYTES}")
        if len(fingerprint) != KEY_BYTES:
            raise BlockError(f"fingerprint has {len(fingerprint)} bytes, not {KEY_BYTES}")
        if block_tokens < 1:
            raise BlockError(f"block_tokens is {block_tokens}; it must be at least 1")
        self.block_tokens = block_tokens
        self.fingerprint = fingerprint
        self.segment_blocks = segment_blocks
        self.keys: list[bytes] = []
        self._base = hashlib.blake2b(fingerprint, key=domain_key, digest_size=KEY_BYTES)
        self._extras = {index: list(found) for index, found in (extras or {}).items() if found}

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, tokens: Tokens) -> None:
        """Name every block that `tokens`, all tokens of the context so far, has filled."""
        size = self.block_tokens
        first, last = len(self.keys), len(tokens) // size
        if last <= first:
            return
        whole = not first and last * size == len(tokens)
        packed = _little_endian(tokens if whole else tokens[first * size : last * size])
        parent = self.keys[-1] if self.keys else self.fingerprint
        width = 4 * size
        count = size.to_bytes(4, "little")
        copy, extras = self._base.copy, self._extras
        for i in range(first, last):
            at = (i - first) * width
            state = copy()
            state.update(
                parent
                + count
                + packed[at : at + width]
                + (_encode_extras(extras[i]) if i in extras else _NO_EXTRAS)
            )
            parent = state.digest()
            self.keys.append(parent)

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the keys from `start` up to `stop` as one byte string, 16 bytes each."""
        return b"".join(self.keys[start:stop])

    def parent(self, index: int) -> bytes:
        """Return the key in front of block `index`: the fingerprint for the first."""
        return self.keys[index - 1] if index else self.fingerprint

    def segment(self, index: int) -> bytes:
        """Return the 8 bytes naming block `index`'s segment: the start of its first block's key."""
        return self.keys[index - index % self.segment_blocks][:SEGMENT_BYTES]


def unpack_keys(packed: bytes) -> list[bytes]:
    """Split a byte string of 16-byte keys; raise BlockError if it does not divide."""
    if len(packed) % KEY_BYTES:
        raise BlockError(f"{len(packed)} bytes of keys do not divide by {KEY_BYTES}")
    return list(struct.unpack(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES), packed))


def _encode_extras(extras: Sequence[bytes]) -> bytes:
    parts = [len(extras).to_bytes(4, "little")]
    for extra in extras:
        parts += [len(extra).to_bytes(4, "little"), extra]
    return b"".join(parts)


def _little_endian(tokens: Tokens) -> memoryview:
    numpy = sys.modules.get("numpy")  # who hands over an array has loaded it
    if numpy is not None and isinstance(tokens, numpy.ndarray):
        return _array_little_endian(cast("npt.NDArray[np.integer]", tokens))
    try:
        packed = array(_UINT32, tokens)  # five times quicker than numpy on a list of integers
    except (OverflowError, TypeError) as error:
        raise BlockError(f"token ids must be integers from 0 to {TOKEN_ID_MAX}: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _array_little_endian(tokens: npt.NDArray[np.integer]) -> memoryview:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise BlockError(f"tokens must be one row of integers, not {tokens.ndim}-d {tokens.dtype}")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > TOKEN_ID_MAX):
        raise BlockError(f"token ids must be integers from 0 to {TOKEN_ID_MAX}")
    return memoryview(tokens.astype("<u4").tobytes())
