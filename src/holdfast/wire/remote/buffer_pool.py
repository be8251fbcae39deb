"""Transfer buffers that a node registers with NIXL for targets; its arena is never registered.

A record passes through a buffer: it is copied in before a put, and copied out after a get and only
then verified, so that the target cannot change it between check and use. After a timeout the target
may still write to the buffer: the buffer is never used again, and its whole pool is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from holdfast.limits import MIB
from holdfast.wire.remote.nixl import NixlAgent, installed
from holdfast.wire.remote.stream import Buffer, Deadline

BUFFERS = 4
BUFFER_BYTES = 72 * MIB
"""Size of a buffer: 32 records of 2 MiB fit. Memory is committed on first use only; a larger
message goes over TCP."""

FALLBACK_S = 60.0
"""How long records go over TCP after a failed call over NIXL, or on a connection that was made
without a pool."""

_PROGRESS_S = 50e-6

_log = logging.getLogger(__name__)


class BufferPool:
    """A NIXL agent and its transfer buffers. Any thread."""

    def __init__(self, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._agent = NixlAgent("node")  # first attribute, so that it is freed before the memory
        self._memory = mmap.mmap(-1, buffers * buffer_bytes)
        whole = memoryview(self._memory)
        self._agent.register(whole)
        self._lock = threading.Lock()
        self._free = [
            whole[at : at + buffer_bytes] for at in range(0, buffers * buffer_bytes, buffer_bytes)
        ]
        self._buffer_bytes = buffer_bytes
        self.metadata = self._agent.metadata()
        self.spoiled = False
        """Whether a buffer was lost, so that connections close and a new pool replaces this one."""

    def acquire(self, nbytes: int) -> memoryview | None:
        """Return a buffer for one call; None if `nbytes` do not fit in one, or none is free."""
        with self._lock:
            fits = 0 < nbytes <= self._buffer_bytes and not self.spoiled
            return self._free.pop() if fits and self._free else None

    def release(self, buffer: memoryview) -> None:
        """Return a buffer whose call was answered to the pool."""
        with self._lock:
            self._free.append(buffer)

    def progress_until(self, arrives: Callable[[float], bool], deadline: Deadline) -> None:
        """Progress the targets' transfers in this process until `arrives` sees the answer.

        Raises TimeoutError at the deadline.
        """
        while not arrives(min(_PROGRESS_S, deadline.seconds())):
            self._agent.progress()

    def spoil(self) -> None:
        """Discard the pool after a call without an answer: its buffer may still be written to."""
        with self._lock:
            self.spoiled = True


class TransferBuffers:
    """Makes the pool in the background, and replaces a spoiled one; shared by all targets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer_pool: BufferPool | None = None
        self._making: threading.Thread | None = None
        self._usable = installed()

    def buffer_pool(self) -> BufferPool | None:
        """Return the pool, None while there is none; never waits."""
        with self._lock:
            buffer_pool = self._buffer_pool
            if buffer_pool is not None and not buffer_pool.spoiled:
                return buffer_pool
            if self._usable and self._making is None:
                making = threading.Thread(target=self._make, name="holdfast-nixl", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can start: a later call retries
                    making.start()
                    self._making = making
        return None

    def wait(self, timeout_s: float) -> BufferPool | None:
        """Return the pool, waiting until it is made; for start-up."""
        buffer_pool = self.buffer_pool()
        if buffer_pool is not None:
            return buffer_pool
        making = self._making
        if making is not None:  # else it has just ended
            making.join(timeout_s)
        return self.buffer_pool()

    def _make(self) -> None:
        try:
            made = BufferPool()
        except Exception as error:  # noqa: BLE001  # a third-party library; TCP is the fallback
            _log.warning("NIXL is installed but failed, records go over TCP: %s", error)
            made = None
        with self._lock:
            self._usable = made is not None
            self._buffer_pool, self._making = made, None


def consecutive(buffer: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """Return consecutive parts of a buffer, of these sizes."""
    parts, at = [], 0
    for size in sizes:
        parts.append(buffer[at : at + size])
        at += size
    return parts


def copy_parts(parts: Sequence[Buffer], into: Sequence[memoryview]) -> None:
    """Copy each part into the buffer beside it, with the GIL released."""
    for part, to in zip(parts, into, strict=True):
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(part, np.uint8))
