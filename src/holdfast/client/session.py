"""Access to a node's store from another process on the machine: sessions over a Unix socket.

Keys, slots and leases cross the socket. Payloads are in the arena of the domain, which the node and
the client have both mapped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar

import msgspec

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.key import Chain, unpack_keys
from holdfast.blocks.layout import LayoutSlice
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.blocks.payload_part import SliceCopy
from holdfast.buffers import SharedMapping
from holdfast.client.fresh_slots import reserve_slots
from holdfast.client.named_blocks import open_named_session
from holdfast.codec.pack import payload
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import (
    NodeGoneError,
    Outcome,
    ProtocolError,
    RefusedError,
    StoreClosedError,
)
from holdfast.limits import RESERVE_BLOCKS_MAX
from holdfast.named_blocks import NamedSession
from holdfast.policy.retention import Retention
from holdfast.session import (
    LOOK_S,
    LOOKUP_SHARE,
    PIN_S,
    RECOVERING,
    SYNC_S,
    KeyPage,
    Landed,
    Session,
    check_session,
    name_unanswered,
    nothing_held,
)
from holdfast.status import NodeStatus, read_status
from holdfast.version import __version__
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.refusal_backoff import RefusalBackoff

T = TypeVar("T")

CONNECT_S = 5.0
"""Maximum timeout of connecting to a node."""
ANSWER_S = 30.0
"""Timeout of an answer that needs no other node and no shared tier."""
LATE_S = 2.0
"""Time after a request's deadline at which a node without an answer counts as gone."""
RETRY_S = 1.0
"""Minimum interval between attempts to connect."""
_OUTCOMES = {str(outcome): outcome for outcome in Outcome}
"""Outcomes by name; a newer node may send a name that is not among them."""
_log = logging.getLogger(__name__)
_PEER = f"python {__version__}"
_SHORTEST_CONNECT_S = 0.5
"""Minimum timeout of connecting to a node, for a fetch with a shorter deadline."""
_SHORTEST_DEADLINE_S = 0.001
"""Smallest deadline of a lookup or hint that is sent; 0 selects the node's default."""


class NodeStore:
    """A node's store; close it, or use it in a `with` block.

    Raises NodeGoneError if no node answers at `address`, UntrustedPeerError if another user's
    process may listen there, RefusedError if the node refuses this user.
    """

    def __init__(self, address: str, domain: str = "default") -> None:
        self.address = address
        self.domain = domain
        self._node = _Connection(address, m.Hello(m.PROTOCOL, _PEER))
        self._lock = threading.Lock()
        self._sessions = weakref.WeakSet[RemoteSession]()

    def session(
        self,
        fingerprint: Fingerprint,
        domain: str | None = None,
        layout_slice: LayoutSlice | None = None,
    ) -> Session:
        """Return a session for one fingerprint in one domain.

        `layout_slice`: the heads and layers of portable blocks that the session writes and reads;
        by default all of them.

        The session has a connection of its own, which ends with the last reference to the session,
        and reconnects when the node is back.
        """
        name = self.domain if domain is None else domain
        check_session(fingerprint, name, layout_slice)
        self._node.check_open()
        session = RemoteSession(self.address, fingerprint, name, layout_slice)
        with self._lock:
            self._sessions.add(session)
        return Session(session)

    def named_session(self, fingerprint: Fingerprint, domain: str | None = None) -> NamedSession:
        """Return the blocks of a fingerprint in a domain that an engine names by its own hashes.

        They have a connection of their own, which `NamedSession.close` ends.
        """
        self._node.check_open()
        name = self.domain if domain is None else domain
        return open_named_session(self.address, fingerprint, name)

    def status(self) -> NodeStatus:
        """Return the node's status, which `holdfast inspect --json` shows."""
        return read_status(self._node.call(m.Status(), m.ReportReply, ANSWER_S).data)

    def listing(self) -> list[dict[str, Any]]:
        """Return the stored blocks by fingerprint, domain and tier."""
        data = self._node.call(m.List(), m.ReportReply, ANSWER_S).data
        return msgspec.convert(data["blocks"], list[dict[str, Any]])

    def close(self) -> None:
        """End every session; the node frees their leases and reservations."""
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteSession:
    """See `holdfast.session.SessionBackend`.

    An exception that interrupts a call ends the connection, so that the node frees the call's
    leases and reservations; the next call reconnects.
    """

    def __init__(
        self,
        address: str,
        fingerprint: Fingerprint,
        domain: str,
        layout_slice: LayoutSlice | None = None,
    ) -> None:
        self.slice_copy = SliceCopy(fingerprint.representation.raw_bytes, layout_slice)
        hello = m.Hello(m.PROTOCOL, _PEER, domain=domain, part=self.slice_copy.part)
        self._connection, welcome = _connected(address, hello, fingerprint)
        if welcome.exact_because:
            _log.warning("node %s: %s", address, welcome.exact_because)
        if welcome.codec:  # every reconnection keeps what is chosen here
            self._connection.close()
            fingerprint = fingerprint.quantised(welcome.codec, welcome.codec_version)
            self._connection, welcome = _connected(address, hello, fingerprint)
        weakref.finalize(self, self._connection.close)
        layout, digest = fingerprint.representation, fingerprint.digest()
        self.domain_key = welcome.domain_key
        self.segment_blocks = welcome.segment_blocks
        self.namespace = Namespace(
            digest, domain_id(welcome.domain_key), layout.raw_bytes, layout.block_tokens
        )

    def cover(self, keys: Sequence[bytes], deadline_s: float) -> int:
        lookup_s = max(min(deadline_s, LOOK_S), _SHORTEST_DEADLINE_S)
        cover = m.Cover(b"".join(keys), deadline_s=lookup_s)
        return self._connection.call(cover, m.Covered, lookup_s + LATE_S).blocks

    def save(self, chain: Chain, rows: Sequence[memoryview], retention: Retention) -> int:
        saved, raw_bytes = 0, self.namespace.raw_bytes
        for first in range(0, len(chain), RESERVE_BLOCKS_MAX):
            part = rows[first : first + RESERVE_BLOCKS_MAX]
            keys = chain.packed(first, first + len(part))
            reserve = m.Reserve(keys, chain.parent(first), first, chain.segment(first))
            with self._connection.held(ANSWER_S) as client:
                reserved = reserve_slots(client, reserve, ANSWER_S)
                arena = _arena(client)
                for place, row in zip(reserved.places, part, strict=True):
                    if place >= 0:
                        self.slice_copy.write(row, payload(arena.view[place:], raw_bytes))
                commit = m.Commit(reserved.ticket, str(retention))
                saved += client.call(commit, m.Committed, ANSWER_S).blocks
        return saved

    def fetch(self, chain: Chain, rows: Sequence[memoryview], deadline_s: float) -> Landed:
        until_s = time.monotonic() + deadline_s
        lookup_s = max(min(LOOKUP_SHARE * deadline_s, LOOK_S), _SHORTEST_DEADLINE_S)
        prompt_tokens = len(chain) * chain.block_tokens
        limit_s = min(deadline_s, DEADLINE_S_MAX)
        cover = m.Cover(chain.packed(), prompt_tokens, limit_s=limit_s, deadline_s=lookup_s)
        try:
            with self._connection.held(deadline_s) as client:
                covered = client.call(cover, m.Covered, lookup_s + LATE_S)
                left_s = min(max(until_s - time.monotonic(), 0.0), DEADLINE_S_MAX)
                landed, loaded_s = self._fetch(client, chain, covered, rows, left_s)
        except (NodeGoneError, StoreClosedError) as error:
            return Landed(0, 0, {}, Outcome.GONE, str(error))
        loaded = {tier: blocks * chain.block_tokens for tier, blocks in landed.sources.items()}
        endings = [(covered.plan, loaded_s, 0.0)] if covered.plan else []
        report = m.Observed([], endings=endings, prompts=[(prompt_tokens, 0, loaded)])
        with contextlib.suppress(NodeGoneError):  # the report is lost
            client.forget(client.send(report))
        unanswered = {
            tier: Outcome.GONE if said == Outcome.GONE else Outcome.LATE
            for tier, said in covered.unanswered.items()
        }
        return name_unanswered(landed, unanswered)

    def list_keys(self, start: int, limit: int) -> KeyPage:
        listed = self._connection.call(m.ListKeys(start, limit), m.ListedKeys, ANSWER_S)
        return KeyPage(unpack_keys(listed.keys), listed.next)

    def follow(self, session: str, keys: Sequence[bytes]) -> None:
        cover = m.Cover(b"".join(keys), session=session, deadline_s=_SHORTEST_DEADLINE_S)
        self._connection.call(cover, m.Covered, ANSWER_S)

    def closed(self, session: str) -> int:
        return self._hint(m.Closed(session), ANSWER_S)

    def returns(self, session: str, in_s: float) -> int:
        return self._hint(m.Returns(session, in_s), ANSWER_S)

    def prestage(self, keys: Sequence[bytes], in_s: float, deadline_s: float) -> int:
        lookup_s = max(min(deadline_s, LOOK_S), _SHORTEST_DEADLINE_S)
        return self._hint(m.Prestage(b"".join(keys), in_s, lookup_s), ANSWER_S)

    def pin(self, keys: Sequence[bytes], ttl_s: float, deadline_s: float) -> int:
        read_s = max(min(deadline_s, PIN_S), _SHORTEST_DEADLINE_S)
        pin = m.Pin(b"".join(keys), ttl_s, read_s)
        return self._hint(pin, max(read_s, ANSWER_S) + LATE_S)

    def sync(self, keys: Sequence[bytes], deadline_s: float) -> int:
        write_s = max(min(deadline_s, SYNC_S), _SHORTEST_DEADLINE_S)
        return self._hint(m.Sync(b"".join(keys), write_s), max(write_s, ANSWER_S) + LATE_S)

    def close(self) -> None:
        """End the connection; the node frees the session's leases and reservations."""
        self._connection.close()

    def _fetch(
        self,
        client: Client,
        chain: Chain,
        covered: m.Covered,
        rows: Sequence[memoryview],
        left_s: float,
    ) -> tuple[Landed, float]:
        """Copy the covered blocks into the rows; return the result, and the seconds that it took.

        0 seconds: no blocks were copied, or they must not be used.
        """
        if not covered.blocks:
            reason = nothing_held(recovering=RECOVERING in covered.reason)
            return Landed(0, 0, {}, Outcome.MISS, reason), 0.0
        began_s = time.monotonic()
        fetch = m.Fetch(chain.packed(0, covered.blocks), left_s, covered.plan)
        fetched = client.call(fetch, m.Fetched, left_s + LATE_S)
        arena = _arena(client)
        for place, row in zip(fetched.places, rows, strict=False):
            self.slice_copy.read(payload(arena.view[place:], self.namespace.raw_bytes), row)
        loaded_s, landed = time.monotonic() - began_s, len(fetched.places)
        if landed:
            rest_s = max(left_s - loaded_s, 0.0) + LATE_S
            if not client.call(m.Release(fetched.lease), m.Released, rest_s).valid:
                return Landed(0, 0, {}, Outcome.LATE, "the lease expired during the copy"), 0.0
        tokens, outcome = landed * chain.block_tokens, _OUTCOMES.get(fetched.outcome, Outcome.GONE)
        result = Landed(tokens, landed, fetched.sources, outcome, fetched.reason)
        return result, loaded_s if landed else 0.0

    def _hint(self, hint: m.Request, within_s: float) -> int:
        return self._connection.call(hint, m.Hinted, within_s).blocks


class _Connection:
    """A connection to a node that is restored after a failure, at most once every `RETRY_S`."""

    def __init__(self, address: str, hello: m.Hello) -> None:
        self._address = address
        self._hello = hello
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._retry_at_s = 0.0
        self._backoff = RefusalBackoff(address, RETRY_S)
        self._refusal = ""
        """Why the node refused the last attempt to connect."""
        self._client = Client(address, hello, CONNECT_S)

    def client(self, within_s: float) -> Client:
        """Return a connected client; reconnecting takes at most `within_s` and `CONNECT_S`.

        Raises NodeGoneError, RefusedError or StoreClosedError.
        """
        self.check_open()
        timeout_s = min(max(within_s, _SHORTEST_CONNECT_S), CONNECT_S)
        if not self._lock.acquire(timeout=timeout_s):
            raise NodeGoneError(f"node {self._address}: no connection; another thread reconnects")
        try:
            if self._client.closed:
                if not self._backoff.due():
                    raise RefusedError(self._refusal)
                if time.monotonic() < self._retry_at_s:
                    raise NodeGoneError(f"node {self._address}: no connection; reconnecting soon")
                self._backoff.connecting()
                try:
                    self._client = Client(self._address, self._hello, timeout_s)
                    self._backoff.accepted()
                except RefusedError as error:
                    self._refusal = str(error)
                    self._backoff.refused()
                    raise
                except BaseException:
                    self._retry_at_s = time.monotonic() + RETRY_S
                    raise
            return self._client
        finally:
            self._lock.release()

    def call(self, request: m.Request, kind: type[T], within_s: float) -> T:
        """Send one request and return its reply, of this kind."""
        with self.held(within_s) as client:
            return client.call(request, kind, within_s)

    @contextlib.contextmanager
    def held(self, within_s: float) -> Iterator[Client]:
        """Yield a connected client; any exception of the block except a refusal closes it."""
        client = self.client(within_s)
        try:
            yield client
        except RefusedError:
            raise
        except BaseException:
            client.close()
            raise

    def check_open(self) -> None:
        """Raise StoreClosedError if the store was closed, or is of this process's parent."""
        if self._closed:
            raise StoreClosedError("this store was closed; open it again")
        if self._pid != os.getpid():
            raise StoreClosedError(
                f"this store was opened by process {self._pid}; open it again after the fork"
            )

    def close(self) -> None:
        """End the connection; a forked child does not end its parent's."""
        self._closed = True
        if self._pid == os.getpid():
            self._client.close()


def _connected(
    address: str, hello: m.Hello, fingerprint: Fingerprint
) -> tuple[_Connection, m.Welcome]:
    """Connect a session for blocks with this fingerprint."""
    layout = fingerprint.representation
    named = msgspec.structs.replace(
        hello,
        fingerprint=fingerprint.digest(),
        raw_bytes=layout.raw_bytes,
        block_tokens=layout.block_tokens,
        description=msgspec.json.encode(fingerprint).decode(),
        element_bytes=layout.element_bytes,
    )
    connection = _Connection(address, named)
    return connection, connection.client(CONNECT_S).welcome


def _arena(client: Client) -> SharedMapping:
    if client.arena is None:
        raise ProtocolError("the node sent no arena for this session")
    return client.arena
