"""Pending hints: the chain of each followed session, queued and kept prestages, and pins.

State only: call under the store's lock. All of it is bounded; a forgotten entry costs one hint.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.fairness.shares import part_left
from holdfast.limits import MIB
from holdfast.plan.prestage import BEGUN_S, PrestageTimes, advance_turns, in_order
from holdfast.status import HintStatus

SESSIONS_MAX = 65_536
KEYS_BYTES_MAX = 64 * MIB
"""Limit of the keys of all followed sessions.

Beyond it, and beyond `SESSIONS_MAX`, the session used longest ago of the domain with most of them
is forgotten.
"""

WAITING_MAX = 4_096
"""Limit of queued prestages; `KEYS_BYTES_MAX` also limits their keys.

A domain has at most as much of both as it leaves free.
"""

BEGUN_MAX = 16
"""Limit of prestages of one domain in progress; further ones that are due wait. Few run at once."""


ChainName: TypeAlias = tuple[Namespace, bytes]
"""A chain's namespace and the key of its last block, which names the whole chain."""


class NamedChain(NamedTuple):
    """A chain by name: its namespace, and its keys as one byte string; see `unpack_keys`."""

    namespace: Namespace
    keys: bytes


class PendingPrestage(NamedTuple):
    """A chain to promote, and its times, by the store's clock.

    `others`: the times of prestages of the chain for other engines, which begin with it.
    """

    chain: NamedChain
    times: PrestageTimes
    others: tuple[PrestageTimes, ...] = ()

    @property
    def name(self) -> ChainName:
        """The namespace, and the key of the last block, which names the whole chain."""
        return self.chain.namespace, self.chain.keys[-KEY_BYTES:]

    @property
    def needed_s(self) -> float:
        """When the chain is needed last."""
        return max(times.needed_s for times in (self.times, *self.others))

    @property
    def nbytes(self) -> int:
        """Host memory that the whole chain takes, in bytes."""
        return len(self.chain.keys) // KEY_BYTES * self.chain.namespace.slot_bytes

    def is_of(self, namespace: Namespace, keys: Collection[bytes], engine: Hashable) -> bool:
        """Return whether its chain ends with one of these blocks, and no other engine waits."""
        chain, last = self.name
        engines = {times.engine for times in (self.times, *self.others)}
        return chain == namespace and last in keys and engines <= {None, engine}

    def cut(self, most_bytes: int) -> PendingPrestage:
        """Return a prestage of the leading blocks that take at most `most_bytes`."""
        blocks = most_bytes // self.chain.namespace.slot_bytes
        return self._replace(chain=self.chain._replace(keys=self.chain.keys[: blocks * KEY_BYTES]))


class PinnedChain(NamedTuple):
    """A chain that stays in memory until `until_s` of the store's clock, and its lease.

    A pin, or a prestage that is kept for the request that it was made for.
    """

    until_s: float
    nbytes: int
    lease: int


class KeptLimit(NamedTuple):
    """Limit of the bytes that are pinned and prestaged, as it is for one domain.

    `most_bytes`: with those of other domains. `is_shared`: other domains may keep contexts, too, so
    this one has at most as much as it leaves free.
    """

    most_bytes: int
    is_shared: bool = False

    def open_bytes(self, own: int = 0, others: int = 0) -> int:
        """Return how many more bytes fit, if the domain and others have these; may be negative."""
        if self.is_shared:
            return part_left(self.most_bytes, own, others)
        return self.most_bytes - others - own


class PendingHints:
    """Followed sessions by domain and name, prestages (queued by due time; kept), and pins."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, OrderedDict[str, NamedChain]] = {}
        """By domain and name; those of a domain in the order of their use."""
        self._session_count = 0
        self._session_bytes = Counter[bytes]()
        """Bytes of the keys of the sessions, by domain."""
        self._waiting: list[tuple[float, int, PendingPrestage]] = []
        """Prestages that are not due yet, by the time at which they are."""
        self._due: dict[ChainName, dict[Hashable, PendingPrestage]] = {}
        """Prestages that have not begun, by the engine in whose queue a request waits, or None."""
        self._queued = Counter[bytes]()
        self._queued_bytes = Counter[bytes]()
        """Number of both, and bytes of their keys, by domain."""
        self._begun = Counter[bytes]()
        """Number of prestages in progress, by domain."""
        self._begun_s: dict[tuple[bytes, int], list[float]] = {}
        """Expected fetch times of prestages in progress, by domain and slowest tier."""
        self._numbers = 0
        self._pins: dict[ChainName, PinnedChain] = {}
        self._staged: dict[ChainName, PinnedChain] = {}
        """Prestages in memory that no request has used yet, by the key of the last block."""
        self._claimed = Counter[bytes]()
        """Bytes that are about to be pinned or prestaged, by domain."""

    def follow(self, namespace: Namespace, session: str, keys: Sequence[bytes]) -> None:
        """Note the chain that a session used last; a shorter beginning of it changes nothing."""
        domain, packed = namespace.domain, b"".join(keys)
        known = self.forget(domain, session)
        if known and known.namespace == namespace and known.keys.startswith(packed):
            packed = known.keys
        self._sessions.setdefault(domain, OrderedDict())[session] = NamedChain(namespace, packed)
        self._session_count += 1
        self._session_bytes[domain] += len(packed)
        while self._session_count > SESSIONS_MAX:
            self._forget_oldest({domain: len(each) for domain, each in self._sessions.items()})
        while self._session_bytes.total() > KEYS_BYTES_MAX:
            self._forget_oldest(self._session_bytes)

    def chain(self, domain: bytes, session: str) -> NamedChain | None:
        """Return what a session used last; None for one that is not known."""
        sessions = self._sessions.get(domain)
        return sessions.get(session) if sessions else None

    def forget(self, domain: bytes, session: str) -> NamedChain | None:
        """Stop following a session; return what it used last."""
        sessions = self._sessions.get(domain)
        if sessions is None or (known := sessions.pop(session, None)) is None:
            return None
        self._session_count -= 1
        self._session_bytes[domain] -= len(known.keys)
        if not sessions:
            del self._sessions[domain], self._session_bytes[domain]
        return known

    def wait(self, at_s: float, staging: PendingPrestage) -> bool:
        """Queue a prestage for `at_s` of the store's clock; False if its domain's part is full.

        If it is full, the domain's prestage that begins last makes room for one that begins sooner.
        """
        if not self._fits(staging) and not self._make_room(at_s, staging):
            return False
        self._count_queued(staging, 1)
        self._numbers += 1
        heapq.heappush(self._waiting, (at_s, self._numbers, staging))
        return True

    def due(self, now_s: float, limit_of: Callable[[bytes], KeptLimit]) -> list[PendingPrestage]:
        """Take the prestages that begin now, and claim their memory; call `done` once for each.

        They begin in the order of `plan.prestage`, of a domain and a tier only as many as that
        module says. `limit_of` returns the limit of pins, prestages and claims for a domain. A
        context longer than a domain without any can keep is cut to its leading blocks. One that has
        no room now waits, until it is too late. Of several prestages of one chain for one engine
        the latest counts. Those for several engines begin together, when the first of them does.
        """
        while self._waiting and self._waiting[0][0] <= now_s:
            staging = heapq.heappop(self._waiting)[2]
            self._count_queued(staging, -1)
            self._withdraw(staging.name, staging.times.engine)
            self._due.setdefault(staging.name, {})[staging.times.engine] = staging
            self._count_queued(staging, 1)
        ready: list[PendingPrestage] = []
        times = self._due_times()
        order = in_order(times, now_s)
        for name, engine in times.keys() - set(order):  # too late
            self._withdraw(name, engine)
        limit_of = functools.cache(limit_of)
        kept = self.kept_bytes(now_s)
        sum_bytes = kept.total()
        for name, engine in order:
            if name not in self._due:  # it begins with that of another engine
                continue
            domain = name[0].domain
            limit, own = limit_of(domain), kept[domain]
            staging = self._due[name][engine].cut(limit.open_bytes())
            open_bytes = limit.open_bytes(own, sum_bytes - own)
            if staging.nbytes <= open_bytes and self._may_begin(staging):
                ready.append(self._take(name, staging))
                kept[domain] += staging.nbytes
                sum_bytes += staging.nbytes
        return ready

    def done(self, staging: PendingPrestage) -> None:
        """Note that a prestage taken by `due` has ended; its memory is claimed no longer."""
        domain, times = staging.chain.namespace.domain, staging.times
        self._begun -= Counter([domain])
        begun_s = self._begun_s[domain, times.tier]
        begun_s.remove(times.fetch_s)
        if not begun_s:
            del self._begun_s[domain, times.tier]
        self.end_claim(domain, staging.nbytes)

    def withdraw(
        self, namespace: Namespace, keys: Sequence[bytes], engine: Hashable = None
    ) -> None:
        """Forget due prestages that end with one of these blocks and have not begun.

        `engine`: leave those for which another engine waits; None: leave none.
        """
        for key in keys if self._due else ():
            for other in list(self._due.get((namespace, key), {})):
                if engine is None or other in (None, engine):
                    self._withdraw((namespace, key), other)

    def stage(self, namespace: Namespace, last: bytes, staged: PinnedChain) -> int:
        """Note that a prestaged chain up to a block is kept; return the lease that it replaces."""
        former = self._staged.pop((namespace, last), None)
        self._staged[namespace, last] = staged
        return former.lease if former else 0

    def take_staged(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Return the leases of prestages that end within a chain which is used; forget them.

        Those that have not begun are forgotten, too.
        """
        self.withdraw(namespace, keys)
        if not self._staged:
            return []
        names = ((namespace, key) for key in keys)
        return [staged.lease for name in names if (staged := self._staged.pop(name, None))]

    def claim(self, domain: bytes, nbytes: int) -> None:
        """Count bytes that are about to be pinned for a domain, until `end_claim`."""
        self._claimed[domain] += nbytes

    def end_claim(self, domain: bytes, nbytes: int) -> None:
        """Stop counting bytes that were about to be pinned."""
        self._claimed[domain] -= nbytes
        if not self._claimed[domain]:
            del self._claimed[domain]

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
        """Return how many bytes are pinned."""
        self._drop_ended(now_s)
        return sum(pin.nbytes for pin in self._pins.values())

    def staged_bytes(self, now_s: float) -> int:
        """Return how many bytes are kept for the requests that they were prestaged for."""
        self._drop_ended(now_s)
        return sum(kept.nbytes for kept in self._staged.values())

    def kept_bytes(self, now_s: float) -> Counter[bytes]:
        """Return by domain how many bytes are pinned or prestaged, or about to be."""
        self._drop_ended(now_s)
        kept = self._claimed.copy()
        for chains in (self._pins, self._staged):
            for (namespace, _), chain in chains.items():
                kept[namespace.domain] += chain.nbytes
        return kept

    def unpin_all(self, wanted: Callable[[Namespace], bool]) -> list[int]:
        """Remove pins and kept prestages in the namespaces that are wanted; return their leases."""
        leases: list[int] = []
        for kept in (self._pins, self._staged):
            gone = {chain: pin for chain, pin in kept.items() if wanted(chain[0])}
            for chain, pin in gone.items():
                del kept[chain]
                leases.append(pin.lease)
        return leases

    def forget_domain(self, domain: bytes) -> None:
        """Forget the sessions, queued prestages and pins of a domain; its leases end with it."""
        for session in list(self._sessions.get(domain, ())):
            self.forget(domain, session)
        for chain in [name for name in self._due if name[0].domain == domain]:
            for engine in list(self._due[chain]):
                self._withdraw(chain, engine)
        gone = [each for each in self._waiting if each[2].chain.namespace.domain == domain]
        for _, _, staging in gone:
            self._count_queued(staging, -1)
        self._waiting = [each for each in self._waiting if each[2].chain.namespace.domain != domain]
        heapq.heapify(self._waiting)
        self.unpin_all(lambda namespace: namespace.domain == domain)

    def status(self, now_s: float) -> HintStatus:
        """Return how many sessions are followed, contexts wait, and bytes are kept."""
        return HintStatus(
            self._session_count,
            self._queued.total(),
            self.pinned_bytes(now_s),
            self.staged_bytes(now_s),
        )

    def _forget_oldest(self, by_domain: Mapping[bytes, int]) -> None:
        """Forget the session used longest ago, of the domain that has the most."""
        domain = max(by_domain, key=by_domain.__getitem__)
        self.forget(domain, next(iter(self._sessions[domain])))

    def _fits(self, staging: PendingPrestage, without: PendingPrestage | None = None) -> bool:
        """Return whether a prestage fits its domain's part of the queue, `without` one of it."""
        domain = staging.chain.namespace.domain
        own, own_bytes = self._queued[domain], self._queued_bytes[domain]
        others, others_bytes = self._queued.total() - own, self._queued_bytes.total() - own_bytes
        if without is not None:
            own, own_bytes = own - 1, own_bytes - len(without.chain.keys)
        left_bytes = part_left(KEYS_BYTES_MAX, own_bytes, others_bytes)
        return part_left(WAITING_MAX, own, others) >= 1 and left_bytes >= len(staging.chain.keys)

    def _make_room(self, at_s: float, staging: PendingPrestage) -> bool:
        """Drop the prestage of a domain that begins last, if that makes room for a sooner one."""
        domain = staging.chain.namespace.domain
        own = (each for each in self._waiting if each[2].chain.namespace.domain == domain)
        last = max(own, default=None)
        if last is None or last[0] <= at_s or not self._fits(staging, last[2]):
            return False
        self._waiting.remove(last)
        heapq.heapify(self._waiting)
        self._count_queued(last[2], -1)
        return True

    def _drop_ended(self, now_s: float) -> None:
        """Forget pins and kept prestages whose time is over."""
        self._pins = {chain: pin for chain, pin in self._pins.items() if pin.until_s > now_s}
        self._staged = {chain: kept for chain, kept in self._staged.items() if kept.until_s > now_s}

    def _count_queued(self, staging: PendingPrestage, change: int) -> None:
        """Count a prestage that is queued (1), or that is no more (-1)."""
        domain = staging.chain.namespace.domain
        self._queued[domain] += change
        self._queued_bytes[domain] += change * len(staging.chain.keys)
        if not self._queued[domain]:
            del self._queued[domain], self._queued_bytes[domain]

    def _may_begin(self, staging: PendingPrestage) -> bool:
        """Return whether a prestage may begin beside those of its domain in progress."""
        domain, tier = staging.chain.namespace.domain, staging.times.tier
        in_progress_s = sum(self._begun_s.get((domain, tier), ()))
        return self._begun[domain] < BEGUN_MAX and in_progress_s < BEGUN_S

    def _begin(self, staging: PendingPrestage) -> None:
        """Count a prestage as in progress; requests behind its own get their turn sooner."""
        domain, times = staging.chain.namespace.domain, staging.times
        self._begun[domain] += 1
        self._begun_s.setdefault((domain, times.tier), []).append(times.fetch_s)
        self.claim(domain, staging.nbytes)
        for taken in (times, *staging.others):
            for (name, engine), sooner in advance_turns(self._due_times(), taken).items():
                self._due[name][engine] = self._due[name][engine]._replace(times=sooner)

    def _due_times(self) -> dict[tuple[ChainName, Hashable], PrestageTimes]:
        return {
            (name, engine): staging.times
            for name, of_chain in self._due.items()
            for engine, staging in of_chain.items()
        }

    def _take(self, name: ChainName, staging: PendingPrestage) -> PendingPrestage:
        """Begin a due prestage, which may be cut, with those of its chain for other engines."""
        of_chain, engine = self._due[name], staging.times.engine
        others = tuple(each.times for other, each in of_chain.items() if other != engine)
        for other in list(of_chain):
            self._withdraw(name, other)
        staging = staging._replace(others=others)
        self._begin(staging)
        return staging

    def _withdraw(self, name: ChainName, engine: Hashable) -> None:
        of_chain = self._due.get(name, {})
        staging = of_chain.pop(engine, None)
        if staging is not None:
            self._count_queued(staging, -1)
            if not of_chain:
                del self._due[name]
