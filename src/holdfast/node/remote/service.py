"""What all connections of a target share: store, limits, counters, send budget."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.namespace import Namespace
from holdfast.errors import ProtocolError
from holdfast.limits import (
    BODY_S,
    CONNECTIONS_MAX,
    HANDSHAKE_S,
    HANDSHAKES_MAX,
    IDLE_S,
    MIB,
    PACE_BYTES,
    PACE_S,
)
from holdfast.node.paced_report import PacedReport
from holdfast.node.remote.send_budget import SendBudget, SendScheduler
from holdfast.status import DomainTraffic, NodeStatus, TargetStatus
from holdfast.store.store import Store
from holdfast.tiers.base import Place
from holdfast.version import __version__
from holdfast.wire.remote.nixl import NixlAgent
from holdfast.wire.remote.stream import ProgressLimit

_DISCARD_BYTES = 2 * MIB
_RECEIVING_SHARE = 0.5
_RECEIVING_BURST = 1.5
"""A domain's first message may exceed the receive limit, up to this multiple of it in all."""

_UNKNOWN_DOMAIN = b""
"""The one domain that all domains without a key or records here count as."""

_SENDING_SHARE = 0.5
_DOMAINS_MAX = 1024
"""Domains whose traffic is counted separately; a peer may name any."""

_DOMAINS_SHOWN = 64

_STATUS_REST = 0.25
_LISTING_REST = 4.0
"""Rests of `PacedReport`. Short for the status: with it hosts find out whether a target answers."""

_log = logging.getLogger(__name__)


class TargetLimits(NamedTuple):
    """Limits on peers; times in seconds.

    At most `handshakes` connections may be in the handshake, each for at most `handshake_s`. A
    payload must progress by `pace_bytes` in every `pace_s`.
    """

    connections: int = CONNECTIONS_MAX
    handshakes: int = HANDSHAKES_MAX
    handshake_s: float = HANDSHAKE_S
    idle_s: float = IDLE_S
    body_s: float = BODY_S
    pace_s: float = PACE_S
    pace_bytes: int = PACE_BYTES


class NodeAddresses(NamedTuple):
    """Where a node listens: for engines, for other nodes, and for readers of its status page.

    `page` is tcp://host:port, or empty.
    """

    local: str = ""
    remote: Sequence[str] = ()
    page: str = ""

    @property
    def role(self) -> str:
        """The role that follows from the addresses; see `NodeStatus`."""
        roles = [*(["node"] if self.local else []), *(["target"] if self.remote else [])]
        return " and ".join(roles) or "store"


@dataclass
class TargetCounters:
    """Counters of a target since its start."""

    connections: int = 0
    accepted: int = 0
    turned_away: int = 0
    protocol_errors: int = 0
    requests: int = 0
    refused: int = 0
    corrupt: int = 0
    received_bytes: int = 0
    received_blocks: int = 0
    sent_bytes: int = 0
    sent_blocks: int = 0


class TargetService:
    """One store, served to other nodes. `addresses`: where its node listens."""

    def __init__(
        self,
        store: Store,
        limits: TargetLimits | None = None,
        addresses: NodeAddresses | None = None,
    ) -> None:
        self.store = store
        self.limits = limits or TargetLimits()
        self.addresses = addresses or NodeAddresses()
        self.counters = TargetCounters()
        self.agent: NixlAgent | None = None
        """The NIXL agent, for peers that use NIXL; set by `offer_nixl` while serving."""
        self._lock = threading.Lock()
        self._receiving_most = int(_RECEIVING_SHARE * store.host_bytes)
        self._receiving: Counter[bytes] = Counter()
        self._received = Counter[bytes]()
        """Bytes by domain, as in `_sent`; domains beyond `_DOMAINS_MAX` are counted as unknown."""
        self._sent = Counter[bytes]()
        self.send_budget = SendBudget(int(_SENDING_SHARE * store.host_bytes))
        self.scheduler = SendScheduler()
        self._discard = memoryview(bytearray(_DISCARD_BYTES))
        self.peer_status = PacedReport(self._status_data, _STATUS_REST)
        """The node's status, as peers get it."""
        self.peer_listing = PacedReport(self._listing_data, _LISTING_REST)
        """The namespaces that the store holds, as peers get them."""

    def count_connections(self, change: int) -> None:
        """Add to the number of open connections, which all servers of the service share."""
        with self._lock:
            self.counters.connections += change

    def count_received(self, domain: bytes, blocks: int, nbytes: int) -> None:
        """Count records that a peer sent for a domain."""
        with self._lock:
            self.counters.received_blocks += blocks
            self.counters.received_bytes += nbytes
            self._received[_counted(domain, self._received)] += nbytes

    def count_sent(self, domain: bytes, blocks: int, nbytes: int) -> None:
        """Count records that were sent to a peer for a domain."""
        with self._lock:
            self.counters.sent_blocks += blocks
            self.counters.sent_bytes += nbytes
            self._sent[_counted(domain, self._sent)] += nbytes

    def offer_nixl(self) -> None:
        """Create a NIXL agent; if that fails, records go over TCP.

        Records also go over TCP if blocks are sealed here, because a sealed record is made outside
        the arena.
        """
        if self.store.is_sealed:
            _log.info("nixl is not offered: blocks are sealed here and go over TCP")
            return
        try:
            agent = NixlAgent("target")
        except Exception as error:  # noqa: BLE001  # a third-party library; TCP is the fallback
            _log.warning("NIXL is installed but failed, records go over TCP: %s", error)
            return
        self.agent = agent
        _log.info("nixl offered")

    def register(self, namespace: Namespace, places: Sequence[Place]) -> None:
        """Register the memory of slots in use, to transfer their records over NIXL.

        If that fails, raises ProtocolError, and NIXL is not offered to later connections.
        """
        agent = self.agent
        if agent is None:
            raise ProtocolError("nixl is no longer offered; connect again")
        try:
            self.store.register(namespace, places, agent)
        except ProtocolError as error:
            self.agent = None
            _log.warning("records go over TCP from now on: %s", error)
            raise

    def pace(self) -> ProgressLimit:
        """Return a new progress limit for one payload."""
        return ProgressLimit(self.limits.pace_bytes, self.limits.pace_s)

    @contextmanager
    def receiving(self, nbytes: int, domain: bytes) -> Iterator[bool]:
        """Yield whether slots of `nbytes` may be filled now; they count until the exit.

        An encoded record counts as much as its slot, which is longer than the record. If several
        domains send, each may have at most half of the receive limit under way. One message per
        domain may exceed this, up to `_RECEIVING_BURST` times the limit in all; the store decides
        how much of it gets slots. All unknown domains count as one, so that a peer
        that invents a domain per message cannot take all of the memory.
        """
        domain = domain if self.store.knows(domain) else _UNKNOWN_DOMAIN
        with self._lock:
            under_way = self._receiving
            own, sum_bytes = under_way[domain] + nbytes, under_way.total() + nbytes
            most = self._receiving_most
            if own == nbytes:
                granted = own == sum_bytes or sum_bytes <= _RECEIVING_BURST * most
            else:
                granted = sum_bytes <= most and (own == sum_bytes or 2 * own <= most)
            if granted:
                under_way[domain] = own
        try:
            yield granted
        finally:
            if granted:
                with self._lock:
                    under_way -= Counter({domain: nbytes})

    def discarding(self, nbytes: int) -> list[memoryview]:
        """Return buffers for bytes to discard; all connections share the same memory."""
        whole, rest = divmod(nbytes, len(self._discard))
        return [self._discard] * whole + ([self._discard[:rest]] if rest else [])

    def status(self) -> TargetStatus:
        """Return the counters, the bytes in memory that are being sent, and traffic by domain."""
        names = {domain: name for name, domain in self.store.domain_ids.items()}
        with self._lock:
            total = self._received + self._sent
            domains = [
                DomainTraffic(
                    domain=names.get(domain, domain.hex() or "others"),
                    configured=domain in names,
                    received_bytes=self._received[domain],
                    sent_bytes=self._sent[domain],
                )
                for domain, _ in total.most_common(_DOMAINS_SHOWN)
            ]
            counters = dict(vars(self.counters))
        return TargetStatus(**counters, sending_bytes=self.send_budget.total(), domains=domains)

    def node_status(self) -> NodeStatus:
        """Return the status of the store, of this service, and of the node that has both."""
        return msgspec.structs.replace(
            self.store.status(),
            version=__version__,
            host=socket.gethostname(),
            role=self.addresses.role,
            addresses=[*filter(None, [self.addresses.local]), *self.addresses.remote],
            target=self.status(),
        )

    def _status_data(self) -> dict[str, Any]:
        data: dict[str, Any] = msgspec.to_builtins(self.node_status())
        return data

    def _listing_data(self) -> dict[str, Any]:
        return {"blocks": self.store.listing()}


def _counted(domain: bytes, counts: Counter[bytes]) -> bytes:
    known = domain in counts or len(counts) < _DOMAINS_MAX
    return domain if known else _UNKNOWN_DOMAIN
