"""Parts of a store that its read and save paths share, and periodic maintenance."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from holdfast.blocks.envelope import record_length
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.errors import ConfigError
from holdfast.fairness.fair_queue import WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.fairness.shares import UNBOUNDED
from holdfast.index.residency import Residency
from holdfast.keys.keyring import KeyRing
from holdfast.policy.base import Weighing
from holdfast.policy.movement import counts_uses
from holdfast.policy.per_domain import PerDomainEviction
from holdfast.store.activity import Activity
from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.block_table import BlockTable
from holdfast.store.block_value import BlockValue
from holdfast.store.drops import DropsFile
from holdfast.store.durable_blocks import DurableBlocks, durable_tier
from holdfast.store.durable_marks import DurableMarks
from holdfast.store.estimates import Estimates
from holdfast.store.leases import Reservation
from holdfast.store.marks_file import MarksFile
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.partial_blocks import PartialBlocks
from holdfast.store.pending_hints import PendingHints
from holdfast.store.plan_log import PlanLog
from holdfast.store.promote import BlockMover
from holdfast.store.quantise import Quantise
from holdfast.store.recover import Recovery
from holdfast.store.rewrite import defer_stopped, resume, rewrite_lost
from holdfast.store.sealing import Sealing
from holdfast.store.tier_codec import DecodeSlots, TierCodec
from holdfast.store.usage import DomainUsage
from holdfast.tiers.arena import Arena, PrivateArena
from holdfast.tiers.base import Indexed, Place, Replaceable, Tier
from holdfast.tiers.checked import checked
from holdfast.tiers.chunks import HostBudget
from holdfast.tiers.host import HostTier, NetworkAgent

BATCHES_AT_ONCE = 4
"""Concurrent read batches per tier: some fill the device's queue while one is verified or opened.
A domain that has none may start a fifth."""

PRESTAGES_AT_ONCE = 4
"""Concurrent prestages, so that one that waits for a slow tier does not delay the others."""

FLUSHES_AT_ONCE = 16
"""Concurrent flushes of the durable tier; callers beyond that wait, until their deadlines."""

LOOKUP_THREADS = 4
SPARE_THREADS = 4
"""Additional threads for domains that arrive while other domains use all the usual ones."""


class StoreParts:
    """Block table, block mover, planner, estimates, plan log, clock and domain keys of one store.

    `lower`: the tiers below the host, fastest first. `domains` maps names to 32-byte secret keys.
    Raises ConfigError for options that name an unknown domain.
    """

    def __init__(
        self,
        host_bytes: int,
        lower: Sequence[Tier],
        domains: Mapping[str, bytes],
        options: StoreOptions,
    ) -> None:
        durable = durable_tier(lower, options.durable)
        lower = [checked(tier, options.clock) for tier in lower]
        self.options = options
        self.calls = options.calls
        self.gone = ""
        """Why this store is closed; empty while it is open."""
        self.clock = options.clock
        self.planner = options.planner
        self.audit = options.audit
        self.incarnation = secrets.token_hex(8)
        self.erasing = threading.Lock()
        """Serializes the removal of erased blocks."""
        self._domain_keys = dict(domains)
        self.domain_ids = {name: domain_id(key) for name, key in domains.items()}
        """Public id of each configured domain, by name."""
        self.budget = HostBudget(host_bytes)
        quotas = None
        if options.quotas is not None:
            quotas = {self.domain(name)[1]: each for name, each in options.quotas.items()}
        usage = DomainUsage(1 + len(lower), quotas)
        names = [tier.name for tier in lower]
        readers = [FairThreads(BATCHES_AT_ONCE, 1, f"holdfast-from-{name}") for name in names]
        self.opened_at_s = self.clock.now()
        self.activity = Activity()

        def credit(tier: int, domain: bytes) -> float:
            item = WorkItem(domain, share=usage.share(domain))
            return readers[tier - 1].credit(item) if tier else 0.0

        self.estimates = Estimates(
            [HostTier.name, *names],
            self.clock,
            share=usage.share,
            credit=credit,
        )
        self.plan_log = PlanLog(self.clock, self.activity)
        self.quantise = Quantise({name: domains[name] for name in options.quantise}, options.gates)
        rules = [options.rules.get(n, TierRules()) for n in range(1, 1 + len(lower))]
        self.table = self._block_table(lower, usage, rules, durable)
        shared = self.table.shared.items()
        self.indexed_tiers = {n: tier for n, tier in shared if isinstance(tier, Indexed)}
        """Shared tiers with an index in memory, by number, fastest first."""
        self.durable_blocks = DurableBlocks(self.table, options.durable_s)
        self.marks_file = MarksFile(options.marks_file)
        limits = [each.move_bytes_per_s for each in rules]
        self.mover = BlockMover(self.table, self.estimates, readers, limits)
        self.recovery = Recovery(self.table)
        self.drops_file = DropsFile(options.drops_file)
        self.pending_hints = PendingHints()
        self.probes: dict[int, tuple[Namespace, bytes]] = {}
        """By tier, the block to read next to measure the tier."""
        self.background = FairThreads(PRESTAGES_AT_ONCE, 0, "holdfast-prestage")
        """Threads for prestages, probes, and reading the public domain back into memory."""
        self.lookups = FairThreads(LOOKUP_THREADS, SPARE_THREADS, "holdfast-lookup")
        """Threads on which sessions and hints look up blocks in shared tiers."""
        self.flushes = FairThreads(FLUSHES_AT_ONCE, 0, "holdfast-flush")
        """Threads on which calls of `sync` flush the durable tier."""
        self._resting: list[tuple[float, Reservation]] = []
        self.partial_blocks = PartialBlocks(self.rest)

    def _block_table(
        self, lower: Sequence[Tier], usage: DomainUsage, by_tier: Sequence[TierRules], durable: int
    ) -> BlockTable:
        options, index = self.options, Residency(1 + len(lower))
        hosts = {domain: HostTier(self.budget) for domain in self.domain_ids.values()}
        foreign = None
        if options.serves_peers:  # an arena that no engine maps
            foreign = HostTier(self.budget, PrivateArena(self.budget.capacity_bytes))
        self._values = BlockValue(index, self.estimates)
        eviction = options.make_eviction()
        if usage.divided:
            eviction = PerDomainEviction(
                options.make_eviction, lambda row: index.namespace(row).domain, hosts
            )
        if isinstance(eviction, Weighing):
            eviction.weigh_by(self._values)
        intakes = {number: each.intake for number, each in enumerate(by_tier, start=1)}
        rules = AdmissionRules(
            index,
            self.clock,
            [
                each.make_rule(partial(self.estimates.saved_s, number))
                for number, each in enumerate(by_tier, start=1)
            ],
            [each.budgets for each in by_tier],
            counts_uses=counts_uses(intakes),
        )
        slots = DecodeSlots()
        public = self.domain(options.public_domain)[1] if options.public_domain else b""
        return BlockTable(
            index=index,
            hosts=hosts,
            foreign=foreign,
            lower=list(lower),
            codecs=[
                TierCodec(
                    tier.name, each.codec, self.clock, slots, lossy_codec=self.quantise.codec_of
                )
                for tier, each in zip(lower, by_tier, strict=True)
            ],
            intakes=intakes,
            eviction=eviction,
            rules=rules,
            usage=usage,
            public=public,
            sealing=Sealing(hosts, options.ring or KeyRing(None), self.clock),
            clock=self.clock,
            segment_blocks=options.segment_blocks,
            durable_marks=DurableMarks(options.clock, options.wall_s),
            durable_tier=durable,
        )

    def share(self, domain: bytes) -> float:
        """Return a domain's weight relative to other domains."""
        return self.table.usage.share(domain)

    def quotas(self, domain: bytes) -> dict[str, int]:
        """Return a domain's quota in bytes by tier name, for the tiers that limit it."""
        names = enumerate(self.table.tier_names())
        limits = {name: self.table.usage.quota(tier, domain).most_bytes for tier, name in names}
        return {name: int(most) for name, most in limits.items() if most < UNBOUNDED}

    def domain(self, name: str) -> tuple[bytes, bytes]:
        """Return the key and the public id of a domain; raise ConfigError if it is not known."""
        key = self._domain_keys.get(name)
        if key is None:
            raise ConfigError(
                f"domains: {name!r} is not configured; known: {', '.join(self._domain_keys)}; "
                "ask for one of them, or add it to the node's configuration"
            )
        return key, self.domain_ids[name]

    def note_element_bytes(self, namespace: Namespace, nbytes: int) -> None:
        """Record the width of one number in a namespace's payloads, for its codec."""
        with self.table.lock:
            self.table.note_element_bytes(namespace, nbytes)

    @property
    def shared_tiers(self) -> list[str]:
        """Names of the tiers that are shared with other nodes."""
        return [tier.name for tier in self.table.shared.values()]

    @property
    def is_sealed(self) -> bool:
        """Whether blocks of any domain of this store are sealed below the host."""
        return any(map(self.table.sealing.seals, self.table.hosts))

    def register(self, namespace: Namespace, places: Sequence[Place], agent: NetworkAgent) -> None:
        """Register the memory of slots in use for a transfer; see `HostTier.register`."""
        self.table.host(namespace).register(places, agent)

    def knows(self, domain: bytes) -> bool:
        """Return whether this store has a domain's key, or some of its records."""
        table = self.table
        return domain in table.hosts or any(used[domain] for used in table.usage.used)

    def is_public(self, domain: bytes) -> bool:
        """Return whether a domain is the public one."""
        return domain == self.table.public

    def public_key(self) -> bytes:
        """Return the key of the public domain; empty if there is none."""
        return self._domain_keys.get(self.options.public_domain, b"")

    def tier_names(self) -> list[str]:
        """Return the name of every tier, fastest first."""
        return self.table.tier_names()

    def arena(self, domain: bytes) -> Arena:
        """Return the shared memory of a domain; raise KeyError if its key is unknown."""
        arena = self.table.hosts[domain].arena
        if not isinstance(arena, Arena):
            raise KeyError(domain)
        return arena

    def record(self, namespace: Namespace, place: int) -> memoryview:
        """Return the record at a leased place; valid until the lease ends."""
        return self.table.host(namespace).view(Place(place), namespace.slot_bytes)

    def outgoing(self, namespace: Namespace, lease: int, places: Sequence[int]) -> list[memoryview]:
        """Return leased records to send to another host, sealed if their domain requires it.

        Stops before the first record that cannot be sealed; empty if the lease has ended. The
        records are valid until the lease ends. An encoded one is shorter than its slot.
        """
        view, size = self.table.host(namespace).view, namespace.slot_bytes
        held = [view(Place(place), size) for place in places]
        records = [record[: record_length(record)] for record in held]
        if not self.table.sealing.seals(namespace.domain):
            return records
        copies = self.table.sealing.sealed_copies(records, namespace.domain)
        with self.table.lock:
            # If the lease ended, a slot may have been cleared or reused while it was sealed.
            return copies if lease in self.table.leases else []

    @property
    def host_bytes(self) -> int:
        """Host memory that all domains share, in bytes."""
        return self.budget.capacity_bytes

    def release(self, lease: int) -> bool:
        """End a lease; False if it had ended already: the caller must discard its copies."""
        with self.table.lock:
            return self.table.leases.release(lease)

    def rest(self, reservation: Reservation, until: float) -> None:
        """Keep the slots of a dead reservation from reuse until this time. Call under the lock."""
        if until <= self.clock.now():
            self._give_back(reservation)
        else:
            self._resting.append((until, reservation))

    def housekeep(self) -> None:
        """Expire leases, free rested slots, rewrite lost copies, and update block values."""
        now = self.clock.now()
        self._values.learn()
        with self.table.lock:
            self.table.leases.expire(now)
            self.partial_blocks.expire(now)
            over = [reservation for until, reservation in self._resting if until <= now]
            self._resting = [(until, t) for until, t in self._resting if until > now]
            for reservation in over:
                self._give_back(reservation)
        self.table.drop_oldest_lookups()
        lost = rewrite_lost(self.table)
        for number in lost:
            if isinstance(self.table.lower[number - 1], Replaceable):
                self.give_up_hung_calls(number)
        late = resume(self.table)
        defer_stopped(self.table)
        with self.table.lock:
            waiting = self.durable_blocks.queue_again(now)
        if lost or late or waiting:
            self.mover.wake()

    def give_up_hung_calls(self, number: int) -> None:
        """Go on after lower tier `number` has lost its drive, though calls of it may never return.

        What they were to do on the drive that replaces it is done by other threads.
        """
        self.mover.give_up_hung_calls(number)
        self.flushes.give_up_running()
        self.recovery.give_up_hung_call(number)

    def _give_back(self, reservation: Reservation) -> None:
        self.table.give_back(reservation.namespace, reservation.slots)
        self.table.usage.subtract_reserved(reservation.namespace.domain, reservation.nbytes)
