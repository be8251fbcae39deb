"""The codec interface, and the registry that finds a codec by its number or its name.

A codec stores the payload of a record in fewer bytes, and restores every byte of it. A record's
header has the codec's number, so a reader does not need to know the writer's configuration.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol, TypeAlias

from holdfast.blocks.envelope import CODEC_PARITY

CodecMode: TypeAlias = Literal["auto", "off", "planes"]
"""Option of a tier: encode where it pays (`auto`), never, or always with this codec."""


class Codec(Protocol):
    """A lossless codec of payloads. Its methods may be called by several threads at once.

    Both methods release the GIL in each step whose time grows with the payload.
    """

    @property
    def number(self) -> int:
        """The codec's number in the headers of records, 1 to 255. A number is never reused."""
        ...

    @property
    def name(self) -> str:
        """The codec's name in configurations and reports."""
        ...

    def encode(self, raw: memoryview, into: memoryview, element_bytes: int) -> int:
        """Write the encoded payload into `into`; return its length in bytes.

        Returns 0 if encoding saves less than 5 %, or if the result does not fit into `into`.
        `element_bytes` is the width of one number in the payload, 1 if it is unknown. Raises
        CodecMismatchError if decoding the result does not give `raw` again. After 0 and after an
        exception, the content of `into` is undefined.
        """
        ...

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Write the decoded payload into `into`, whose length is that of the raw payload.

        Checks each length in `stored` against `into` before it allocates memory. Raises FormatError
        if `stored` is not an encoded payload of this length; `into` is undefined then.
        """
        ...


CODEC_NUMBERS = range(1, 256)
"""The header has one byte for the number, and 0 means that the payload is raw."""


def find_codec(number: int) -> Codec | None:
    """Return the codec with this number; None if this build has none."""
    return next((codec for codec in _codecs().values() if codec.number == number), None)


def codec_named(name: str) -> Codec:
    """Return the codec with this name; raise KeyError if there is none."""
    return _codecs()[name]


def register(codec: Codec) -> None:
    """Add a codec to the registry of this process. Raises ValueError for a number in use."""
    if codec.number not in CODEC_NUMBERS:
        raise ValueError(f"codec {codec.name}: number {codec.number} is not between 1 and 255")
    if codec.number == CODEC_PARITY:
        raise ValueError(
            f"codec {codec.name}: number {CODEC_PARITY} is that of parity records; choose another"
        )
    if find_codec(codec.number) is not None or codec.name in _codecs():
        raise ValueError(f"codec {codec.name}: number {codec.number} or the name is in use")
    _codecs()[codec.name] = codec


def unregister(codec: Codec) -> None:
    """Remove a codec from the registry; its records are then unreadable for this process."""
    _codecs().pop(codec.name, None)


@cache
def _codecs() -> dict[str, Codec]:
    """Return the codecs of this process by name: this package's, then the registered ones."""
    from holdfast.codec.int8 import Int8
    from holdfast.codec.planes import Planes

    codecs: tuple[Codec, ...] = (Planes(), Int8())
    return {codec.name: codec for codec in codecs}
