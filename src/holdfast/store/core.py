"""What a store is made of: the parts that its streets walk through, and its housekeeping."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.blocks.world import World, domain_id
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError
from holdfast.limits import LEASE_S
from holdfast.plan.planner import BestCut, Planner
from holdfast.policy.apart import Apart
from holdfast.policy.base import Eviction, Weighing
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.shares import UNBOUNDED, Quota
from holdfast.store.audit import AuditLog
from holdfast.store.hearsay import forget_oldest
from holdfast.store.judgement import Judgement
from holdfast.store.keyring import KeyRing
from holdfast.store.ladder import Ladder
from holdfast.store.promises import Ticket
from holdfast.store.recover import Recovery
from holdfast.store.rewrite import resume, rewrite_lost
from holdfast.store.states import States
from holdfast.store.wishes import Wishes
from holdfast.store.worth import Worth
from holdfast.tiers.base import NOWHERE, Place, Tier
from holdfast.tiers.host import Arena, Budget, HostTier, PrivateArena


class Core:
    """States, ladder, planner, what it judges by, clock and the keys of the domains.

    `domains` maps names to 32-byte secret keys.
    """

    def __init__(
        self,
        host_bytes: int,
        lower: Sequence[Tier],
        domains: Mapping[str, bytes],
        *,
        eviction: Eviction | None = None,
        planner: Planner | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.planner = planner or BestCut()
        self.incarnation = secrets.token_hex(8)
        self.lease_s = LEASE_S
        self.write_behind = True
        self.audit = AuditLog()
        self.ring_lost = False
        self.erasing = threading.Lock()
        """Held by who forgets what was erased: one at a time."""
        self.cold = False
        """Whether the public domain's blocks are to be brought to memory."""
        self.publisher = b""
        """What a publisher shows; nobody publishes without one."""
        self._domain_keys = dict(domains)
        self._budget = Budget(host_bytes)
        hosts = {domain_id(key): HostTier(self._budget) for key in domains.values()}
        self.states = States(hosts, list(lower), eviction or CostAware(), self.clock)
        self.judgement = Judgement(self.states.tier_names(), self.clock)
        self.judgement.share = self.states.fill.share
        self._worth = Worth(self.states.index, self.judgement)
        if isinstance(self.states.eviction, Weighing):
            self.states.eviction.weigh_by(self._worth)
        self.ladder = Ladder(self.states, self.judgement)
        self.recovery = Recovery(self.states, self.clock)
        self.wishes = Wishes()
        self.probes: dict[int, tuple[World, bytes]] = {}
        """By tier, the block that is read next to see how fast the tier is."""
        self.background = ThreadPoolExecutor(1, "holdfast-prestage")
        self._resting: list[tuple[float, Ticket]] = []

    def take_foreign(self) -> None:
        """Take records of any domain from other nodes too; no engine is ever lent their arena."""
        arena = PrivateArena(self._budget.capacity_bytes)
        self.states.foreign = HostTier(self._budget, arena)

    def divide(
        self, quotas: Mapping[str, Mapping[int, Quota]], make: Callable[[], Eviction] = CostAware
    ) -> None:
        """Divide the tiers between domains: by name, what each may hold on which; before `start`.

        Quotas are by the tier's number, the fastest's is 0; those not named hold what is left, with
        a share of 1. From now on each domain has an eviction order of its own, made by `make`.
        """
        for name, by_tier in quotas.items():
            self.states.fill.limit(self.domain(name)[1], by_tier)
        self.states.fill.divided = True
        index = self.states.index
        self.states.eviction = apart = Apart(make, lambda row: index.world(row).domain)
        apart.weigh_by(self._worth)

    def share(self, domain: bytes) -> float:
        """Return a domain's weight beside the others'."""
        return self.states.fill.share(domain)

    def quotas(self, domain: bytes) -> dict[str, int]:
        """Return the most that a domain may hold on the tiers where it has a quota, in bytes."""
        names = enumerate(self.states.tier_names())
        mosts = {name: self.states.fill.quota(tier, domain).most_bytes for tier, name in names}
        return {name: int(most) for name, most in mosts.items() if most < UNBOUNDED}

    def seal_with(self, ring: KeyRing) -> None:
        """Seal the blocks of the domains enrolled on a ring, and open them; before `start`."""
        self.states.sealing.begin(ring, self.clock)

    def domain(self, name: str) -> tuple[bytes, bytes]:
        """Return the key and the public id of a domain; raise ConfigError if it is not known."""
        key = self._domain_keys.get(name)
        if key is None:
            raise ConfigError(
                f"domains: {name!r} is not configured; known: {', '.join(self._domain_keys)}; "
                "ask for one of them, or add it to the node's configuration"
            )
        return key, domain_id(key)

    def publish_to(self, name: str, token: bytes) -> None:
        """Make a domain public: everybody reads it, who shows the token writes it; before `start`.

        Raises ConfigError for a domain that is not known.
        """
        self.states.public, self.publisher = self.domain(name)[1], token

    def public_key(self) -> bytes:
        """Return the key of the public domain; empty where there is none."""
        ids = {domain_id(key): key for key in self._domain_keys.values()}
        return ids.get(self.states.public, b"")

    def cover_blocks(self, world: World, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks the index knows of."""
        with self.states.lock:
            return self.states.index.cover(world, keys).blocks

    def domain_names(self) -> list[str]:
        """Return the configured domains."""
        return list(self._domain_keys)

    def arena(self, domain: bytes) -> Arena:
        """Return the shared memory of a domain; raise KeyError for one whose key is not ours."""
        arena = self.states.hosts[domain].arena
        if not isinstance(arena, Arena):
            raise KeyError(domain)
        return arena

    def record(self, world: World, place: int) -> memoryview:
        """Return the record that lies at a place of a lease; good while the lease is."""
        return self.states.host(world).view(Place(place), world.record_bytes)

    def outgoing(self, world: World, lease: int, places: Sequence[int]) -> list[memoryview]:
        """Return the records of a lease as another host may see them: sealed, if they are to be.

        Up to one that can not be sealed; none of a lease that ended. Good while the lease is.
        """
        view, size = self.states.host(world).view, world.record_bytes
        records = [view(Place(place), size) for place in places]
        sealing = self.states.sealing
        if not sealing.seals(world.domain):
            return records
        sealers = [sealing.sealer(record, world.domain) for record in records]
        twins = sealing.twins(records, sealers)
        with self.states.lock:
            # Erased meanwhile: a seal could be on what came after, or on what was cleared under it.
            return twins if lease in self.states.leases else []

    @property
    def host_bytes(self) -> int:
        """Return the memory that all domains share."""
        return self._budget.capacity_bytes

    def release(self, lease: int) -> bool:
        """End a lease; False means it had ended, and what was copied under it must not be used."""
        with self.states.lock:
            return self.states.release(lease)

    def rest(self, ticket: Ticket, until: float) -> None:
        """Keep a dead ticket's slots from reuse until then; call under the lock."""
        if until <= self.clock.now():
            self._give_back(ticket)
        else:
            self._resting.append((until, ticket))

    def keep_house(self) -> None:
        """End what is over: leases, rests, lost places; take in what engines told."""
        now = self.clock.now()
        self._worth.learn()
        with self.states.lock:
            self.states.expire(now)
            over = [ticket for until, ticket in self._resting if until <= now]
            self._resting = [(until, t) for until, t in self._resting if until > now]
            for ticket in over:
                self._give_back(ticket)
        forget_oldest(self.states)
        lost, late = rewrite_lost(self.states), resume(self.states)
        if lost or late:
            self.ladder.wake()

    def _give_back(self, ticket: Ticket) -> None:
        places = [place for place in ticket.places if place != NOWHERE]
        self.states.give_back(ticket.world, places)
        self.states.fill.handed_back(ticket.world.domain, ticket.nbytes)
