"""Block keys: keyed hashes of tokens, chained so that one key identifies a whole prefix.

`key[i] = BLAKE2b-128(domain key; fingerprint, key[i-1], tokens of block i, extras of block i)`
with the fingerprint as the parent of the first block. The exact bytes are in
docs/reference/format.md. Engines' own hashes are not used as keys: some have 64 bits, some depend
on the process, and none is keyed.

Where an engine provides no tokens, `named_key` hashes the engine's own name of a block.
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

if TYPE_CHECKING:  # a node needs no tokens, and importing numpy takes longer than Holdfast
    import numpy as np
    import numpy.typing as npt

KEY_BYTES = 16
SEGMENT_BYTES = 8
DOMAIN_KEY_BYTES = 32

NAME_BYTES_MIN = 16
"""Shortest name of a block: shorter hashes can be made to collide."""

NAME_BYTES_MAX = 256

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"

TOKEN_ID_MAX = 0xFFFF_FFFF

_REMEDY = "pass a sequence of integers, or a one-dimensional numpy array of integers"
_INTEGER_CODES = "bBhHiIlLqQ"
_WORD_BYTES = 4
_UINT32 = "I" if array("I").itemsize == 4 else "L"  # noqa: PLR2004  # four bytes a token
_NAMED_PERSON = b"holdfast-named"
_NO_EXTRAS = (0).to_bytes(4, "little")


class Chain:
    """The keys of one context, in order; grows as tokens arrive.

    `extras[i]` are byte strings that block `i` depends on besides its tokens (hashes of images,
    salts). They must be given before block `i` is full. Runs of `segment_blocks` blocks form a
    segment, which is placed as a unit. `lookahead`: how many tokens after a block its content
    depends on, too, as that of draft models does; a block has its key once they are known.
    """

    __slots__ = (
        *("_base", "_extras", "block_tokens", "fingerprint", "keys", "lookahead"),
        "segment_blocks",
    )

    def __init__(
        self,
        domain_key: bytes,
        fingerprint: bytes,
        block_tokens: int,
        extras: Mapping[int, Sequence[bytes]] | None = None,
        segment_blocks: int = SEGMENT_BLOCKS,
        lookahead: int = 0,
    ) -> None:
        if len(domain_key) != DOMAIN_KEY_BYTES:
            raise BlockError(f"domain key has {len(domain_key)} bytes, not {DOMAIN_KEY_BYTES}")
        if len(fingerprint) != KEY_BYTES:
            raise BlockError(f"fingerprint has {len(fingerprint)} bytes, not {KEY_BYTES}")
        if block_tokens < 1:
            raise BlockError(f"block_tokens is {block_tokens}; it must be at least 1")
        if lookahead < 0:
            raise BlockError(f"lookahead is {lookahead}; it must be at least 0")
        self.block_tokens = block_tokens
        self.lookahead = lookahead
        self.fingerprint = fingerprint
        self.segment_blocks = segment_blocks
        self.keys: list[bytes] = []
        self._base = hashlib.blake2b(fingerprint, key=domain_key, digest_size=KEY_BYTES)
        self._extras = {index: list(found) for index, found in (extras or {}).items() if found}

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, tokens: Tokens) -> None:
        """Add the keys of the new full blocks of `tokens`, which are all tokens of the context.

        Raises BlockError for tokens that are not integers from 0 to `TOKEN_ID_MAX`. Tokens of an
        incomplete block are not checked.
        """
        tokens = _checked(tokens)
        done = len(self.keys) * self.block_tokens
        if len(tokens) - done >= self.block_tokens + self.lookahead:
            self._add(tokens, done)

    def append(self, tokens: Tokens) -> None:
        """Add the keys of the full blocks of `tokens`, which follow those of the chain."""
        self._add(_checked(tokens), 0)

    def _add(self, tokens: Tokens, start: int) -> None:
        """Add the keys of the full blocks from token `start`."""
        size, first = self.block_tokens, len(self.keys)
        named = size + self.lookahead
        count = (len(tokens) - start - self.lookahead) // size
        if count <= 0:
            return
        packed = _little_endian(tokens, start, start + count * size + self.lookahead)
        parent = self.keys[-1] if self.keys else self.fingerprint
        step, width = 4 * size, 4 * named
        length = named.to_bytes(4, "little")
        copy, extras = self._base.copy, self._extras
        for i in range(first, first + count):
            at = (i - first) * step
            more = _NO_EXTRAS
            if i in extras:
                parts = [len(extras[i]).to_bytes(4, "little")]
                for extra in extras[i]:
                    parts += [len(extra).to_bytes(4, "little"), extra]
                more = b"".join(parts)
            state = copy()
            state.update(parent + length + packed[at : at + width] + more)
            parent = state.digest()
            self.keys.append(parent)

    def packed(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the keys from `start` up to `stop` as one byte string, 16 bytes each."""
        return b"".join(self.keys[start:stop])

    def parent(self, index: int) -> bytes:
        """Return the parent key of block `index`: the fingerprint for the first."""
        return self.keys[index - 1] if index else self.fingerprint

    def segment(self, index: int) -> bytes:
        """Return the id of block `index`'s segment: the first 8 bytes of its first block's key."""
        return self.keys[index - index % self.segment_blocks][:SEGMENT_BYTES]


def named_key(domain_key: bytes, fingerprint: bytes, name: bytes) -> bytes:
    """Return the key of a block that an engine names by a collision-safe hash of its own.

    `BLAKE2b-128(domain key, person "holdfast-named"; fingerprint, name)`. Raises BlockError for a
    name that is too short to be collision-safe, or too long.
    """
    if not NAME_BYTES_MIN <= len(name) <= NAME_BYTES_MAX:
        raise BlockError(
            f"a block's name has {len(name)} bytes, not from {NAME_BYTES_MIN} to {NAME_BYTES_MAX}; "
            "name blocks by hashes of at least 128 bits, because shorter ones collide"
        )
    return hashlib.blake2b(
        fingerprint + name, key=domain_key, digest_size=KEY_BYTES, person=_NAMED_PERSON
    ).digest()


def unpack_keys(packed: bytes) -> list[bytes]:
    """Split a byte string of 16-byte keys; raise BlockError if its length is not a multiple."""
    if len(packed) % KEY_BYTES:
        raise BlockError(f"{len(packed)} bytes of keys are not a multiple of {KEY_BYTES}")
    return list(struct.unpack(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES), packed))


def _checked(tokens: Tokens) -> Tokens:
    """Return tokens as a sequence or a one-dimensional integer array; raise BlockError otherwise.

    Checks the type only, so its cost does not depend on the number of tokens. Refuses bytes and
    similar types: Python treats them as sequences of integers, but `array` reads them as raw words.
    """
    if isinstance(tokens, list | tuple):
        return tokens
    numpy = sys.modules.get("numpy")  # a caller with a numpy array has imported it
    if numpy is not None and isinstance(tokens, numpy.ndarray):
        return _checked_array(cast("npt.NDArray[np.generic]", tokens))
    if isinstance(tokens, array):
        if tokens.typecode in _INTEGER_CODES:
            return tokens
        raise BlockError(f"tokens are an array of type code {tokens.typecode!r}; {_REMEDY}")
    raw = isinstance(tokens, str | bytes | bytearray | memoryview)
    if not raw and isinstance(tokens, Sequence):
        return tokens
    if not raw and hasattr(tokens, "__array__"):
        import numpy as np

        try:
            found = np.asanyarray(tokens)  # `asarray` drops a mask
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a device, for example
            name = type(tokens).__name__
            raise BlockError(f"tokens of type {name} cannot be read: {error}; {_REMEDY}") from error
        return _checked_array(found)
    raise BlockError(f"tokens are of type {type(tokens).__name__}; {_REMEDY}")


def refuse_mask(what: str, array: object) -> None:
    """Raise BlockError for a masked array of numpy: its masked entries have no value."""
    masked = sys.modules.get("numpy.ma")  # a caller with such an array has imported it
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise BlockError(
            f"{what} are a masked numpy array, and its masked entries have no value; pass a plain "
            "array, such as array.compressed() or array.filled(0)"
        )


def _checked_array(tokens: npt.NDArray[np.generic]) -> npt.NDArray[np.integer]:
    refuse_mask("tokens", tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise BlockError(
            f"tokens must be a 1-d array of integers, not {tokens.ndim}-d {tokens.dtype}; {_REMEDY}"
        )
    return cast("npt.NDArray[np.integer]", tokens)


def _little_endian(tokens: Tokens, start: int, stop: int) -> memoryview:
    """Return tokens `start` to `stop` as little-endian 32-bit words."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tokens, numpy.ndarray):
        wanted = cast("npt.NDArray[np.integer]", tokens[start:stop])
        narrow = wanted.dtype.kind == "u" and wanted.dtype.itemsize <= _WORD_BYTES
        if wanted.size and not narrow:
            least, most = int(wanted.min()), int(wanted.max())
            if least < 0 or most > TOKEN_ID_MAX:
                raise BlockError(
                    f"token ids must be integers from 0 to {TOKEN_ID_MAX}, not from {least} to "
                    f"{most}"
                )
        return memoryview(wanted.astype("<u4").tobytes())
    try:
        whole = not start and stop == len(tokens)
        chosen = tokens if whole else tokens[start:stop]
        packed = array(_UINT32, chosen)  # five times faster than numpy on a list of integers
    except (OverflowError, TypeError, ValueError) as error:
        raise BlockError(f"token ids must be integers from 0 to {TOKEN_ID_MAX}: {error}") from error
    if len(packed) != stop - start:  # another library's sequence returned a slice of bytes
        raise BlockError(f"tokens are of type {type(tokens).__name__}; {_REMEDY}")
    # A bool is an int to `array`. A mask has bools only, so its first and last entries show it.
    if packed and bool in (type(chosen[0]), type(chosen[-1])):
        raise BlockError(f"tokens are bools, as in a mask; {_REMEDY}")
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")
