"""NIXL transfers of records between hosts: over RDMA, or another transport that UCX finds.

The target moves all bytes, one-sidedly, between its arena and the memory that a node has registered
for it (see `buffer_pool.py`). A target never sends its own metadata, because a peer could read and
write every slot of every domain with it. NIXL: https://github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from holdfast.errors import ProtocolError

METADATA_BYTES_MAX = 64 << 10
"""Maximum size of an agent's metadata."""

MOVE_S_MAX = 10.0
"""Timeout of a transfer, which is then cancelled; if that fails, its memory is lost."""

_POLL_MIN_S = 20e-6
_POLL_MAX_S = 500e-6
_SPAN = struct.Struct("<QQ")
_log = logging.getLogger(__name__)

_NETLINK_ROUTE = "libnl-route-3.so.200"
"""The system's netlink library, which the system's RDMA libraries load by this name."""

RDMA = Path("/sys/class/infiniband")
"""Where Linux lists RDMA devices."""


class MemorySpan(NamedTuple):
    """A range of memory in this process or in a peer's: start address and length."""

    address: int
    nbytes: int


class MoveLostError(ProtocolError):
    """A transfer did not end; the memory that it writes to must never be used again."""


def installed() -> bool:
    """Return whether NIXL can be imported here."""
    return importlib.util.find_spec("nixl") is not None


def wanted(transport: str) -> bool:
    """Return whether records should go over NIXL, for a `transport` of the configuration.

    `auto` requires an RDMA device: without RDMA, UCX is slower than plain sockets.
    """
    rdma = RDMA.is_dir() and any(RDMA.iterdir())
    return installed() and (transport == "nixl" or (transport == "auto" and rdma))


def span_of(part: memoryview) -> MemorySpan:
    """Return the address and length of a buffer in this process."""
    return MemorySpan(np.frombuffer(part, np.uint8).ctypes.data, len(part))


def pack_spans(spans: Sequence[MemorySpan]) -> bytes:
    """Encode spans for the wire: address and length, 8 bytes each, little-endian."""
    return b"".join(_SPAN.pack(*span) for span in spans)


def unpack_spans(packed: bytes) -> list[MemorySpan]:
    """Decode spans; raise ProtocolError unless the length is a multiple of a span's."""
    if len(packed) % _SPAN.size:
        raise ProtocolError(f"spans: {len(packed)} bytes do not divide by {_SPAN.size}")
    return [MemorySpan(*fields) for fields in _SPAN.iter_unpack(packed)]


class NixlAgent:
    """One NIXL agent over UCX. Any thread; takes about a second to make.

    Raises ImportError without NIXL, RuntimeError without its UCX plugin.
    """

    def __init__(self, role: str) -> None:
        # NIXL's wheel contains its own libnl-route and loads it into the global scope. UCX's EFA
        # module then loads the system's libefa, which loads the system's libnl-route: a second
        # copy, whose calls resolve to the first one. Its destructor then corrupts the first copy's
        # lists, and the process ends with SIGSEGV at exit. A copy that is loaded first and bound at
        # once uses its own lists.
        with contextlib.suppress(OSError):  # not installed, so there is no second copy
            ctypes.CDLL(_NETLINK_ROUTE, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        api: Any = importlib.import_module("nixl._api")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        options = api.nixl_agent_config(
            enable_prog_thread=False,  # it would occupy a core for the agent's lifetime
            backends=["UCX"],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = api.nixl_agent(f"holdfast-{role}-{uuid.uuid4().hex}", options)
        if "UCX" not in self._agent.backends:
            raise RuntimeError("NIXL came without its UCX plugin")
        self._lock = threading.Lock()
        self._peers: dict[str, int] = {}

    def register(self, memory: memoryview) -> object:
        """Let transfers use this memory, until `deregister` or the agent's end; pins its pages.

        The memory must stay mapped, and keep its pages, until then.
        """
        try:
            return self._agent.register_memory([(*span_of(memory), 0, "")], "DRAM")
        except Exception as error:  # NIXL's exceptions have no common base class
            raise ProtocolError(
                f"nixl: {len(memory)} bytes cannot be registered: {error}; is there a limit of "
                "locked memory (ulimit -l)?"
            ) from error

    def deregister(self, registration: object) -> None:
        """End a registration; no transfer may be using its memory."""
        try:
            self._agent.deregister_memory(registration)
        except Exception as error:  # NIXL's exceptions have no common base class
            raise ProtocolError(f"nixl: memory cannot be deregistered: {error}") from error

    def metadata(self) -> bytes:
        """Return the metadata that another agent needs to access the memory registered so far."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer by its metadata and return its name; call `remove_peer` once for each call."""
        if len(metadata) > METADATA_BYTES_MAX:
            raise ProtocolError(
                f"nixl: {len(metadata)} bytes of metadata, the limit is {METADATA_BYTES_MAX}"
            )
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:  # NIXL's exceptions have no common base class
                raise ProtocolError(f"nixl: invalid metadata: {error}") from error
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._peers[peer] = self._peers.get(peer, 0) + 1
        return peer

    def remove_peer(self, peer: str) -> None:
        """Undo one `add_peer`."""
        with self._lock:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception as error:  # NIXL's exceptions have no common base class
                    raise ProtocolError(f"nixl: a peer cannot be removed: {error}") from error

    def progress(self) -> None:
        """Progress transfers that peers have started with this agent; no effect with RDMA.

        Without RDMA, such transfers progress only during this call or a transfer of this agent.
        """
        try:
            self._agent.get_new_notifs()
        except Exception as error:  # NIXL's exceptions have no common base class
            raise ProtocolError(f"nixl: transfers do not progress: {error}") from error

    def move(
        self,
        way: Literal["READ", "WRITE"],
        peer: str,
        theirs: Sequence[MemorySpan],
        ours: Sequence[memoryview],
    ) -> None:
        """Copy a peer's memory into registered memory of this process, or the other way.

        Returns when done; raises ProtocolError if NIXL refuses the transfer or it fails.
        """
        handle = None
        try:
            local = self._agent.get_xfer_descs([(*span_of(part), 0) for part in ours], "DRAM")
            remote = self._agent.get_xfer_descs([(*span, 0) for span in theirs], "DRAM")
            handle = self._agent.initialize_xfer(way, local, remote, peer)
            state = self._agent.transfer(handle)
            state = self._wait(handle) if state == "PROC" else state
        except ProtocolError:
            raise
        except Exception as error:  # NIXL's exceptions have no common base class
            if handle is not None:
                self._cancel(handle)
            raise ProtocolError(f"nixl: {way.lower()} refused: {error}") from error
        if state != "DONE":
            self._cancel(handle)
            raise ProtocolError(f"nixl: a {way.lower()} of {len(ours)} records failed: {state}")
        self._agent.release_xfer_handle(handle)

    def _wait(self, handle: object) -> str:
        """Wait until a transfer has ended, because until then it may write to the memory.

        Cancels it after `MOVE_S_MAX`; raises MoveLostError if that fails.
        """
        end_s, pause_s = time.monotonic() + MOVE_S_MAX, _POLL_MIN_S
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            if time.monotonic() > end_s:
                self._cancel(handle)
                raise ProtocolError(f"nixl: cancelled after {MOVE_S_MAX:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return str(state)

    def _cancel(self, handle: object) -> None:
        """Cancel a transfer, which may be under way; raise MoveLostError if that fails."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:  # NIXL's exceptions have no common base class
            raise MoveLostError(f"nixl: a transfer cannot be cancelled: {error}") from error


class PeerMemory:
    """The memory that one peer has registered; one object per connection, closed with it."""

    def __init__(self, agent: NixlAgent, peer: str) -> None:
        self._agent = agent
        self._peer = peer

    @classmethod
    def of_metadata(cls, agent: NixlAgent | None, metadata: bytes) -> PeerMemory | None:
        """Add a peer by its NIXL metadata; return None if either side has no usable NIXL."""
        if agent is None or not metadata:
            return None
        try:
            return cls(agent, agent.add_peer(metadata))
        except ProtocolError as error:
            _log.warning("records go over TCP: %s", error)
            return None

    def read(self, spans: bytes, into: Sequence[memoryview | None]) -> None:
        """Copy the peer's records into these buffers, skipping those whose buffer is None."""
        wanted = [
            (span, part)
            for span, part in zip(_spans(spans, into), into, strict=True)
            if part is not None
        ]
        if wanted:
            theirs, ours = zip(*wanted, strict=True)
            self._agent.move("READ", self._peer, theirs, ours)

    def write(self, spans: bytes, records: Sequence[memoryview]) -> None:
        """Copy records into the peer's memory."""
        if records:
            self._agent.move("WRITE", self._peer, _spans(spans, records), records)

    def close(self) -> None:
        """Remove the peer from the agent."""
        self._agent.remove_peer(self._peer)


def _spans(packed: bytes, parts: Sequence[memoryview | None]) -> list[MemorySpan]:
    """Unpack one span per part, cut to its length; raise ProtocolError if a part does not fit."""
    spans = unpack_spans(packed)[: len(parts)]
    fit = len(spans) == len(parts) and all(
        part is None or span.nbytes >= len(part) for span, part in zip(spans, parts, strict=True)
    )
    if not fit:
        raise ProtocolError(f"spans: {len(packed)} bytes do not describe {len(parts)} records")
    return [
        span if part is None else span._replace(nbytes=len(part))
        for span, part in zip(spans, parts, strict=True)
    ]
