"""What the connections of a target share: its store, its limits, its counters, its staging."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple

from holdfast.blocks.world import World
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
from holdfast.node.outgoing import Kept, Line
from holdfast.policy.turns import Errand, Turn
from holdfast.store.fair_threads import FairThreads
from holdfast.store.store import Store
from holdfast.wire.nixl import Agent
from holdfast.wire.stream import Progress

STAGE_THREADS = 2
STAGED_MAX = 256
"""Most stage requests of a domain that wait; more are dropped, as hints may be."""

LEASED_SHARE = 0.25
"""How much of the memory peers may lease in all: the rest must be there for those who put."""

_STAGE_S = 60.0
_DISCARD_BYTES = 2 * MIB
_RECEIVING_SHARE = 0.5
_RECEIVING_MOST = 1.5
"""First messages go beyond what may be received at once, up to this times as much."""

_STRANGERS = b""
"""What domains of which nothing is here count as: one domain."""

_SENDING_SHARE = 0.5
_log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """What no peer may exceed; times in seconds.

    `handshakes` connections may be without a hello, each for `handshake_s`. A payload must move
    `pace_bytes` in every `pace_s`.
    """

    connections: int = CONNECTIONS_MAX
    handshakes: int = HANDSHAKES_MAX
    handshake_s: float = HANDSHAKE_S
    idle_s: float = IDLE_S
    body_s: float = BODY_S
    pace_s: float = PACE_S
    pace_bytes: int = PACE_BYTES


class Counters:
    """What a target has seen since start; plain integers."""

    def __init__(self) -> None:
        self.connections = 0
        self.accepted = 0
        self.turned_away = 0
        self.protocol_errors = 0
        self.requests = 0
        self.refused = 0
        self.corrupt = 0
        self.received_bytes = 0
        self.sent_bytes = 0


class Leasing:
    """How many bytes a lease may take, and how many it took."""

    def __init__(self, granted: int) -> None:
        self.granted = granted
        self.taken = 0


class Service:
    """One store, served to other nodes. Closed before the store is."""

    def __init__(self, store: Store, limits: Limits | None = None) -> None:
        self.store = store
        self.limits = limits or Limits()
        self.epoch = 0
        """This target's view of the pool, told with every answer; it decides nothing."""
        self.counters = Counters()
        self.agent: Agent | None = None
        """Moves records where a peer asks for it; set while serving."""
        self._lock = threading.Lock()
        self._receiving_most = int(_RECEIVING_SHARE * store.host_bytes)
        self._receiving: Counter[bytes] = Counter()
        self._leased_most = int(LEASED_SHARE * store.host_bytes)
        self._leases: dict[int, tuple[float, int]] = {}
        self._lease_numbers = count()
        self.kept = Kept(int(_SENDING_SHARE * store.host_bytes))
        """Memory of records on their way out."""
        self.line = Line()
        """The way out."""
        self._discard = memoryview(bytearray(_DISCARD_BYTES))
        self._stagers = FairThreads(STAGE_THREADS, 1, "holdfast-stage")
        self._staged: Counter[bytes] = Counter()

    def offer_nixl(self) -> None:
        """Make an agent that reaches every arena; where that fails, records go over TCP.

        So they do where blocks are sealed here: what goes out then lies in no arena.
        """
        if any(map(self.store.states.sealing.seals, self.store.states.hosts)):
            _log.info("nixl is not offered: blocks are sealed here, and go over TCP")
            return
        try:
            agent = Agent("target")
            for host in self.store.states.all_hosts():
                agent.register(host.arena.view)
        except Exception as error:  # noqa: BLE001  # a library of others, and TCP does as well
            _log.warning("NIXL is installed but of no use, records go over TCP: %s", error)
            return
        self.agent = agent
        _log.info("nixl offered")

    def pace(self) -> Progress:
        """Return the pace that one payload must keep."""
        return Progress(self.limits.pace_bytes, self.limits.pace_s)

    @contextmanager
    def receiving(self, nbytes: int, domain: bytes) -> Iterator[bool]:
        """Say whether so many bytes may be received into slots now; they count until the end.

        Where several domains send, none has more than half of what may be under way. But one
        message of each may, up to half as much again in all: how much of it finds room is the
        store's to say. Domains of which nothing is here count as one, or whoever makes up a name
        for each message had all of the memory.
        """
        domain = domain if self._is_known(domain) else _STRANGERS
        with self._lock:
            under_way = self._receiving
            own, sum_bytes = under_way[domain] + nbytes, under_way.total() + nbytes
            most = self._receiving_most
            if own == nbytes:
                granted = own == sum_bytes or sum_bytes <= _RECEIVING_MOST * most
            else:
                granted = sum_bytes <= most and (own == sum_bytes or 2 * own <= most)
            if granted:
                under_way[domain] = own
        try:
            yield granted
        finally:
            if granted:
                with self._lock:
                    under_way[domain] -= nbytes
                    if not under_way[domain]:
                        del under_way[domain]

    @contextmanager
    def leasing(self, nbytes: int, ttl_s: float) -> Iterator[Leasing]:
        """Set memory aside for a lease before anything climbs; what is not `taken` goes back.

        What peers may have kept in memory at once is limited; what is read is not counted.
        """
        with self._lock:
            now = self.store.clock.now()
            self._leases = {n: lease for n, lease in self._leases.items() if lease[0] > now}
            left = self._leased_most - sum(kept for _, kept in self._leases.values())
            leasing, number = Leasing(min(nbytes, left)), next(self._lease_numbers)
            self._leases[number] = (math.inf, leasing.granted)
        try:
            yield leasing
        finally:
            with self._lock:
                del self._leases[number]
                if leasing.taken:
                    self._leases[number] = (self.store.clock.now() + ttl_s, leasing.taken)

    def discarding(self, nbytes: int) -> list[memoryview]:
        """Return buffers for bytes that nobody wants; all connections write to the same ones."""
        whole, rest = divmod(nbytes, len(self._discard))
        return [self._discard] * whole + ([self._discard[:rest]] if rest else [])

    def stage(self, world: World, keys: Sequence[bytes]) -> int:
        """Bring the leading run to memory, soon; return its length, 0 where it is not to be."""
        blocks, domain = self.store.cover(world, keys).blocks, world.domain
        with self._lock:
            if not blocks or self._staged[domain] >= STAGED_MAX:
                return 0
            self._staged[domain] += 1
        turn = Turn(domain, blocks * world.record_bytes, self.store.share(domain), Errand.AHEAD)
        try:
            self._stagers.submit(turn, partial(self._climb, world, keys[:blocks]))
        except RuntimeError:  # no thread to do it, or none any more: a hint may be dropped
            self._is_staged(domain)
            return 0
        return blocks

    def status(self) -> dict[str, int]:
        """Return the counters, and the bytes in memory that are being sent."""
        return {**vars(self.counters), "sending_bytes": self.kept.total()}

    def close(self) -> None:
        """Wait for what is being staged."""
        self._stagers.shutdown(cancel_futures=True)

    def _is_known(self, domain: bytes) -> bool:
        """Whether this node has a domain's key, or some of its records."""
        states = self.store.states
        return domain in states.hosts or any(used[domain] for used in states.fill.used)

    def _climb(self, world: World, keys: Sequence[bytes]) -> None:
        try:
            self.store.release(self.store.lend(world, keys, _STAGE_S, Errand.AHEAD).lease)
        finally:
            self._is_staged(world.domain)

    def _is_staged(self, domain: bytes) -> None:
        with self._lock:
            self._staged[domain] -= 1
            if not self._staged[domain]:
                del self._staged[domain]
