"""Messages between the Mooncake tier and the process of Mooncake's client."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from holdfast.prepared import prepared

READY = b"ready"
"""First message on the control connection after a successful start; any other is an error text."""


@prepared
class ClientSettings(msgspec.Struct, frozen=True):
    """Settings of Mooncake's client. `master` is HOST:PORT, `host` this machine's own address."""

    master: str
    host: str
    protocol: str
    devices: str


class RecordSpan(NamedTuple):
    """Position of a record in the shared memory: offset and length in bytes."""

    offset: int
    nbytes: int


class ClientPut(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Store the records in the spans; the answer is 0 or a negative error code for each."""

    keys: list[str]
    spans: list[RecordSpan]


class ClientGet(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Read records into the spans; the answer is a length or a negative error code for each."""

    keys: list[str]
    spans: list[RecordSpan]


class ClientExist(msgspec.Struct, frozen=True, array_like=True, tag="exist"):
    """Look up records; the answer is 1 (held), 0 or a negative error code for each."""

    keys: list[str]


class ClientRemove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Delete records; the answer is 0 or a negative error code for each."""

    keys: list[str]


Request: TypeAlias = ClientPut | ClientGet | ClientExist | ClientRemove
