"""The child's side of `tiers/child_process.py`: serve requests on lanes until the parent is gone.

    python -m MODULE SETTINGS MEMORY CONTROL LANE ...

MEMORY, CONTROL and LANE are numbers of open file descriptors. It imports little, so that a child
starts quickly.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias

READY = b"ready"
"""First message on the control connection after a successful start; any other is an error text."""

Answerer: TypeAlias = Callable[[bytes], bytes]
"""Returns the answer to a request; requests of one lane come one at a time, in order."""

_EXIT_OK, _EXIT_NOT_READY = 0, 1


def serve_lanes(
    argv: Sequence[str], begin: Callable[[str, mmap.mmap], Callable[[], Answerer]]
) -> int:
    """Begin, report the result, serve until the control connection is closed.

    `begin` gets the settings and the shared memory; it returns a function that makes the answerer
    of one lane. An exception that it raises is the error text for the parent.
    """
    settings, memory_fd, control_fd, *lane_fds = argv[0], *map(int, argv[1:])
    control = Connection(control_fd)
    try:
        make_answerer = begin(settings, mmap.mmap(memory_fd, 0))
        answerers = [make_answerer() for _ in lane_fds]
    except Exception as error:  # noqa: BLE001  # the parent must learn of any error
        control.send_bytes((str(error) or type(error).__name__).encode())
        return _EXIT_NOT_READY
    for fd, answerer in zip(lane_fds, answerers, strict=True):
        arguments = Connection(fd), answerer
        threading.Thread(target=_serve, args=arguments, name="holdfast-lane", daemon=True).start()
    control.send_bytes(READY)
    with contextlib.suppress(EOFError):
        control.recv_bytes()
    os._exit(_EXIT_OK)  # a lane's thread may be in a call that does not return


def _serve(lane: Connection, answer: Answerer) -> None:
    # A lane is closed if its answerer raises: then the parent waits for no answer.
    with lane, contextlib.suppress(EOFError, OSError):
        while True:
            lane.send_bytes(answer(lane.recv_bytes()))
