"""The fingerprint: 16 bytes that name everything that makes two KV states interchangeable.

For every field there is a public incident in which wrong KV was served without it
(docs/reference/format.md lists them). A missing field is an error, except `naming` and `format`.
"""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.layout import ExactLayout, PortableLayout
from holdfast.errors import BlockError
from holdfast.prepared import prepared

FINGERPRINT_FORMAT = 1


@prepared
class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a block's bytes depend on, besides its tokens.

    `model`: digest of config and weights. `positions`: rope and position settings, canonical JSON.
    `adapter`: digest of the LoRA adapter, or `none`. `kv_quantisation`: scheme and scales, or
    `none`. `naming`: the input of the keys: `tokens`, unless an engine provides no tokens.
    """

    model: str
    layout: PortableLayout | ExactLayout
    positions: str
    adapter: str
    kv_quantisation: str
    naming: str = "tokens"
    format: int = FINGERPRINT_FORMAT

    def __post_init__(self) -> None:
        for field in ("model", "positions", "adapter", "kv_quantisation", "naming"):
            if not getattr(self, field):
                raise BlockError(
                    f"fingerprint.{field} is empty; write 'none' if the model has none"
                )

    def digest(self) -> bytes:
        """Return the 16 bytes: BLAKE2b-128 of the fields as canonical JSON."""
        text = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"holdfast-fprint").digest()
