"""Pending hints: the chain of each followed session, queued prestages, and pins.

State only: call under the store's lock. All of it is bounded; a forgotten entry costs one hint.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.limits import MIB
from holdfast.status import HintStatus

SESSIONS_MAX = 65_536
KEYS_BYTES_MAX = 64 * MIB
"""Limit of the keys of all followed sessions; beyond it the least recently used is forgotten."""

WAITING_MAX = 4_096
"""Limit of queued prestages; `KEYS_BYTES_MAX` also limits their keys."""

BEGUN_MAX = 64
"""Limit of prestages of one domain in progress; further ones that are due wait."""


class NamedChain(NamedTuple):
    """A chain by name: its namespace, and its keys as one byte string; see `unpack_keys`."""

    namespace: Namespace
    keys: bytes


class PendingPrestage(NamedTuple):
    """A chain to promote, and when it is needed, in seconds of the store's clock."""

    chain: NamedChain
    needed_s: float


class PinnedChain(NamedTuple):
    """A chain that stays in memory until `until_s` of the store's clock, and its lease."""

    until_s: float
    nbytes: int
    lease: int


class PendingHints:
    """Followed sessions by domain and name, a queue of prestages by due time, and pins."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[bytes, str], NamedChain] = OrderedDict()
        self._keys_bytes = 0
        self._waiting: list[tuple[float, int, PendingPrestage]] = []
        self._waiting_bytes = 0
        self._begun = Counter[bytes]()
        """Number of prestages in progress, by domain."""
        self._numbers = 0
        self._pins: dict[tuple[Namespace, bytes], PinnedChain] = {}
        """By the key of the last block, which names the whole chain."""
        self._claimed_bytes = 0

    def follow(self, namespace: Namespace, session: str, keys: Sequence[bytes]) -> None:
        """Note the chain that a session used last; a shorter beginning of it changes nothing."""
        name, packed = (namespace.domain, session), b"".join(keys)
        known = self.forget(*name)
        if known and known.namespace == namespace and known.keys.startswith(packed):
            packed = known.keys
        self._sessions[name] = NamedChain(namespace, packed)
        self._keys_bytes += len(packed)
        while len(self._sessions) > SESSIONS_MAX or self._keys_bytes > KEYS_BYTES_MAX:
            _, oldest = self._sessions.popitem(last=False)
            self._keys_bytes -= len(oldest.keys)

    def chain(self, domain: bytes, session: str) -> NamedChain | None:
        """Return what a session used last; None for one that is not known."""
        return self._sessions.get((domain, session))

    def forget(self, domain: bytes, session: str) -> NamedChain | None:
        """Stop following a session; return what it used last."""
        known = self._sessions.pop((domain, session), None)
        if known is not None:
            self._keys_bytes -= len(known.keys)
        return known

    def wait(self, at_s: float, staging: PendingPrestage) -> bool:
        """Queue a prestage for `at_s` of the store's clock; False if the queue is full."""
        nbytes = self._waiting_bytes + len(staging.chain.keys)
        if len(self._waiting) >= WAITING_MAX or nbytes > KEYS_BYTES_MAX:
            return False
        self._waiting_bytes = nbytes
        self._numbers += 1
        heapq.heappush(self._waiting, (at_s, self._numbers, staging))
        return True

    def due(self, now_s: float) -> list[PendingPrestage]:
        """Take the prestages that are due; the caller calls `done` once for each."""
        ready: list[PendingPrestage] = []
        waiting: list[tuple[float, int, PendingPrestage]] = []
        while self._waiting and self._waiting[0][0] <= now_s:
            entry = heapq.heappop(self._waiting)
            chain = entry[2].chain
            if self._begun[chain.namespace.domain] < BEGUN_MAX:
                ready.append(entry[2])
                self._waiting_bytes -= len(chain.keys)
                self._begun[chain.namespace.domain] += 1
            else:
                waiting.append(entry)
        for entry in waiting:
            heapq.heappush(self._waiting, entry)
        return ready

    def done(self, domain: bytes) -> None:
        """Note that one prestage of a domain taken by `due` has ended."""
        self._begun -= Counter([domain])

    def claim(self, nbytes: int) -> None:
        """Count bytes that are about to be pinned, until `end_claim`."""
        self._claimed_bytes += nbytes

    def end_claim(self, nbytes: int) -> None:
        """Stop counting bytes that were about to be pinned."""
        self._claimed_bytes -= nbytes

    def pin(self, namespace: Namespace, last: bytes, pin: PinnedChain) -> None:
        """Note that the chain up to a block is pinned."""
        self._pins[namespace, last] = pin

    def pins_within(self, namespace: Namespace, keys: Sequence[bytes]) -> dict[bytes, PinnedChain]:
        """Return the pins of a chain and of its beginnings, by the last block of each."""
        return {key: pin for key in keys if (pin := self._pins.get((namespace, key))) is not None}

    def unpin(self, namespace: Namespace, last: bytes) -> None:
        """Remove the pin of a chain, which ended or is part of a longer pin."""
        del self._pins[namespace, last]

    def pinned_bytes(self, now_s: float) -> int:
        """Return how many bytes are pinned, or about to be."""
        self._pins = {chain: pin for chain, pin in self._pins.items() if pin.until_s > now_s}
        return self._claimed_bytes + sum(pin.nbytes for pin in self._pins.values())

    def unpin_all(self, wanted: Callable[[Namespace], bool]) -> list[int]:
        """Remove the pins in the namespaces that are wanted; return their leases."""
        gone = {chain: pin for chain, pin in self._pins.items() if wanted(chain[0])}
        for chain in gone:
            del self._pins[chain]
        return [pin.lease for pin in gone.values()]

    def forget_domain(self, domain: bytes) -> None:
        """Forget the sessions, queued prestages and pins of a domain; its leases end with it."""
        for name in [name for name in self._sessions if name[0] == domain]:
            self.forget(*name)
        self._waiting = [each for each in self._waiting if each[2].chain.namespace.domain != domain]
        heapq.heapify(self._waiting)
        self._waiting_bytes = sum(len(staging.chain.keys) for _, _, staging in self._waiting)
        self.unpin_all(lambda namespace: namespace.domain == domain)

    def status(self, now_s: float) -> HintStatus:
        """Return how many sessions are followed, contexts wait, and bytes are pinned."""
        return HintStatus(len(self._sessions), len(self._waiting), self.pinned_bytes(now_s))
