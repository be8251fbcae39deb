"""Names and fingerprints of the chunks that LMCache's server keeps.

LMCache's key of a chunk has a hash of its tokens, the name of the model, the rank, the object group
and the salt. The fingerprint has the model, what the user says of the engines, and the arrangement
of the chunk's tensors; the name has the rest.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.key import NAME_BYTES_MIN
from holdfast.blocks.layout import OpaqueLayout
from holdfast.client.model_meaning import canonical_json
from holdfast.engines.lmcache.options import AdapterOptions

ENGINE = "lmcache"
"""The name in a fingerprint, and in the node's log and metrics."""

_FIXED = struct.Struct("<HHQI")
"""Lengths of hash and salt, rank, object group."""

IN_IDENTITY = "in the identity of the engines"


class ChunkShape(NamedTuple):
    """The tensors of a chunk of one model: their shapes and data types, and the chunk's bytes."""

    model: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int


def shape_of(model: str, shapes: Sequence[Any], dtypes: Sequence[Any]) -> ChunkShape:
    """Return the shape of a chunk from LMCache's description."""
    sizes = tuple(tuple(int(n) for n in shape) for shape in shapes)
    nbytes = sum(
        math.prod(size) * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)
    )
    return ChunkShape(model, sizes, tuple(str(dtype) for dtype in dtypes), nbytes)


def name_of(key: Any) -> bytes:
    """Return what tells a chunk from the others of its fingerprint; empty if its hash may collide.

    `key`: LMCache's `ObjectKey`.
    """
    chunk = bytes(key.chunk_hash)
    if len(chunk) < NAME_BYTES_MIN:
        return b""
    salt: bytes = key.cache_salt.encode()
    fixed = _FIXED.pack(len(chunk), len(salt), int(key.kv_rank), int(key.object_group_id))
    return fixed + chunk + salt


def fingerprint_of(shape: ChunkShape, options: AdapterOptions, version: str) -> Fingerprint:
    """Return the fingerprint of chunks of one shape; `version` is LMCache's."""
    meaning = Meaning(
        model=canonical_json({"name": shape.model, "identity": options.identity}),
        positions=IN_IDENTITY,
        adapter=IN_IDENTITY,
        kv_quantisation=IN_IDENTITY,
        kv_scales=IN_IDENTITY,
        naming="lmcache chunk hash",
        block_tokens=options.chunk_tokens,
        kv_group=KvGroup.all_layers(1),
    )
    layout = OpaqueLayout(
        dtype="+".join(shape.dtypes),
        block_tokens=options.chunk_tokens,
        layers=1,
        nbytes=shape.nbytes,
        arrangement=canonical_json({"shapes": shape.shapes, "dtypes": shape.dtypes}),
        engine=ENGINE,
        engine_version=version,
    )
    return Fingerprint(meaning, layout)
