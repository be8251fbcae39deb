"""Reads and writes of a peer's registered memory over NIXL, one object per connection."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.errors import ProtocolError
from holdfast.wire.remote.nixl import MemorySpan, NixlAgent, unpack_spans

_log = logging.getLogger(__name__)


class PeerMemory:
    """The memory that one peer has registered; closed with the peer's connection."""

    def __init__(self, agent: NixlAgent, peer: str) -> None:
        self._agent = agent
        self._peer = peer

    @classmethod
    def over(cls, agent: NixlAgent | None, metadata: bytes) -> PeerMemory | None:
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
            self._agent.read(self._peer, theirs, ours)

    def write(self, spans: bytes, records: Sequence[memoryview]) -> None:
        """Copy records into the peer's memory."""
        if records:
            self._agent.write(self._peer, _spans(spans, records), records)

    def close(self) -> None:
        """Remove the peer from the agent."""
        self._agent.remove_peer(self._peer)


def _spans(packed: bytes, parts: Sequence[memoryview | None]) -> list[MemorySpan]:
    """Unpack one span per part; raise ProtocolError if a length differs from its part's."""
    spans = unpack_spans(packed)[: len(parts)]
    fit = len(spans) == len(parts) and all(
        part is None or span.nbytes == len(part) for span, part in zip(spans, parts, strict=True)
    )
    if not fit:
        raise ProtocolError(f"spans: {len(packed)} bytes do not describe {len(parts)} records")
    return spans
