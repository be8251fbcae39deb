"""What the tier and the process with Mooncake's client say to one another."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from holdfast.prepared import prepared

READY = b"ready"
"""First word on the control connection if all is well; anything else says what is not."""


@prepared
class Settings(msgspec.Struct, frozen=True):
    """What Mooncake's client wants to know. `master`: HOST:PORT; `host`: ours, as others see it."""

    master: str
    host: str
    protocol: str
    devices: str


class Share(NamedTuple):
    """Where a record lies in the shared memory."""

    offset: int
    nbytes: int


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Store what lies in the shares; the answer is 0 or a negative code for each."""

    keys: list[str]
    shares: list[Share]


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Bring records to the shares; the answer is a length or a negative code for each."""

    keys: list[str]
    shares: list[Share]


class Exist(msgspec.Struct, frozen=True, array_like=True, tag="exist"):
    """Look for records; the answer is 1, 0 or a negative code for each."""

    keys: list[str]


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Delete records; the answer is 0 or a negative code for each."""

    keys: list[str]


Request: TypeAlias = Put | Get | Exist | Remove
