"""A peer's memory, reached over NIXL on its request: one connection's part of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.errors import ProtocolError
from holdfast.wire.nixl import Agent, Span, unpack_spans

_log = logging.getLogger(__name__)


class Reach:
    """Reads and writes what one peer has laid open; ends with the peer's connection."""

    def __init__(self, agent: Agent, peer: str) -> None:
        self._agent = agent
        self._peer = peer

    @classmethod
    def over(cls, agent: Agent | None, metadata: bytes) -> Reach | None:
        """Meet a peer by what it tells of itself; None where one of the two has no NIXL."""
        if agent is None or not metadata:
            return None
        try:
            return cls(agent, agent.meet(metadata))
        except ProtocolError as error:
            _log.warning("records go over TCP: %s", error)
            return None

    def bring(self, spans: bytes, into: Sequence[memoryview | None]) -> None:
        """Copy the peer's records into these buffers; one that is None stays where it is."""
        wanted = [
            (span, part)
            for span, part in zip(_spans(spans, into), into, strict=True)
            if part is not None
        ]
        if wanted:
            theirs, ours = zip(*wanted, strict=True)
            self._agent.read(self._peer, theirs, ours)

    def deliver(self, spans: bytes, records: Sequence[memoryview]) -> None:
        """Copy records into the peer's memory."""
        if records:
            self._agent.write(self._peer, _spans(spans, records), records)

    def close(self) -> None:
        """Forget the peer."""
        self._agent.part(self._peer)


def _spans(packed: bytes, parts: Sequence[memoryview | None]) -> list[Span]:
    """Read as many spans as there are parts, each of its part's length."""
    spans = unpack_spans(packed)[: len(parts)]
    fit = len(spans) == len(parts) and all(
        part is None or span.nbytes == len(part) for span, part in zip(spans, parts, strict=True)
    )
    if not fit:
        raise ProtocolError(f"spans: {len(packed)} bytes do not describe {len(parts)} records")
    return spans
