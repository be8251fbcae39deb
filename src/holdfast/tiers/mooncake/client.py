"""The process of Mooncake's client, and its messages: requests of lanes, records in shared memory.

    python -m holdfast.tiers.mooncake.client SETTINGS MEMORY CONTROL LANE ...

MEMORY, CONTROL and LANE are numbers of open file descriptors. Mooncake's client holds the GIL while
it connects, and has no deadlines. In a separate process it blocks no other thread, and the tier can
kill it when it hangs. The process ends when the control connection is closed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from holdfast.prepared import prepared

READY = b"ready"
"""First message on the control connection after a successful start; any other is an error text."""

METADATA = "P2PHANDSHAKE"
"""Clients exchange transfer metadata directly, without a metadata service."""

_OWN_BYTES = 16 << 20
"""Size of Mooncake's own buffer; Holdfast's records do not use it."""

_EXIT_OK, _EXIT_NOT_CONNECTED = 0, 1


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


def main(argv: Sequence[str]) -> int:
    """Connect, report the result, serve until the control connection is closed."""
    settings = msgspec.json.decode(argv[0], type=ClientSettings)
    memory_fd, control_fd, *lane_fds = map(int, argv[1:])
    memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
    control = Connection(control_fd)
    try:
        store = _connect(settings, memory)
    except Exception as error:  # noqa: BLE001  # the parent must learn of any error
        control.send_bytes((str(error) or type(error).__name__).encode())
        return _EXIT_NOT_CONNECTED
    for fd in lane_fds:
        args = store, memory, Connection(fd)
        threading.Thread(target=_serve, args=args, name="holdfast-lane", daemon=True).start()
    control.send_bytes(READY)
    with contextlib.suppress(EOFError):
        control.recv_bytes()
    os._exit(_EXIT_OK)  # a lane's thread may be in a call that does not return


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


def _serve(store: Any, memory: np.ndarray[Any, Any], lane: Connection) -> None:  # noqa: ANN401  # Mooncake's
    """Answer the requests of one lane, one at a time."""
    start = memory.ctypes.data

    def answer(request: ClientRequest) -> list[int]:
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
        return list(codes)

    while True:
        try:
            request = _DECODER.decode(lane.recv_bytes())
            lane.send_bytes(msgspec.msgpack.encode(answer(request)))
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
