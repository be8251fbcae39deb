"""The layout of a block's bytes: layers, heads, dtype, pages and slice of the model.

Two blocks are interchangeable only if their layouts are equal in every field. `portable` is the
arrangement `[layer][k|v][token][head][dim]`, which any engine can read. Every other arrangement is
opaque: whole pages of one engine, copied and never interpreted.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import BlockError
from holdfast.limits import PAYLOAD_BYTES_MAX

PORTABLE = "portable"

_DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the model that a block holds: its parallel ranks and KV cache group."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    group: int


WHOLE = Slice(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, group=0)
"""The whole model in one process, one KV cache group."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arrangement of one block's payload; every field is part of the fingerprint.

    `page_bytes` is the size of one page of one layer. A block has `layers x (block_tokens /
    page_tokens)` pages, layer by layer.
    """

    arrangement: str
    dtype: str
    layers: int
    kv_heads: int
    head_size: int
    page_tokens: int
    page_bytes: int
    block_tokens: int
    slice: Slice

    def __post_init__(self) -> None:
        for field in (
            "layers",
            "kv_heads",
            "head_size",
            "page_tokens",
            "page_bytes",
            "block_tokens",
        ):
            if getattr(self, field) < 1:
                raise BlockError(f"layout.{field} is {getattr(self, field)}; it must be at least 1")
        if self.block_tokens % self.page_tokens:
            raise BlockError(
                f"layout.block_tokens {self.block_tokens} is not a multiple of "
                f"page_tokens {self.page_tokens}"
            )
        if self.payload_bytes > PAYLOAD_BYTES_MAX:
            raise BlockError(
                f"layout: a block has {self.payload_bytes} bytes; the limit is "
                f"{PAYLOAD_BYTES_MAX}; lower block_tokens"
            )

    @classmethod
    def portable(
        cls, *, layers: int, kv_heads: int, head_size: int, dtype: str, block_tokens: int
    ) -> Layout:
        """Return the portable layout of a whole model: one page per block."""
        if dtype not in _DTYPE_BYTES:
            raise BlockError(f"layout.dtype {dtype!r} is unknown; known: {', '.join(_DTYPE_BYTES)}")
        return cls(
            arrangement=PORTABLE,
            dtype=dtype,
            layers=layers,
            kv_heads=kv_heads,
            head_size=head_size,
            page_tokens=block_tokens,
            page_bytes=2 * block_tokens * kv_heads * head_size * _DTYPE_BYTES[dtype],
            block_tokens=block_tokens,
            slice=WHOLE,
        )

    @property
    def pages_per_block(self) -> int:
        """Engine pages, per layer, in one block."""
        return self.block_tokens // self.page_tokens

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * self.pages_per_block * self.page_bytes
