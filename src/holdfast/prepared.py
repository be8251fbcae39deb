"""Structs that several threads may decode at once, even the first time."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def prepared(kind: type[T]) -> type[T]:
    """Have msgspec learn the fields of a class now, while its module is imported.

    Else it learns them when something is first decoded as it or converted to it, and a second
    thread that comes meanwhile finds half of them: the process ends with a segmentation fault
    (msgspec 0.22; seen in a node that connected to three targets at once). So this stands before
    every class that `convert` or `decode(type=...)` is told; what a module makes a `Decoder` for
    is learnt with that.
    """
    msgspec.msgpack.Decoder(kind)
    return kind
