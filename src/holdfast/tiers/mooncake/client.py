"""The process of Mooncake's client: serves requests of several lanes, records in shared memory.

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
from typing import Any

import msgspec
import numpy as np

from holdfast.tiers.mooncake.messages import (
    READY,
    ClientExist,
    ClientGet,
    ClientPut,
    ClientRemove,
    ClientSettings,
    RecordSpan,
    Request,
)

METADATA = "P2PHANDSHAKE"
"""Clients exchange transfer metadata directly, without a metadata service."""

_OWN_BYTES = 16 << 20
"""Size of Mooncake's own buffer; Holdfast's records do not use it."""

_UP, _DOWN = 0, 1
_DECODER = msgspec.msgpack.Decoder(Request)


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
        return _DOWN
    for fd in lane_fds:
        lane = Connection(fd)
        threading.Thread(target=_serve, args=(store, memory, lane), daemon=True).start()
    control.send_bytes(READY)
    with contextlib.suppress(EOFError):
        control.recv_bytes()
    os._exit(_UP)  # a lane's thread may be in a call that does not return


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

    def buffers(spans: Sequence[RecordSpan]) -> tuple[list[int], list[int]]:
        """Return the addresses and the lengths of spans."""
        return [start + span.offset for span in spans], [span.nbytes for span in spans]

    def answer(request: Request) -> list[int]:
        match request:
            case ClientPut(keys, spans):
                codes = store.batch_put_from(keys, *buffers(spans))
            case ClientGet(keys, spans):
                codes = store.batch_get_into(keys, *buffers(spans))
            case ClientExist(keys):
                codes = store.batch_is_exist(keys)
            case ClientRemove(keys):
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
