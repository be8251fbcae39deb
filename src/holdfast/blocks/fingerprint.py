"""The fingerprint: 16 bytes naming everything that makes two KV states interchangeable.

Every field below has at least one public incident in which its absence served wrong KV
(docs/reference/format.md lists them). A missing field is refused, never defaulted.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.layout import Layout
from holdfast.errors import BlockError
from holdfast.prepared import prepared

FINGERPRINT_FORMAT = 1


@prepared
class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a block's bytes depend on, besides its tokens.

    `model`: digest of config and weights. `positions`: rope and position settings, canonical JSON.
    `adapter`: digest of the LoRA adapter, or `none`. `kv_quantisation`: scheme and scales, or
    `none`. `naming`: what keys are made of, `tokens` unless an engine hands over no tokens.
    """

    model: str
    layout: Layout
    positions: str
    adapter: str
    kv_quantisation: str
    naming: str = "tokens"
    format: int = FINGERPRINT_FORMAT

    def __post_init__(self) -> None:
        for field in ("model", "positions", "adapter", "kv_quantisation", "naming"):
            if not getattr(self, field):
                raise BlockError(
                    f"fingerprint.{field} is empty; say 'none' where the model has none"
                )

    def digest(self) -> bytes:
        """Return the 16 bytes: BLAKE2b-128 of the fields as canonical JSON."""
        text = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"holdfast-fprint").digest()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Fingerprint:
        """Build one from plain data; raise BlockError naming the missing or unknown field."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise BlockError(f"fingerprint: {error}") from error
