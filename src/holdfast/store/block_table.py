"""The state of every block of a store, and all transitions between states.

A block is *reserved* (it has slots, but no reader sees it), then *held* (in the index, on one or
more tiers), then evicted, demoted or promoted, and finally dropped. A *leased* block has readers,
so its host slot is not evicted. `holdfast.store.copies` owns the state of each copy; this module
decides when it changes, and what follows for quotas, eviction order and queues. No function does
I/O.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.errors import Outcome, RefusedError
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.policy.base import EvictionPolicy
from holdfast.policy.movement import Intake
from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.copies import BlockState, CopyFault, CopyTable
from holdfast.store.drops import Drops
from holdfast.store.durable_marks import DurableMarks
from holdfast.store.leases import Generation, LeaseTable
from holdfast.store.move_queues import MoveQueues
from holdfast.store.movement import Movement, MovementRules
from holdfast.store.recalls import Recalls
from holdfast.store.remote_lookups import (
    FAILED_MAX,
    FAILED_S,
    InflightLookups,
    RecentOutcomes,
    RemoteLookups,
)
from holdfast.store.sealing import UNKNOWN_EPOCH, CopyEpochs, Sealing
from holdfast.store.tier_codec import TierCodec
from holdfast.store.unlisted_records import FailedReads, UnlistedRecord, UnlistedRecords
from holdfast.store.usage import DomainUsage
from holdfast.tiers.base import NOWHERE, DroppedBlock, LocalTier, Place, SharedTier, Tier, Volatile
from holdfast.tiers.host import NAMELESS, NOBODY, HostTier
from holdfast.tiers.unverified_records import UnverifiedRecords

HOST = 0
QUARANTINE_NOTES = 256
PUBLIC_SHARE = 0.25
"""Maximum share of memory for the public domain; blocks beyond it are not published."""

OWNERS_MAX = 16
"""Maximum namespaces of a domain with runs of their own, each of which may have free slots."""

NAMESPACES_NOTED = 1_024
"""Namespaces whose width of a number is kept; the width of the others counts as unknown."""

ROWS_AT_ONCE = 4_096
"""Rows handled per acquisition of the lock, so that each hold is short."""

_PUBLIC_SHARE_BELOW = 0.5
"""Maximum share of a lower tier for rewriting public blocks that the tier dropped.

Without a limit, each rewrite could make the tier drop other public blocks, without end.
"""


@dataclass(kw_only=True, eq=False, repr=False)
class BlockTable:
    """The blocks of a store and all transitions between their states.

    Hold `lock` around every read and every call, except of functions that take it, as their
    docstrings say. `segment_blocks`: number of consecutive blocks of a chain that a shared tier
    places together.

    `hosts`: the host tier of each domain, by domain id. `foreign`: that of all domains whose keys
    are unknown here; None if the store takes no records from other nodes. `lower`: fastest first.
    `codecs`: those of `lower`, in its order. `intakes`: what each of them takes, by number.
    `public`: the public domain, whose blocks are not evicted from memory; empty if there is none.
    `durable_tier`: number of the tier that keeps durable blocks; 0 if there is none.
    """

    index: Residency
    hosts: Mapping[bytes, HostTier]
    foreign: HostTier | None
    lower: Sequence[Tier]
    codecs: Sequence[TierCodec]
    intakes: Mapping[int, Intake]
    eviction: EvictionPolicy
    rules: AdmissionRules
    usage: DomainUsage
    public: bytes
    sealing: Sealing
    clock: Clock
    segment_blocks: int
    durable_marks: DurableMarks
    durable_tier: int

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.copies = CopyTable(self.index)
        self.is_on = self.copies.is_on
        below = list(enumerate(self.lower, start=1))
        self._volatile = {HOST, *(n for n, tier in below if isinstance(tier, Volatile))}
        self._persistent = [n for n, _ in below if n not in self._volatile]
        self._volatile_below = [n for n, _ in below if n in self._volatile]
        self.shared = {n: tier for n, tier in below if isinstance(tier, SharedTier)}
        """By number, fastest first."""
        self._local = {n: tier for n, tier in below if isinstance(tier, LocalTier)}
        self.epochs = CopyEpochs(len(self.lower))
        self.erasures = Counter[bytes]()
        self.drops = Drops()
        self.recalls = Recalls()
        self._owners: dict[bytes, dict[Namespace, int]] = {}
        """By domain, the owners of runs."""
        self.leases = LeaseTable(self.pin, self.unpin)
        self._pending_free: dict[int, list[Place]] = {}
        """By row, the slots that are freed when its last reader ends."""
        on_save = [number for number, intake in self.intakes.items() if intake.saves]
        self.queues = MoveQueues(self.copies, self.rules, on_save)
        self.movement = Movement(
            self.copies,
            self.rules,
            self.queues,
            MovementRules(self.intakes, self._volatile, self.is_durable),
        )
        self.remote_lookups = RemoteLookups()
        self.inflight_lookups = InflightLookups()
        self._element_bytes: dict[Namespace, int] = {}
        self.encoded: set[int] = set()
        """Rows whose record in memory is encoded, as another node sent it: in a slot of the decoded
        size. `store.verify` decodes it before a block is handed out."""
        self.unverified: set[int] = set()
        """Received blocks in memory whose payload this node has not verified."""
        self.unverified_records = UnverifiedRecords()
        self.failed_remote = RecentOutcomes(FAILED_S, FAILED_MAX)
        """Blocks whose copy on a shared tier was CORRUPT or UNREADABLE here."""
        self.failed_reads = FailedReads()
        self.unlisted = UnlistedRecords()
        self.evictions = Counter[int]()
        """Copies that left each tier for others, since the start."""
        self.durable_evicted = 0
        """Of these, copies that the durable tier evicted although the block is durable."""
        self.failed_checks = Counter[tuple[int, Outcome]]()
        """Copies that failed a check, by tier and outcome, since the start."""
        self.faults: deque[CopyFault] = deque(maxlen=QUARANTINE_NOTES)

    def erase_generation(self, domain: bytes) -> int:
        """Return a number that changes whenever a domain is erased, here or by another node.

        A save or read that began under another number is not published.
        """
        return self.erasures[domain] + self.sealing.erasures(domain)

    def generation(self, namespace: Namespace) -> Generation:
        """Return numbers that change whenever blocks of a namespace are erased or dropped."""
        return Generation(self.erase_generation(namespace.domain), self.drops.generation(namespace))

    def is_stale(self, namespace: Namespace, generation: Generation) -> bool:
        """Return whether work that began under a generation may not publish blocks any more."""
        return (
            generation != self.generation(namespace)
            or self.drops.is_running(namespace)
            or self.sealing.is_away(namespace.domain)
        )

    def is_arriving(self, row: int) -> bool:
        """Return whether a read will publish a row in memory if it succeeds."""
        filling = self.copies.fillings(HOST).get(row)
        return filling is not None and not filling.is_dropped

    def host(self, namespace: Namespace) -> HostTier:
        """Return the host tier of a namespace's domain; domains with unknown keys share one.

        Raises RefusedError for an unknown key if the store takes no records from other nodes.
        """
        host = self.hosts.get(namespace.domain) or self.foreign
        if host is None:
            raise RefusedError(
                f"domain {namespace.domain.hex()}: there is no key of it here, and records of "
                "others are taken only where `listen` names a tcp:// address; name the domain and "
                "its key under `domains`, or such an address"
            )
        return host

    def owner(self, namespace: Namespace) -> int:
        """Return the owner of a namespace's runs in its arena: itself if engines lock memory there.

        Ranks of one model share slot size and domain; each should lock its own blocks only. Further
        namespaces than `OWNERS_MAX` of a domain share runs.
        """
        if not self.host(namespace).has_locks:
            return NOBODY
        owners = self._owners.setdefault(namespace.domain, {})
        if namespace not in owners and len(owners) < OWNERS_MAX:
            owners[namespace] = len(owners) + 1
        return owners.get(namespace, NOBODY)

    def element_bytes(self, namespace: Namespace) -> int:
        """Return the width of one number in a namespace's payloads in bytes; 1 if unknown."""
        return self._element_bytes.get(namespace, 1)

    def note_element_bytes(self, namespace: Namespace, nbytes: int) -> None:
        """Record the width of one number, as an engine has told it; bounded."""
        self._element_bytes.pop(namespace, None)
        self._element_bytes[namespace] = nbytes
        while len(self._element_bytes) > NAMESPACES_NOTED:
            del self._element_bytes[next(iter(self._element_bytes))]

    def all_hosts(self) -> list[HostTier]:
        """Return every host tier."""
        return [*self.hosts.values(), *([self.foreign] if self.foreign else [])]

    def tier_name(self, tier: int) -> str:
        """Return the name of tier number `tier`, counted from the fastest."""
        return HostTier.name if tier == HOST else self.lower[tier - 1].name

    def tier_names(self) -> list[str]:
        """Return the name of every tier, fastest first."""
        return [HostTier.name, *(tier.name for tier in self.lower)]

    def for_each_row(
        self, wanted: Callable[[Namespace], bool], visit: Callable[[int], None]
    ) -> None:
        """Call `visit` with each row of the namespaces that are wanted.

        Call it without the lock, which it takes for `ROWS_AT_ONCE` rows at a time. A block that is
        added or removed during the call may be left out; every other block is visited.
        """
        index = self.index
        with self.lock:
            end = len(index.keys)
        for at in range(0, end, ROWS_AT_ONCE):
            with self.lock:
                for row in range(at, min(at + ROWS_AT_ONCE, end)):
                    if index.keys[row] is not None and wanted(index.namespace(row)):
                        visit(row)

    def pin(self, rows: list[int]) -> None:
        """Keep rows from being evicted or reused until `unpin`, without a lease."""
        for row in rows:
            self.index.leases[row] += 1

    def unpin(self, rows: list[int]) -> None:
        """Undo `pin`; free slots whose removal waited for their last reader."""
        for row in rows:
            self.index.leases[row] -= 1
            if not self.index.leases[row] and row in self._pending_free:
                self.give_back(self.index.namespace(row), self._pending_free.pop(row))
            self._drop_if_unused(row)

    def publish_here(self, namespace: Namespace, places: Mapping[int, Place]) -> None:
        """Record that rows of a namespace are complete in its host tier, each at its place."""
        self.copies.hold_all(HOST, places)
        self.host(namespace).name_slots(list(places.values()), list(places))

    def replace_here(self, row: int, place: Place) -> None:
        """Move the copy of a row in memory to another slot, which has it decoded.

        The former slot is freed when the row's last reader ends.
        """
        namespace, former = self.index.namespace(row), self.copies.hold(row, HOST, place)
        self.host(namespace).name_slots([former, place], [NAMELESS, row])
        self.encoded.discard(row)
        self.unverified.discard(row)
        self._free_slot(row, former)

    def publish_below(
        self, row: int, tier: int, place: Place, nbytes: int = 0, epoch: int = UNKNOWN_EPOCH
    ) -> None:
        """Record a complete copy of a row on a lower tier; free an older copy there.

        `nbytes` is the stored size of the copy, 0 if it is not known: then the size of a slot
        counts. `epoch` is the epoch of the data key that sealed the copy, if known.
        """
        self.epochs.note(row, tier, epoch)
        index, known = self.index, self.copies.place(row, tier)
        namespace = index.namespace(row)
        before = 0 if known == NOWHERE else index.stored_bytes(row, tier)
        if nbytes:
            self.rules.note_stored(tier, namespace, nbytes)
        if nbytes or known != place:
            index.note_stored(row, tier, nbytes or namespace.slot_bytes)
        self.copies.hold(row, tier, place)
        added = index.stored_bytes(row, tier) - before
        self.usage.add(tier, namespace.domain, added)
        whole = namespace.slot_bytes if known == NOWHERE else 0
        self.usage.add_saved(tier, namespace.domain, whole - added)
        if known not in (NOWHERE, place):
            self.free_place(tier, known)
        if known != place:
            self.usage.note_write(tier, namespace.domain, row)

    def free_place(self, tier: int, place: Place) -> None:
        """Free a place on a local tier, unless its record is kept; a shared tier has no places."""
        if (local := self._local.get(tier)) is not None and (tier, place) not in self.unlisted:
            local.free([place])

    def free_unlisted(self, wanted: Callable[[Namespace, bytes], bool]) -> None:
        """Free the unlisted records whose namespace and key are wanted."""
        for tier, place in self.unlisted.take(wanted):
            self.free_place(tier, place)

    def enter_host(self, rows: list[int]) -> None:
        """Add rows to the eviction policy after they reach the host tier, in chain order."""
        index = self.index
        if self.public:  # its blocks stay
            rows = [row for row in rows if index.namespace(row).domain != self.public]
        self.eviction.insert(rows, index.parent_rows(rows), index.names(rows), self.clock.now())

    def enter_new(self, rows: list[int]) -> None:
        """Add newly saved rows to the eviction policy and admission rules, in chain order."""
        self.enter_host(rows)
        self.rules.count(rows)
        self._note_uses(rows, [NOT_HERE] * len(rows))

    def write_public(self, rows: Sequence[int]) -> None:
        """Queue new blocks of the public domain for every tier that outlives the process.

        They are never evicted from memory, so nothing else would write them.
        """
        lower = range(1, self.copies.tiers)
        self.queues.write_through(rows, [tier for tier in lower if tier not in self._volatile])

    def is_durable(self, row: int) -> bool:
        """Return whether a block was saved as durable, and its mark has not ended."""
        marks = self.durable_marks
        return len(marks) > 0 and marks.holds(
            self.index.namespace(row), self.index.keys[row] or b""
        )

    def write_durable(self, rows: Sequence[int]) -> None:
        """Queue durable blocks: those in memory for every tier, the others for the durable one."""
        self.queues.write_through([row for row in rows if self.is_on(row, HOST)])
        if self.durable_tier:
            self.queues.write_through(rows, [self.durable_tier])

    def restore_durable(self, row: int, tier: int) -> None:
        """Queue a durable block whose copy on the durable tier is lost, if a tier holds it."""
        if tier == self.durable_tier and self.is_durable(row) and self.index.fastest(row) >= 0:
            self.queues.write_through([row], [tier])

    def touch(self, rows: Sequence[int]) -> None:
        """Record one use of the leading rows of a chain, in chain order."""
        self.eviction.touch(rows, self.clock.now())
        self.rules.count(rows)
        if self.rules.choosy:
            self._note_uses(rows, [self.index.fastest(row) for row in rows])

    def remove_copy(self, row: int, tier: int) -> None:
        """Remove a row's copy from one tier; its place is freed when the last reader ends."""
        place = self.copies.remove(row, tier)
        if place == NOWHERE:
            return
        namespace = self.index.namespace(row)
        if tier == HOST:
            self._left_memory(row)
            if self.index.leases[row]:
                self.host(namespace).name_slots([place], [NAMELESS])
            self._free_slot(row, place)
        else:
            self._subtract_copy(row, tier, namespace)
            self.free_place(tier, place)
        self._drop_if_unused(row)

    def remove_copies(self, row: int) -> None:
        """Remove a row's copies from all tiers, which drops the row if it is not in use.

        A copy of it that is being made is not published.
        """
        self.copies.drop_fillings(row)
        for tier in self.index.tiers(row):
            self.remove_copy(row, tier)

    def evict_for(self, host: HostTier, rows: Iterable[int]) -> list[Place]:
        """Evict rows from this host tier; return their slots.

        The caller owns the slots and must add their bytes to the usage again.
        """
        places, namespaces = list[Place](), Counter[int]()
        for row in rows:
            namespaces[self.index.namespace_number(row)] += 1
            places.append(self.copies.remove(row, HOST))
            self._left_memory(row)
            self._drop_if_unused(row)
        for number, blocks in namespaces.items():
            namespace = self.index.namespaces[number]
            self.usage.subtract(HOST, namespace.domain, blocks * namespace.slot_bytes)
        host.name_slots(places, [NAMELESS] * len(places))
        self.evictions[HOST] += len(places)
        return places

    def forget(self, dropped: DroppedBlock, tier: int, capacity_bytes: int) -> None:
        """Record that a lower tier dropped a block by itself, if the table still lists it there.

        `capacity_bytes`: the tier's capacity, which the caller asks for without the lock.
        """
        self.unlisted.remove(tier, dropped.place)
        row = self.index.find(dropped.namespace, dropped.key)
        if row >= 0 and self.copies.place(row, tier) == dropped.place:
            namespace = dropped.namespace
            self.rules.gave_up(row, tier)
            self.movement.evicted(row, tier)
            self.copies.remove(row, tier)
            self._subtract_copy(row, tier, namespace)
            self.evictions[tier] += 1
            is_renewed = row in self.copies.fillings(tier)
            if tier == self.durable_tier and not is_renewed and self.is_durable(row):
                self.durable_evicted += 1
            public = namespace.domain == self.public and tier not in self._volatile
            if public and self.is_on(row, HOST):
                most = _PUBLIC_SHARE_BELOW * capacity_bytes
                stays = self.usage.used[HOST][namespace.domain] <= most
                if stays and self.rules.affords(row, tier):
                    self.queues.rewrite(row, tier)
            self._drop_if_unused(row)

    def note_evicted(self, row: int, tier: int) -> None:
        """Count a durable block that the durable tier has deleted, if that is a shared one."""
        is_deleted = tier == self.durable_tier and tier in self.shared and self.is_on(row, tier)
        self.durable_evicted += is_deleted and self.is_durable(row)

    def renewal_ended(self, row: int, tier: int) -> None:
        """Count a durable block that was evicted while it was written again, without success.

        The write may have failed, or may not have been tried for lack of room.
        """
        self.durable_evicted += not self.is_on(row, tier) and self.is_durable(row)

    def quarantine(self, row: int, tier: int, outcome: Outcome) -> None:
        """Take a bad copy out of the index, so that the next save writes the block again.

        The slot of a leased host copy is freed when the last reader ends. Copies on other tiers
        stay: each is judged by its own check. A local tier's record is freed only if it is proven
        bad, CORRUPT or MISS. Any other one keeps its place, see `UnlistedRecords`; one that could
        not be read stays in the index until its failure is confirmed.
        """
        key, place = self.index.keys[row], self.copies.place(row, tier)
        if key is None:
            return
        if outcome is Outcome.MISS:
            self.note_evicted(row, tier)
        namespace = self.index.namespace(row)
        self.failed_checks[tier, outcome] += 1
        self.faults.append(CopyFault(namespace, key, self.tier_name(tier), outcome))
        if tier in self._local and outcome not in (Outcome.CORRUPT, Outcome.MISS):
            is_read, now_s = outcome is Outcome.UNREADABLE, self.clock.now()
            if not is_read and not self.failed_reads.is_confirmed(tier, place, now_s):
                return
            nbytes = self.index.stored_bytes(row, tier)
            self.unlisted.add(tier, place, UnlistedRecord(namespace, key, nbytes))
        self.remove_copy(row, tier)
        self.restore_durable(row, tier)

    def read_failed(self, row: int, tier: int, outcome: Outcome) -> None:
        """Quarantine a copy whose read failed, unless a local tier only did not answer in time."""
        namespace, key = self.index.namespace(row), self.index.keys[row] or b""
        if outcome is not Outcome.LATE or tier in self.shared:
            self.quarantine(row, tier, outcome)
            self.note_failed(tier, namespace, key, outcome)

    def note_failed(self, tier: int, namespace: Namespace, key: bytes, outcome: Outcome) -> None:
        """Record a failed copy; its shared tier is not asked for the block for `FAILED_S`."""
        if tier in self.shared and outcome in (Outcome.CORRUPT, Outcome.UNREADABLE):
            self.failed_remote.note((tier, namespace, key), outcome, self.clock.now())

    def unwritten(self) -> int:
        """Return how many writes are queued or running, over all tiers. Takes the lock."""
        with self.lock:
            return len(self.queues)

    def state(self, row: int) -> BlockState:
        """Return the state of a block."""
        tiers = tuple(self.index.tiers(row))
        return BlockState(
            tiers,
            is_in_use=self.index.leases[row] > 0 or row in self.copies.fillings(HOST),
            is_saved=not self._volatile.issuperset(tiers)
            or (any(tier != HOST for tier in tiers) and not self.queues.is_queued(row)),
            is_admitted=self.queues.is_admitted(row),
        )

    def evictable(self, row: int) -> bool:
        """Return whether a host copy may be evicted: unread, and saved below or not admitted there.

        A block that can still be saved is queued for writing instead and stays until written.
        """
        # As `state` says, without an object for each block that a search examines.
        index, copies, queues = self.index, self.copies, self.queues
        if index.leases[row] or row in copies.fillings(HOST):
            return False
        if not self.lower:
            return True
        if any(copies.is_on(row, tier) for tier in self._persistent):
            return True
        if not queues.is_admitted(row):
            return True
        # What is queued for one tier is not offered again to a tier that has refused it.
        if queues.is_queued(row):
            return False
        return any(copies.is_on(row, tier) for tier in self._volatile_below) or not (
            queues.enqueue(row)
        )

    def is_idle(self) -> bool:
        """Return whether no row is leased, reserved, being read or waiting for its last reader."""
        reads = self.copies.fillings(HOST)
        busy = self.leases or self.leases.reservations or reads or self._pending_free
        return not busy and not any(self.index.leases)

    def pending_slots(self, namespace: Namespace) -> int:
        """Return the slots of a namespace whose copies have left memory, but not their readers."""
        return sum(
            len(places)
            for row, places in self._pending_free.items()
            if self.index.namespace(row) == namespace
        )

    def give_back(self, namespace: Namespace, places: Sequence[Place]) -> None:
        """Free slots of a namespace in the host tier, published or not."""
        self.host(namespace).free(places)
        self.usage.subtract(HOST, namespace.domain, len(places) * namespace.slot_bytes)

    def drop_oldest_lookups(self) -> None:
        """Drop cached remote lookups beyond the bound, in short critical sections. Takes the lock.

        A block that is in use, or now on a local tier, only leaves the cache.
        """
        while True:
            with self.lock:
                rows = self.remote_lookups.pop_excess(ROWS_AT_ONCE)
                for row in rows:
                    state = self.state(row)
                    stays = state.is_in_use or not self.shared.keys() >= set(state.tiers)
                    if not stays:
                        self.remove_copies(row)
            if not rows:
                return

    def _subtract_copy(self, row: int, tier: int, namespace: Namespace) -> None:
        """Take a copy on a lower tier out of its domain's usage."""
        nbytes = self.index.stored_bytes(row, tier)
        self.usage.subtract(tier, namespace.domain, nbytes, row)
        self.usage.add_saved(tier, namespace.domain, nbytes - namespace.slot_bytes)

    def note_size(self, row: int, tier: int, nbytes: int) -> None:
        """Record the stored size of a copy on a lower tier, which a read has shown."""
        before = self.index.stored_bytes(row, tier)
        self.index.note_stored(row, tier, nbytes)
        domain = self.index.namespace(row).domain
        added = self.index.stored_bytes(row, tier) - before
        self.usage.add(tier, domain, added)
        self.usage.add_saved(tier, domain, -added)

    def _free_slot(self, row: int, place: Place) -> None:
        """Free a slot that a row had in memory, when the row's last reader ends."""
        if self.index.leases[row]:
            self._pending_free.setdefault(row, []).append(place)
        else:
            self.give_back(self.index.namespace(row), [place])

    def _note_uses(self, rows: Sequence[int], at: Sequence[int]) -> None:
        for row in self.rules.note(rows, at):
            state = self.state(row)
            if state.is_saved and HOST in state.tiers:
                # Eviction does not offer a block saved on one tier to the other tiers.
                self.queues.save(row)

    def _left_memory(self, row: int) -> None:
        self.eviction.remove(row)
        self.encoded.discard(row)
        self.unverified.discard(row)
        self.queues.left_memory(row)

    def _drop_if_unused(self, row: int) -> None:
        """Drop a row without a copy, note one that only shared tiers hold, if it is not in use."""
        tier = self.index.fastest(row)
        if (
            self.index.keys[row] is None
            or self.index.leases[row]
            or row in self.copies.fillings(HOST)
        ):
            return
        if tier == NOWHERE:
            self.index.drop(row)
            self.rules.forget(row)
            self.eviction.forget(row)
            self.movement.forget(row)  # another block may reuse the row
            self.remote_lookups.forget(row)
        elif tier in self.shared:  # shared tiers do not announce evictions
            self.remote_lookups.note(row)
