"""What a store remembers about its blocks, and every change of it.

A block's life: *reserved* (slots of a ticket, seen by nobody) -> *held* (in the index, on one or
more tiers) -> evicted, demoted or promoted -> gone. *Leased*: somebody reads its host slot, so it
stays. *Loading*: its host slot is being filled from a lower tier. Everything here only changes
state and is called under the store's lock; no function does I/O.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.clock import Clock
from holdfast.errors import Outcome, RefusedError
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.policy.base import Eviction
from holdfast.store.asking import Asking
from holdfast.store.fill import Fill
from holdfast.store.promises import Lease, Loading, Ticket
from holdfast.store.rules import Rules
from holdfast.store.sealing import Sealing
from holdfast.tiers.base import NOWHERE, Fleeting, Place, Shared, Tier
from holdfast.tiers.host import NAMELESS, HostTier

HOST = 0
QUARANTINE_NOTES = 256
PUBLIC_SHARE = 0.25
"""The public domain may take this share of memory; what finds no room there is not published."""

_PUBLIC_SHARE_BELOW = 0.5
"""A lower tier gets back what it drops of the public domain if that takes no more of the tier.

What is written again must not drop the rest in its turn, and so on for ever.
"""


class Fault(NamedTuple):
    """A note for `inspect` about a block that failed verification or could not be read."""

    key: bytes
    tier: str
    outcome: Outcome


class States:
    """All mutable state of a store. Hold `lock` around every call and every read."""

    def __init__(
        self,
        hosts: dict[bytes, HostTier],
        lower: list[Tier],
        eviction: Eviction,
        clock: Clock,
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.hosts = hosts
        self.foreign: HostTier | None = None
        self.public = b""
        """The domain whose blocks stay in memory; empty: there is none."""
        self.lower = lower
        self.segment_blocks = SEGMENT_BLOCKS
        """How many blocks of a chain a shared tier places together."""
        self._fleeting = {n for n, tier in enumerate(lower, start=1) if isinstance(tier, Fleeting)}
        self.shared = {n for n, tier in enumerate(lower, start=1) if isinstance(tier, Shared)}
        self.eviction = eviction
        self.index = Residency(1 + len(lower))
        self.fill = Fill(1 + len(lower))
        self.sealing = Sealing(hosts)
        self.erasures = Counter[bytes]()
        self.tickets: dict[int, Ticket] = {}
        self.leases: dict[int, Lease] = {}
        self.loading: dict[int, Loading] = {}
        self.leaving: dict[int, list[Place]] = {}
        self.waiting: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in lower]
        self.rules = Rules(self.index, clock, len(lower))
        self.hearsay: OrderedDict[bytes, int] = OrderedDict()
        self.asking = Asking()
        self.unwanted: set[int] = set()
        self.unproven: set[int] = set()
        """Blocks in memory that were published as they came: who serves one has hashed it."""
        self.put_off: list[set[bytes]] = [set() for _ in lower]
        """Blocks that would be written to a tier were anybody there; free to leave memory."""
        self.writing = [0] * len(lower)
        self.faults: deque[Fault] = deque(maxlen=QUARANTINE_NOTES)
        self.numbers = 0

    def number(self) -> int:
        """Return a number never given before: the name of a lease or a ticket."""
        self.numbers += 1
        return self.numbers

    def era(self, domain: bytes) -> int:
        """Return a number that changes whenever a domain is erased, here or by another node.

        What began in one era is not published in the next.
        """
        return self.erasures[domain] + self.sealing.erasures(domain)

    def host(self, world: World) -> HostTier:
        """Return the host tier of a world's domain; one for all whose keys are not ours.

        Raises RefusedError for such a domain where the store takes no records from other nodes.
        """
        host = self.hosts.get(world.domain) or self.foreign
        if host is None:
            raise RefusedError(
                f"domain {world.domain.hex()}: there is no key of it here, and records of others "
                "are taken only where `listen` names a tcp:// address; name the domain and its "
                "key under `domains`, or such an address"
            )
        return host

    def all_hosts(self) -> list[HostTier]:
        """Return every host tier."""
        return [*self.hosts.values(), *([self.foreign] if self.foreign else [])]

    def tier_name(self, tier: int) -> str:
        """Return the name of tier number `tier`, counted from the fastest."""
        return HostTier.name if tier == HOST else self.lower[tier - 1].name

    def tier_names(self) -> list[str]:
        """Return the name of every tier, fastest first."""
        return [HostTier.name, *(tier.name for tier in self.lower)]

    def lease(self, rows: list[int], expires_at: float) -> int:
        """Pin rows in the host tier; return the lease's number."""
        counts = self.index.leases
        for row in rows:
            counts[row] += 1
        number = self.number()
        self.leases[number] = Lease(rows, expires_at)
        return number

    def release(self, number: int) -> bool:
        """End a lease; False if it had ended before."""
        lease = self.leases.pop(number, None)
        if lease is None:
            return False
        self.unpin(lease.rows)
        return True

    def extend(self, number: int, expires_at: float) -> bool:
        """Let a lease end at another time; False if it has ended."""
        lease = self.leases.get(number)
        if lease is not None:
            self.leases[number] = lease._replace(expires_at=expires_at)
        return lease is not None

    def shorten(self, number: int, blocks: int) -> None:
        """Keep only the first `blocks` rows of a lease."""
        lease = self.leases.get(number)
        if lease is not None:
            self.unpin(lease.rows[blocks:])
            self.leases[number] = lease._replace(rows=lease.rows[:blocks])

    def pin(self, rows: list[int]) -> None:
        """Keep rows from being evicted or recycled, without a lease's number or end."""
        for row in rows:
            self.index.leases[row] += 1

    def unpin(self, rows: list[int]) -> None:
        """Undo `pin`; slots given up meanwhile are freed with their last reader."""
        for row in rows:
            self.index.leases[row] -= 1
            if not self.index.leases[row] and row in self.leaving:
                self.give_back(self.index.world(row), self.leaving.pop(row))
            self._settle(row)

    def expire(self, now: float) -> int:
        """End every lease that is over; return how many."""
        late = [number for number, lease in self.leases.items() if lease.expires_at <= now]
        for number in late:
            self.release(number)
        return len(late)

    def publish_here(self, world: World, places: Mapping[int, Place]) -> None:
        """Note that rows of a world now lie in its host tier, each at its place, whole."""
        column = self.index.places[HOST]
        for row, place in places.items():
            column[row] = place
        self.host(world).name_slots(list(places.values()), list(places))

    def publish_below(self, row: int, tier: int, place: Place) -> None:
        """Note that a row lies on a lower tier now too, whole; another copy there is freed."""
        column, world = self.index.places[tier], self.index.world(row)
        known, column[row] = Place(column[row]), place
        if known == NOWHERE:
            self.fill.take(tier, world.domain, world.record_bytes)
        elif known != place:
            self.lower[tier - 1].free([known])
        if known != place:
            self.fill.came(tier, world.domain, row, column)

    def enter_host(self, rows: list[int]) -> None:
        """Tell the eviction policy of rows that now lie in the host tier, chain order."""
        index, keys = self.index, self.index.keys
        if self.public:  # its blocks stay
            rows = [row for row in rows if index.world(row).domain != self.public]
        fronts, names = index.parent_rows(rows), [keys[row] for row in rows]
        self.eviction.insert(rows, fronts, names, self.clock.now())

    def enter_new(self, rows: list[int]) -> None:
        """Tell policy and rules of rows that were just saved into the host tier, chain order."""
        self.enter_host(rows)
        self._note_uses(rows, [NOT_HERE] * len(rows))

    def touch(self, rows: Sequence[int]) -> None:
        """Tell the eviction policy of one use of these rows, a chain's leading ones, in order."""
        self.eviction.touch(rows, self.clock.now())
        if self.rules.choosy:
            self._note_uses(rows, [self.index.fastest(row) for row in rows])

    def vacate(self, row: int, tier: int) -> None:
        """Take a row off one tier; its place there is free at once, or with its last reader."""
        column = self.index.places[tier]
        place = Place(column[row])
        if place == NOWHERE:
            return
        column[row] = NOWHERE
        world = self.index.world(row)
        if tier == HOST:
            self._left_memory(row)
            if self.index.leases[row]:
                self.host(world).name_slot(place, NAMELESS)
                self.leaving.setdefault(row, []).append(place)
            else:
                self.give_back(world, [place])
        else:
            self.fill.give(tier, world.domain, world.record_bytes)
            self.lower[tier - 1].free([place])
        self._settle(row)

    def take_over(self, host: HostTier, rows: Iterable[int]) -> list[Place]:
        """Have evictable rows leave this host tier, one by one; return their slots, nameless now.

        The slots are the caller's, who counts the bytes anew.
        """
        column, places, worlds = self.index.places[HOST], list[Place](), Counter[int]()
        for row in rows:
            worlds[self.index.world_number(row)] += 1
            places.append(Place(column[row]))
            column[row] = NOWHERE
            self._left_memory(row)
            self._settle(row)
        for number, blocks in worlds.items():
            world = self.index.worlds[number]
            self.fill.give(HOST, world.domain, blocks * world.record_bytes)
        host.name_slots(places, [NAMELESS] * len(places))
        return places

    def forget(self, key: bytes, tier: int, place: Place) -> None:
        """Note that a lower tier gave up a block by itself, if it is still known to lie there."""
        row = self.index.find(key)
        if row >= 0 and self.index.places[tier][row] == place:
            world = self.index.world(row)
            self.rules.gave_up(key, tier)
            self.fill.give(tier, world.domain, world.record_bytes)
            self.index.places[tier][row] = NOWHERE
            stays = self.lies(row, HOST) and self._stays_on(tier, world)
            if stays and self.rules.affords(row, tier):
                self.waiting[tier - 1][key] = None
            self._settle(row)

    def quarantine(self, row: int, tier: int, outcome: Outcome) -> None:
        """Un-index a copy that failed, at once, so that the next save really rewrites it.

        A leased host copy leaves the index now and its slot when the last reader is done. With it
        go the copies below, which may have been written from it: they would pass for held.
        """
        key = self.index.keys[row]
        if key is not None:
            self.faults.append(Fault(key, self.tier_name(tier), outcome))
        below = range(1, len(self.index.places)) if tier == HOST else ()
        for number in (*below, tier):
            self.vacate(row, number)

    def line_up(self, row: int, tiers: Sequence[int] = ()) -> bool:
        """Let a block wait to be written to those of `tiers` that want it; False if none does.

        None named are all below the host.
        """
        if not tiers and not self.rules.choosy:
            self.write_through([row])
            return True
        key = self.index.keys[row]
        if key is None:
            return False
        wanted = False
        for tier in tiers or range(1, len(self.index.places)):
            line = self.waiting[tier - 1]
            if key not in line and not self.lies(row, tier):
                if not self.rules.admits(row, tier):
                    continue
                line[key] = None
            wanted = True
        return wanted

    def write_through(self, rows: Sequence[int]) -> None:
        """Let blocks wait to be written to each tier below without them, whatever its rule says.

        A domain's own write budget holds for these too.
        """
        for row in rows:
            key = self.index.keys[row]
            for tier, line in enumerate(self.waiting, start=1):
                if key is None or key in line or self.lies(row, tier):
                    continue
                if self.rules.affords(row, tier):
                    line[key] = None

    def unwritten(self) -> int:
        """Return how many writes are waiting or under way, over all tiers."""
        with self.lock:
            return sum(map(len, self.waiting)) + sum(self.writing)

    def holds(self, row: int, world: World) -> bool:
        """Return whether some tier has the row, and as a block of this world."""
        return self.index.world(row) == world and self.index.fastest(row) >= 0

    def evictable(self, row: int) -> bool:
        """Return whether the host copy of a row may go: unread, and saved below or refused there.

        A block that could still be saved is put in line for it: it may go next time.
        """
        if self.index.leases[row] or row in self.loading:
            return False
        if not self.lower or self.saved_below(row) or row in self.unwanted:
            return True
        return not self.line_up(row)

    def saved_below(self, row: int) -> bool:
        """Return whether some lower tier holds the row, and no more lasting one waits for it."""
        there = False
        for tier in range(1, len(self.index.places)):
            if self.lies(row, tier):
                there = True
                if tier not in self._fleeting:
                    return True
        key = self.index.keys[row]
        return there and not any(key in line for line in self.waiting)

    def came_up(self, row: int, tier: int) -> bool:
        """Offer a block, just risen from `tier`, to the tiers of memory that it passed by.

        If it comes from one of those, offer it to all: what wears may want it by now. Returns
        whether one took it.
        """
        missing = [n for n in range(1, len(self.index.places)) if not self.lies(row, n)]
        if tier not in self._fleeting:
            missing = [number for number in missing if number in self._fleeting and number < tier]
        return bool(missing) and self.line_up(row, missing)

    def lies(self, row: int, tier: int) -> bool:
        """Return whether a tier holds a row."""
        return self.index.places[tier][row] >= 0

    def give_back(self, world: World, places: Sequence[Place]) -> None:
        """Free slots of a world in the host tier, published or not."""
        self.host(world).free(places)
        self.fill.give(HOST, world.domain, len(places) * world.record_bytes)

    def _note_uses(self, rows: Sequence[int], at: Sequence[int]) -> None:
        for row in self.rules.note(rows, at):
            if self.saved_below(row) and self.lies(row, HOST):
                self.line_up(row)  # saved on one tier it leaves memory without asking the others

    def _stays_on(self, tier: int, world: World) -> bool:
        """Return whether a tier is to hold a block of this world when the next process starts."""
        if world.domain != self.public or tier in self._fleeting:
            return False
        capacity_bytes = self.lower[tier - 1].usage().capacity_bytes
        return self.fill.used[HOST][world.domain] <= _PUBLIC_SHARE_BELOW * capacity_bytes

    def _left_memory(self, row: int) -> None:
        self.eviction.remove(row)
        self.unwanted.discard(row)
        self.unproven.discard(row)
        for line in self.waiting:  # a tier that stands still must not make it grow for ever
            line.pop(self.index.keys[row] or b"", None)
        for late in self.put_off:
            late.discard(self.index.keys[row] or b"")

    def _settle(self, row: int) -> None:
        key, tier = self.index.keys[row], self.index.fastest(row)
        if key is None or self.index.leases[row] or row in self.loading:
            return
        if tier == NOWHERE:
            self.index.drop(row)
            self.rules.forget(row)
            self.eviction.forget(row)
        elif tier in self.shared:  # nobody says when it goes from there
            self.hearsay[key] = tier
            self.hearsay.move_to_end(key)
