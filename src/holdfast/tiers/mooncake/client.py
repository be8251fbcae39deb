"""The process that holds Mooncake's client: requests in, by lane, records in shared memory.

    python -m holdfast.tiers.mooncake.client SETTINGS MEMORY CONTROL LANE ...

The last arguments are numbers of open files. Mooncake's client keeps the interpreter to itself
while it connects, and has no deadlines; here that holds nobody up, and who waits in vain kills it.
It ends when the control connection does.
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
    Exist,
    Get,
    Put,
    Remove,
    Request,
    Settings,
    Share,
)

METADATA = "P2PHANDSHAKE"
"""Clients tell one another what the transfer needs; no further service."""

_OWN_BYTES = 16 << 20
"""Mooncake's own buffer; nothing goes through it."""

_UP, _DOWN = 0, 1
_DECODER = msgspec.msgpack.Decoder(Request)


def main(argv: Sequence[str]) -> int:
    """Connect, say whether that went well, serve until the control connection ends."""
    settings = msgspec.json.decode(argv[0], type=Settings)
    memory_fd, control_fd, *lane_fds = map(int, argv[1:])
    memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
    control = Connection(control_fd)
    try:
        store = _connect(settings, memory)
    except Exception as error:  # noqa: BLE001  # whatever it is, who waits for us must hear it
        control.send_bytes((str(error) or type(error).__name__).encode())
        return _DOWN
    for fd in lane_fds:
        lane = Connection(fd)
        threading.Thread(target=_serve, args=(store, memory, lane), daemon=True).start()
    control.send_bytes(READY)
    with contextlib.suppress(EOFError):
        control.recv_bytes()
    os._exit(_UP)  # a lane may be inside a call that does not return


def _connect(settings: Settings, memory: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401  # Mooncake's
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        settings.host, METADATA, 0, _OWN_BYTES, settings.protocol, settings.devices, settings.master
    )
    code = code or store.register_buffer(memory.ctypes.data, memory.nbytes)
    if code:
        raise ConnectionError(f"Mooncake's client can not set up with {settings.master}: {code}")
    return store


def _serve(store: Any, memory: np.ndarray[Any, Any], lane: Connection) -> None:  # noqa: ANN401  # Mooncake's
    """Answer the requests of one lane, one after the other."""
    start = memory.ctypes.data

    def addresses(shares: Sequence[Share]) -> list[int]:
        return [start + share.offset for share in shares]

    def sizes(shares: Sequence[Share]) -> list[int]:
        return [share.nbytes for share in shares]

    def answer(request: Request) -> list[int]:
        match request:
            case Put(keys, shares):
                codes = store.batch_put_from(keys, addresses(shares), sizes(shares))
            case Get(keys, shares):
                codes = store.batch_get_into(keys, addresses(shares), sizes(shares))
            case Exist(keys):
                codes = store.batch_is_exist(keys)
            case Remove(keys):
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
