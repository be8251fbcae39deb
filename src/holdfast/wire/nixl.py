"""NIXL, where both ends have it: records over RDMA, or whatever else UCX finds between two hosts.

The target moves every byte, one-sidedly, between its own arena and the memory that a node lays
open for it (see `holdfast.wire.window`). A target lays nothing open: what it tells of itself would
let a peer read and write every slot of every domain. NIXL: https://github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import ProtocolError

METADATA_BYTES_MAX = 64 << 10
"""What an agent may tell of itself."""

MOVE_S_MAX = 10.0
"""A transfer that is not over by then is called back; if it can not be, its memory is lost."""

_POLL_MIN_S = 20e-6
_POLL_MAX_S = 500e-6
_SPAN = struct.Struct("<QQ")

RDMA = Path("/sys/class/infiniband")
"""Where Linux lists the devices that can do RDMA."""


class Span(NamedTuple):
    """Memory of a process, ours or another's: where it begins, and its bytes."""

    address: int
    nbytes: int


class MoveLostError(ProtocolError):
    """A transfer did not end: whatever memory it was to fill must never be used again."""


def installed() -> bool:
    """Return whether NIXL can be imported here."""
    return importlib.util.find_spec("nixl") is not None


def wanted(transport: str) -> bool:
    """Return whether records should go over NIXL here, for a `transport` of the configuration.

    `auto` is for hardware that gains by it: without RDMA, UCX is slower than plain sockets.
    """
    rdma = RDMA.is_dir() and any(RDMA.iterdir())
    return installed() and (transport == "nixl" or (transport == "auto" and rdma))


def span_of(part: memoryview) -> Span:
    """Return where a buffer lies in this process."""
    return Span(np.frombuffer(part, np.uint8).ctypes.data, len(part))


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Return spans as they travel: address and length, 8 bytes each, little-endian."""
    return b"".join(_SPAN.pack(*span) for span in spans)


def unpack_spans(packed: bytes) -> list[Span]:
    """Read spans; raise ProtocolError if the bytes do not divide."""
    if len(packed) % _SPAN.size:
        raise ProtocolError(f"spans: {len(packed)} bytes do not divide by {_SPAN.size}")
    return [Span(*fields) for fields in _SPAN.iter_unpack(packed)]


class Agent:
    """One NIXL agent over UCX. Any thread; takes about a second to make.

    Raises ImportError without NIXL, RuntimeError where UCX finds no way to anybody.
    """

    def __init__(self, role: str) -> None:
        api: Any = importlib.import_module("nixl._api")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        options = api.nixl_agent_config(
            enable_prog_thread=False,  # it would keep a core busy for as long as the agent lives
            backends=["UCX"],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = api.nixl_agent(f"holdfast-{role}-{uuid.uuid4().hex}", options)
        if "UCX" not in self._agent.backends:
            raise RuntimeError("NIXL came without its UCX plugin")
        self._lock = threading.Lock()
        self._met: dict[str, int] = {}

    def register(self, memory: memoryview) -> None:
        """Let transfers use this memory; it must stay mapped while the agent lives."""
        self._agent.register_memory([(*span_of(memory), 0, "")], "DRAM")

    def metadata(self) -> bytes:
        """Return what another agent needs to reach the memory registered so far."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Return the name of the agent that told this of itself; `part` as often as you `meet`."""
        if len(metadata) > METADATA_BYTES_MAX:
            raise ProtocolError(
                f"nixl: {len(metadata)} bytes of metadata; at most {METADATA_BYTES_MAX} are taken"
            )
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:  # NIXL's own have no common root
                raise ProtocolError(f"nixl: no agent's metadata: {error}") from error
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._met[peer] = self._met.get(peer, 0) + 1
        return peer

    def part(self, peer: str) -> None:
        """Undo one `meet`."""
        with self._lock:
            self._met[peer] -= 1
            if not self._met[peer]:
                del self._met[peer]
                self._agent.remove_remote_agent(peer)

    def progress(self) -> None:
        """Let transfers that others have under way with us go on; where hardware does it, nothing.

        Only while somebody calls this, or moves bytes, does an agent without RDMA do its part.
        """
        self._agent.get_new_notifs()

    def read(self, peer: str, theirs: Sequence[Span], ours: Sequence[memoryview]) -> None:
        """Copy a peer's memory into ours, which must be registered; return when it is there."""
        self._move("READ", peer, theirs, ours)

    def write(self, peer: str, theirs: Sequence[Span], ours: Sequence[memoryview]) -> None:
        """Copy our memory into a peer's; return when it is there."""
        self._move("WRITE", peer, theirs, ours)

    def _move(
        self, way: str, peer: str, theirs: Sequence[Span], ours: Sequence[memoryview]
    ) -> None:
        """Carry out one transfer; ProtocolError where NIXL refuses or fails it."""
        local = self._agent.get_xfer_descs([(*span_of(part), 0) for part in ours], "DRAM")
        remote = self._agent.get_xfer_descs([(*span, 0) for span in theirs], "DRAM")
        try:
            handle = self._agent.initialize_xfer(way, local, remote, peer)
            state = self._agent.transfer(handle)
            state = self._settle(handle) if state == "PROC" else state
        except ProtocolError:
            raise
        except Exception as error:  # NIXL's own have no common root
            raise ProtocolError(f"nixl: {way.lower()} refused: {error}") from error
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ProtocolError(f"nixl: a {way.lower()} of {len(ours)} records failed: {state}")

    def _settle(self, handle: object) -> str:
        """Wait for the end, whatever it is: until then somebody may write into our memory."""
        end_s, pause_s = time.monotonic() + MOVE_S_MAX, _POLL_MIN_S
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            if time.monotonic() > end_s:
                self._call_back(handle)
                raise ProtocolError(f"nixl: called back after {MOVE_S_MAX:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return str(state)

    def _call_back(self, handle: object) -> None:
        """End a transfer whose other side does nothing; raise MoveLostError if that can not be."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # NIXL's own have no common root
            raise MoveLostError(f"nixl: it can not be called back: {error}") from error
