"""The target: this node's store for other nodes, over TCP, one thread a connection.

A peer is authenticated before any other message is read: by TLS with certificates on both sides, a
token, or both. Without either, the target listens on a loopback address only, and the peer must be
a process of this process's user or of root.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.address import HostPort, tcp_address, tcp_endpoint
from holdfast.errors import BusyError, ConfigError, ProtocolError, RefusedError
from holdfast.node.refusals import RefusalLog
from holdfast.node.remote.service import TargetService
from holdfast.node.remote.session import HANDSHAKE_BYTES_MAX, ReceiveBuffer, TargetSession
from holdfast.wire.frame import CONNECTION_ID, encode
from holdfast.wire.local.messages import Refused
from holdfast.wire.remote.credentials import ServerTls, tls_trouble
from holdfast.wire.remote.messages import TARGET_PROTOCOL, Busy, Challenge, Join, Joined
from holdfast.wire.remote.nixl import PeerMemory
from holdfast.wire.remote.peer_user import check_peer
from holdfast.wire.remote.stream import Deadline, PlainStream, Stream, TlsStream, tune
from holdfast.wire.remote.token import Token, TokenClaims, check, nonce, prove, proves

_NOT_OPEN = (
    "give the target tls or tokens, or set open: true in its configuration if every local user may "
    "enter"
)

HOST_SHARE = 0.75
"""Share of the unauthenticated connections that one host may have."""

_BACKLOG = 512
_ACCEPT_REST_S = 0.1
_JOIN_S = 10.0
_log = logging.getLogger(__name__)


class EntryRules(NamedTuple):
    """What a peer must show: a certificate that `tls` accepts, a token made with a key.

    `token_keys` returns the keys for a new connection; a token made with any of them is accepted.

    If neither is set, the peer must be a process of this process's user or of root on this machine,
    unless `any_user`.
    """

    tls: ServerTls | None = None
    token_keys: Callable[[], Sequence[bytes]] | None = None
    any_user: bool = False


def bind(address: str) -> socket.socket:
    """Return a bound socket that does not listen yet; raise ConfigError or BusyError."""
    endpoint = tcp_endpoint(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            *endpoint, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"listen: {address!r}: {error.strerror}; name an address here") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(listener, endpoint)
        listener.bind(place)
    except OSError as error:
        listener.close()
        kind_of = BusyError if error.errno == errno.EADDRINUSE else ConfigError
        raise kind_of(f"listen: {address!r}: {error.strerror}; choose another") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Return where a bound socket can be reached, its port filled in."""
    return tcp_address(*listener.getsockname()[:2])


class TargetServer:
    """Serves one listening socket, and owns it."""

    def __init__(self, listener: socket.socket, service: TargetService, entry: EntryRules) -> None:
        self._listener = listener
        self._service = service
        self._entry = entry
        self._limits = service.limits
        self._lock = threading.Lock()
        self._peers: dict[threading.Thread, socket.socket | Stream] = {}
        """The thread of each connection, and its socket, or its stream once there is one."""
        self._beyond_limit = set[threading.Thread]()
        """Those of the threads that only tell their peer that the target is at its limit."""
        self._joining = Counter[str]()
        self._refusals = RefusalLog(_log)
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="holdfast-accept", daemon=True)

    def start(self) -> None:
        """Let peers connect."""
        self._listener.listen(_BACKLOG)
        self._acceptor.start()

    def close(self) -> None:
        """Stop listening, cut every connection, and wait for their threads to leave the store."""
        with self._lock:
            self._closing = True
            peers = list(self._peers.values())
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.cut() if isinstance(peer, Stream) else peer.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor.ident is not None:
            self._acceptor.join(_JOIN_S)
        self._listener.close()
        with self._lock:
            threads = list(self._peers)
        for thread in threads:
            thread.join(_JOIN_S)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connected, peer = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    _log.warning("accept failed: %s", error)
                    time.sleep(_ACCEPT_REST_S)  # out of descriptors: give connections time to end
                continue
            self._service.counters.accepted += 1
            if not self._admit(connected, HostPort(*peer[:2])):
                self._service.counters.turned_away += 1
                connected.close()

    def _admit(self, connected: socket.socket, peer: HostPort) -> bool:
        """Start a connection's thread; return False if a limit or the system does not allow it.

        A connection beyond the number of those that are served gets a thread to tell its peer so.
        """
        with self._lock:
            too_many = (
                self._joining.total() >= self._limits.handshakes
                or self._joining[peer.host] >= HOST_SHARE * self._limits.handshakes
            )
            if self._closing or too_many:
                return False
            thread = threading.Thread(
                target=self._serve, args=(connected, peer), name="holdfast-peer", daemon=True
            )
            is_served = len(self._peers) - len(self._beyond_limit) < self._limits.connections
            if not is_served:
                self._beyond_limit.add(thread)
            self._peers[thread] = connected
            self._joining[peer.host] += 1
        self._service.count_connections(int(is_served))
        try:
            thread.start()
        except RuntimeError as error:  # the limit of processes, or of memory for stacks
            _log.warning("a connection is turned away: %s; raise the limit of threads", error)
            self._handshake_ended(peer)
            self._forget(thread)
            return False
        return True

    def _serve(self, connected: socket.socket, peer: HostPort) -> None:
        joined, why = False, ""
        stream: Stream | None = None
        try:
            tune(connected, peer)
            deadline = Deadline.within(self._limits.handshake_s)
            tls = self._entry.tls
            stream = TlsStream(connected, tls.context()) if tls else PlainStream(connected)
            with self._lock:
                self._peers[threading.current_thread()] = stream
                if self._closing:  # `close` may have seen only the socket, not this stream
                    raise ConnectionAbortedError
            if isinstance(stream, TlsStream):
                stream.shake_hands(deadline)
            if threading.current_thread() in self._beyond_limit:
                self._turn_away(stream, peer, deadline)
                return
            session = self._join(connected, stream, deadline)
            joined = True
            self._handshake_ended(peer)
            with contextlib.closing(session):
                session.serve()
        except ConnectionError as error:
            why = "" if joined else str(error)
        except (OSError, ProtocolError, RefusedError) as error:
            why = tls_trouble(error) if isinstance(error, ssl.SSLError) else str(error)
            # A peer that closes during the TLS handshake, as a health check does, is not denied.
            has_left = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
            if isinstance(error, RefusedError | ssl.SSLError) and not has_left:
                self._service.store.audit.deny(f"host {peer.host}", why)
        except Exception as error:  # noqa: BLE001  # a mistake ends one connection, not the target
            why = f"the target failed: {error!r}"
            _log.error("connection failed peer=%s:%d", peer.host, peer.port, exc_info=error)
        finally:
            if not joined:
                self._handshake_ended(peer)
            if why:
                self._service.counters.protocol_errors += 1
                line = f"connection ended peer={peer.host}:{peer.port}: {why}"
                self._refusals.report(f"host {peer.host}", why, line)
            self._forget(threading.current_thread())
            if stream is not None:
                stream.close()
            connected.close()

    def _handshake_ended(self, peer: HostPort) -> None:
        with self._lock:
            self._joining -= Counter((peer.host,))

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            del self._peers[thread]
            was_served = thread not in self._beyond_limit
            self._beyond_limit.discard(thread)
        self._service.count_connections(-int(was_served))

    def _turn_away(self, stream: Stream, peer: HostPort, deadline: Deadline) -> None:
        """Tell a peer that this target serves no more, so that it does not count as dead."""
        self._service.counters.turned_away += 1
        most = self._limits.connections
        why = f"{most} connections are served, as many as target_connections permits"
        line = f"connection turned away peer={peer.host}:{peer.port}: {why}; raise it"
        self._refusals.report(f"host {peer.host}", why, line)
        stream.send([encode(CONNECTION_ID, Busy(most))], deadline)

    def _join(self, connected: socket.socket, stream: Stream, deadline: Deadline) -> TargetSession:
        """Challenge the peer; return its session, or send the refusal and raise RefusedError."""
        ours = nonce()
        agent = self._service.agent
        challenge = Challenge(TARGET_PROTOCOL, ours, nixl=agent is not None)
        stream.send([encode(CONNECTION_ID, challenge)], deadline)
        inbox = ReceiveBuffer(stream)
        joining = inbox.next(deadline.seconds(), self._limits.body_s, HANDSHAKE_BYTES_MAX)
        join = joining.message
        if not isinstance(join, Join):
            raise ProtocolError(f"the first message is {type(join).__name__}, not Join")
        claims: TokenClaims | None = None
        proof = b""
        try:
            entry = self._entry
            if entry.tls is None and entry.token_keys is None and not entry.any_user:
                check_peer(connected, "the peer", _NOT_OPEN)
            if join.protocol != TARGET_PROTOCOL:
                raise RefusedError(
                    f"protocol version {join.protocol} is not spoken here, {TARGET_PROTOCOL} is; "
                    "install the same version of holdfast on both sides"
                )
            if entry.token_keys is not None:
                token = _proved_token(entry.token_keys(), join, ours + join.nonce)
                claims, proof = token.claims, prove(token, "target", ours + join.nonce)
        except RefusedError as error:
            self._service.counters.refused += 1
            stream.send([encode(joining.request_id, Refused(str(error)))], deadline)
            raise
        service = self._service
        peer_memory = PeerMemory.of_metadata(agent, join.nixl)
        session = TargetSession(service, stream, inbox, claims, peer_memory, join.peer[:80])
        joined = Joined(
            protocol=TARGET_PROTOCOL,
            incarnation=service.store.incarnation,
            proof=proof,
            nixl=peer_memory is not None,
            page=service.addresses.page,
        )
        try:
            stream.send([encode(joining.request_id, joined)], deadline)
        except BaseException:
            session.close()
            raise
        _log.debug("session peer=%r claims=%s", join.peer[:80], claims)
        return session


def _proved_token(keys: Sequence[bytes], join: Join, nonces: bytes) -> Token:
    """Return the token that a peer proves with one of the keys. Raises RefusedError."""
    if not join.claims:
        raise RefusedError("token: this target requires one; name it in tokens.file")
    for key in keys:
        token = check(key, join.claims, time.time())
        if proves(token, "peer", nonces, join.proof):
            return token
    raise RefusedError("token: not made with this target's key; make one with `holdfast token`")
