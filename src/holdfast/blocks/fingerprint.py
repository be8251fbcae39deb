"""The fingerprint: 16 bytes that name everything that makes two KV states interchangeable.

It has two parts. The *meaning* says which numbers a block holds: model, positions, adapter,
quantisation, block size and KV group. The *representation* says how its bytes are arranged:
portable, which any engine reads; portable as a lossy codec left it; exact pages of one build of
one engine; or opaque, what one build of one engine hands over as one piece. For every field there
is a public incident in which wrong KV was served without it (docs/reference/format.md lists them).
No field has a default, so a missing field is an error.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias, get_args

import msgspec

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.layout import ExactLayout, OpaqueLayout, PortableLayout, QuantisedLayout
from holdfast.errors import BlockError
from holdfast.limits import LAYERS_MAX
from holdfast.prepared import prepared

TOKENS = "tokens"
"""`Meaning.naming` of blocks whose keys come from tokens."""

_PERSON = b"holdfast-fprint2"

Attention: TypeAlias = Literal["full", "window", "chunk", "recurrent"]

Representation: TypeAlias = PortableLayout | QuantisedLayout | ExactLayout | OpaqueLayout


@prepared
class KvGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers that a block holds, and how they attend to earlier tokens.

    `layers` are numbers of layers, counted from 0 among those of the model that keep KV state, in
    ascending order. `window`: tokens of a window or chunk; 0 for full attention and recurrent
    state.
    """

    attention: Attention
    window: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.attention not in get_args(Attention):
            raise BlockError(
                f"kv_group.attention is {self.attention!r}; known: {', '.join(get_args(Attention))}"
            )
        limited = self.attention in {"window", "chunk"}
        if type(self.window) is not int or (self.window < 1 if limited else self.window != 0):
            expected = "at least 1" if limited else "0"
            raise BlockError(
                f"kv_group.window is {self.window!r}; for {self.attention} attention it must be "
                f"{expected}"
            )
        before = -1
        for layer in self.layers:
            if type(layer) is not int or layer <= before:
                raise BlockError(
                    f"kv_group.layers: {layer!r} follows {before}; list numbers from 0, ascending"
                )
            before = layer
        if not 0 < len(self.layers) <= LAYERS_MAX:
            raise BlockError(
                f"kv_group.layers: {len(self.layers)} layers; from 1 to {LAYERS_MAX} are possible"
            )

    @classmethod
    def all_layers(cls, layers: int) -> KvGroup:
        """Return the only group of a model that has full attention in all its `layers`."""
        return cls("full", 0, tuple(range(layers)))


@prepared
class Meaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the numbers of a block mean, whichever engine on whichever device computed them.

    `model`: digest of configuration and weights. `positions`: rope and position settings and their
    overrides, as canonical JSON. `adapter`: digest of the LoRA adapter. `kv_quantisation`: scheme
    that turned keys and values into the stored data type. `kv_scales`: digest of its scales, or
    `weights` if they are among the weights. `naming`: the input of the keys: `tokens`, unless an
    engine provides no tokens; then the engine's hash algorithm, its seed and the tokens per hash. A
    text is `none` if the model has no such thing.
    """

    model: str
    positions: str
    adapter: str
    kv_quantisation: str
    kv_scales: str
    naming: str
    block_tokens: int
    kv_group: KvGroup

    def __post_init__(self) -> None:
        for field in ("model", "positions", "adapter", "kv_quantisation", "kv_scales", "naming"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise BlockError(f"fingerprint.{field} is {value!r}; it must be a text")
            if not value:
                raise BlockError(
                    f"fingerprint.{field} is empty; write 'none' if the model has none"
                )


@prepared
class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a block's bytes depend on, besides its tokens."""

    meaning: Meaning
    representation: Representation

    def __post_init__(self) -> None:
        tokens, layout = self.meaning.block_tokens, self.representation
        if tokens != layout.block_tokens:
            raise BlockError(
                f"fingerprint: meaning.block_tokens is {tokens!r}, the layout's "
                f"{layout.block_tokens}; they must be equal"
            )
        layers = len(layout.layers) if isinstance(layout, PortableLayout) else layout.layers
        if len(self.meaning.kv_group.layers) != layers:
            raise BlockError(
                f"fingerprint: kv_group has {len(self.meaning.kv_group.layers)} layers, the "
                f"layout {layers}; they must be equal"
            )

    @classmethod
    def portable(
        cls,
        layout: PortableLayout,
        *,
        model: str,
        positions: str,
        adapter: str,
        kv_quantisation: str,
        kv_scales: str,
    ) -> Fingerprint:
        """Return the fingerprint of portable blocks of a model whose layers all attend fully.

        The fields are those of `Meaning`. Keys come from tokens.
        """
        return cls(
            Meaning(
                model=model,
                positions=positions,
                adapter=adapter,
                kv_quantisation=kv_quantisation,
                kv_scales=kv_scales,
                naming=TOKENS,
                block_tokens=layout.block_tokens,
                kv_group=KvGroup.all_layers(len(layout.layers)),
            ),
            layout,
        )

    def quantised(self, codec: str, version: int) -> Fingerprint:
        """Return the fingerprint of the same blocks after a lossy codec.

        Raises BlockError if they are not portable, or were quantised before.
        """
        layout = self.representation
        if not isinstance(layout, PortableLayout) or isinstance(layout, QuantisedLayout):
            raise BlockError(
                f"fingerprint: a {layout.__struct_config__.tag} block cannot be quantised, only a "
                "portable one"
            )
        changed = QuantisedLayout(layout.dtype, layout.block_tokens, layout.layers, codec, version)
        return Fingerprint(self.meaning, changed)

    def digest(self) -> bytes:
        """Return the 16 bytes: BLAKE2b-128 of the fields as canonical JSON."""
        text = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(text, digest_size=KEY_BYTES, person=_PERSON).digest()
