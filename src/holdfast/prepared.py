"""Prepare msgspec structs at import, so that several threads may decode them at once."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def prepared(kind: type[T]) -> type[T]:
    """Make msgspec collect the fields of a class now, while its module is imported.

    Otherwise msgspec (0.22) collects them at the first decode or conversion, and a second thread
    that decodes at that time finds an incomplete class: the process ends with a segmentation fault.
    So every class that is passed to `convert` or `decode(type=...)` has this decorator. A `Decoder`
    that a module creates at import has the same effect.
    """
    msgspec.msgpack.Decoder(kind)
    return kind
