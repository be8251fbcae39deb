"""The backend of named blocks whose store is a node's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.fingerprint import Fingerprint
from holdfast.buffers import SharedMapping
from holdfast.client.fresh_slots import reserve_slots
from holdfast.devices.host import copier
from holdfast.errors import NodeGoneError, Outcome, ProtocolError
from holdfast.named_blocks import (
    BlockMemory,
    FoundBlocks,
    KeyedRun,
    LoadedRun,
    NamedAccess,
    NamedSession,
    check_named,
    rows_of,
    saved_outcomes,
)
from holdfast.policy.retention import Retention
from holdfast.version import __version__
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.reconnecting_client import NodeAddress, ReconnectingClient

CONNECT_S = 5.0
"""Timeout of connecting to a node, in the background."""

START_S = 10.0
"""Longest time that opening waits for a node to answer; later it connects in the background."""

LATE_S = 2.0
"""Time after a request's deadline at which a node without an answer counts as gone."""

_COPY = copier()
_OUTCOMES = {str(outcome): outcome for outcome in Outcome}
"""Outcomes by name; a newer node may send a name that is not among them."""


def open_named_session(
    address: NodeAddress, fingerprint: Fingerprint, domain: str = "default", peer: str = "python"
) -> NamedSession:
    """Return the named blocks of a node at `address`, which need not answer yet.

    `peer`: the engine's name in the node's log and metrics. The connection is made, and made again
    after it is lost, in the background; meanwhile every outcome is GONE.
    """
    check_named(fingerprint)
    return NamedSession(NodeNamedSession(address, fingerprint, domain, peer), fingerprint)


class NodeNamedSession:
    """See `holdfast.named_blocks.NamedBackend`."""

    def __init__(
        self, address: NodeAddress, fingerprint: Fingerprint, domain: str, peer: str
    ) -> None:
        layout = fingerprint.representation
        self._hello = m.Hello(
            m.PROTOCOL,
            f"{peer} {__version__}",
            fingerprint=fingerprint.digest(),
            raw_bytes=layout.raw_bytes,
            block_tokens=layout.block_tokens,
            domain=domain,
            description=msgspec.json.encode(fingerprint).decode(),
            element_bytes=layout.element_bytes,
            named=True,
        )
        self._node = ReconnectingClient(address, self._hello, CONNECT_S)
        self._node.wait(START_S)

    def access(self) -> NamedAccess:
        client = self._node.client()
        if client is None:
            raise NodeGoneError(self._node.failure)
        return _NodeAccess(client)

    def close(self) -> None:
        self._node.close()


class _NodeAccess:
    """See `holdfast.named_blocks.NamedAccess`; one connection, which a timeout ends."""

    def __init__(self, client: Client) -> None:
        if client.arena is None:
            raise ProtocolError("the node sent no arena for this session")
        self._client = client
        self._arena: SharedMapping = client.arena
        self.domain_key = client.welcome.domain_key

    def find(self, keys: Sequence[bytes], deadline_s: float) -> FoundBlocks:
        asked = m.Find(b"".join(keys), max(deadline_s, 0.001))
        found = self._client.call(asked, m.Found, deadline_s + LATE_S)
        if len(found.held) != len(keys):
            raise ProtocolError(f"the node answered for {len(found.held)} of {len(keys)} blocks")
        gone = Outcome.GONE
        return FoundBlocks(
            found.held, {tier: _OUTCOMES.get(why, gone) for tier, why in found.unanswered.items()}
        )

    def load(
        self, keys: Sequence[bytes], memory: Sequence[BlockMemory], deadline_s: float
    ) -> LoadedRun:
        client, arena = self._client, self._arena.address + HEADER_BYTES
        fetch = m.Fetch(b"".join(keys), deadline_s)
        fetched = client.call(fetch, m.Fetched, deadline_s + LATE_S)
        outcome = _OUTCOMES.get(fetched.outcome, Outcome.GONE)
        if not fetched.places:
            return LoadedRun(0, outcome)
        whole = _COPY(
            (to, source, nbytes)
            for place, block in zip(fetched.places, memory, strict=False)
            for source, to, nbytes in rows_of(arena + place, block)
        )
        released = client.call(m.Release(fetched.lease), m.Released, deadline_s + LATE_S)
        if not (whole and released.valid):
            return LoadedRun(0, Outcome.LATE)
        return LoadedRun(len(fetched.places), outcome)

    def save(
        self, run: KeyedRun, memory: Sequence[BlockMemory], retention: Retention, deadline_s: float
    ) -> list[Outcome]:
        client, arena = self._client, self._arena.address + HEADER_BYTES
        reserve = m.Reserve(b"".join(run.keys), run.parent, run.depth)
        reserved = reserve_slots(client, reserve, deadline_s)
        whole = _COPY(
            row
            for place, block in zip(reserved.places, memory, strict=True)
            if place >= 0
            for row in rows_of(arena + place, block)
        )
        if not whole:
            client.forget(client.send(m.Abort(reserved.ticket)))
            return [Outcome.GONE] * len(run.keys)
        commit = m.Commit(reserved.ticket, str(retention))
        published = client.call(commit, m.Committed, deadline_s).blocks
        outcome = _OUTCOMES.get(reserved.outcome, Outcome.GONE)
        return saved_outcomes(reserved.places, outcome, published, lambda: self.find(run.keys, 0.0))
