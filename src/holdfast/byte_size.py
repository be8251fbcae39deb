"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from holdfast.limits import GIB, KIB

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": KIB * KIB, "gib": GIB, "tib": KIB * GIB}
_UNITS |= {"pib": KIB * KIB * GIB}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", re.IGNORECASE)


SIZE_LIMIT = 1 << 60
"""1 EiB: more than any tier has, and small enough for arithmetic with floats."""


class Size(int):
    """A number of bytes, written as such or as text such as "64 GiB"."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> Size:
        """Parse a size; the ValueError for an invalid one says how to write it."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls._within(value)
        found = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[2].lower() not in _UNITS:
            raise ValueError(
                'not a size; write bytes, or a number and a unit such as "64 GiB" (KiB to PiB, or '
                "KB to PB)"
            )
        return cls._within(float(found[1]) * _UNITS[found[2].lower()])

    @classmethod
    def _within(cls, nbytes: float) -> Size:
        if nbytes >= SIZE_LIMIT:
            raise ValueError("too large; write less than 1 EiB")
        return cls(nbytes)

    def __str__(self) -> str:
        """Return the size in the largest unit that leaves a readable number."""
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self >= _UNITS[unit.lower()]:
                return f"{int(self) / _UNITS[unit.lower()]:.4g} {unit}"
        return f"{int(self)} B"


def convert_size(kind: type, value: object) -> Size:
    """Convert a `Size`, as msgspec's hook for types that it does not know."""
    if kind is Size:
        return Size.of(value)
    raise NotImplementedError(f"no reader for {kind.__name__}")
