"""The process of Mooncake's client, and its messages: requests of lanes, records in shared memory.

Mooncake's client holds the GIL while it connects, and has no deadlines. In a child process
(`tiers/child_process.py`) it blocks no other thread, and the tier can kill it when it hangs.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from holdfast.prepared import prepared
from holdfast.tiers.child_serving import Answerer, serve_lanes

METADATA = "P2PHANDSHAKE"
"""Clients exchange transfer metadata directly, without a metadata service."""

_OWN_BYTES = 16 << 20
"""Size of Mooncake's own buffer; Holdfast's records do not use it."""


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


class ClientRequest(msgspec.Struct, frozen=True, array_like=True):
    """A call of Mooncake's client; the answer is one code for each key, negative for an error.

    "put" stores the records in `spans` (0), "get" reads records into `spans` (the length), "exist"
    looks records up (1 if held, else 0), and "remove" deletes them (0).
    """

    call: Literal["put", "get", "exist", "remove"]
    keys: list[str]
    spans: list[RecordSpan] = []


_DECODER = msgspec.msgpack.Decoder(ClientRequest)


def begin(settings: str, memory: mmap.mmap) -> Callable[[], Answerer]:
    """Connect to the store; raise an error with a text for the tier if that is not possible."""
    shared = np.frombuffer(memory, np.uint8)
    store = _connect(msgspec.json.decode(settings, type=ClientSettings), shared)
    return lambda: partial(_answer, store, shared.ctypes.data)


def _connect(settings: ClientSettings, memory: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401  # Mooncake's
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        settings.host, METADATA, 0, _OWN_BYTES, settings.protocol, settings.devices, settings.master
    )
    code = code or store.register_buffer(memory.ctypes.data, memory.nbytes)
    if code:
        raise ConnectionError(f"Mooncake's client cannot use {settings.master}: error {code}")
    return store


def _answer(store: Any, start: int, message: bytes) -> bytes:  # noqa: ANN401  # Mooncake's
    """Return the codes of one request; the shared memory begins at address `start`."""
    request = _DECODER.decode(message)
    keys = request.keys
    addresses = [start + span.offset for span in request.spans]
    lengths = [span.nbytes for span in request.spans]
    match request.call:
        case "put":
            codes = store.batch_put_from(keys, addresses, lengths)
        case "get":
            codes = store.batch_get_into(keys, addresses, lengths)
        case "exist":
            codes = store.batch_is_exist(keys)
        case "remove":
            codes = store.batch_remove(keys, force=True)
    return msgspec.msgpack.encode(list(codes))


if __name__ == "__main__":
    sys.exit(serve_lanes(sys.argv[1:], begin))
