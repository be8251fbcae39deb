"""Modelled tiers behind one index: what is held where, and what leaves to make room.

The index and the policies are those of the store (`index.Residency`, `policy`); only the bytes are
missing. A row is a run of blocks (`sim.runs`), its place on a tier the number of its leading blocks
that are held there. Each worker has a memory of its own tiers; the tiers that all workers share are
one more. A row stays with its run for as long as the simulation lasts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, MutableSequence, Sequence
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.policy.admit import USES_MAX, Admission, Candidate
from holdfast.policy.base import Eviction
from holdfast.sim.link import Writer

COMPUTED = 99
"""Where a block comes from that no tier gave: further down than any tier."""


class Entry(enum.Enum):
    """When a block comes to lie on a tier."""

    ENGINE = "engine"
    """The engine's own memory: what it computed or was brought. Nothing is saved from there when it
    leaves, unless the tier below takes what is evicted."""
    STORE = "store"
    """The store's first tier: what is saved, and what was brought from further down."""
    BEHIND = "behind"
    """What is saved, and what the tier above evicts and nobody below holds."""
    RISING = "rising"
    """What is saved, and what is brought from further down: memory, which does not wear."""
    ON_EVICTION = "on_eviction"
    """What the tier above evicts and nobody below holds."""


class Rules(NamedTuple):
    """Who goes first, and who may come in; `admission` None asks nobody."""

    eviction: Eviction
    admission: Admission | None = None


class Shelf:
    """One modelled tier: `capacity` blocks, an order of eviction, ways in, and counters."""

    def __init__(self, capacity: int, entry: Entry, rules: Rules, writer: Writer) -> None:
        self.capacity = capacity
        self.entry = entry
        self.eviction = rules.eviction
        self.admission = rules.admission
        self.writer = writer
        self.held = 0
        self.peak = 0
        self.written = 0
        self.refused = 0
        """Blocks that were not written because too many writes were waiting."""
        self.declined = 0
        """Blocks that the rule of admission did not want."""

    def from_below(self, number: int) -> int:
        """Return the tier below which what the engine uses comes from, to enter this one."""
        if self.entry is Entry.ON_EVICTION:
            return COMPUTED
        return COMPUTED - 1 if self.entry is Entry.BEHIND else number


class Reach(NamedTuple):
    """The leading blocks of a chain that a memory holds: their rows, and a tier for each block.

    `whole` counts the rows that are held to their end; of one more, `part` blocks may be held.
    """

    rows: list[int]
    tiers: list[int]
    whole: int
    part: int = 0


class Memory:
    """Tiers of one owner, fastest first. `below` is where blocks go that the last one evicts."""

    def __init__(self, world: World, shelves: Sequence[Shelf], below: Memory | None = None) -> None:
        self.index = Residency(max(1, len(shelves)))
        self.shelves = shelves
        self._world = world
        self._block_bytes = world.record_bytes
        self._below = below
        self._gives = self._givers()
        self._limits = [shelf.from_below(number) for number, shelf in enumerate(shelves)]
        self._parents: list[int] = []
        self._lengths: list[int] = []
        self._uses: list[int] = []
        self._rules = [(n, shelf.admission) for n, shelf in enumerate(shelves) if shelf.admission]

    def cover(self, keys: Sequence[bytes]) -> Reach:
        """Return how far the runs of these keys are held."""
        found = self.index.cover(self._world, keys)
        places, lengths = self.index.places, self._lengths
        tiers: list[int] = []
        for whole, (row, tier) in enumerate(zip(found.rows, found.tiers, strict=True)):
            length, held = lengths[row], places[tier][row]
            tiers += [tier] * held
            for lower in range(tier + 1, len(places)) if held < length else ():
                more = places[lower][row] - held
                if more > 0:
                    tiers += [lower] * more
                    held += more
            if held < length:
                return Reach(found.rows[: whole + 1], tiers, whole, held)
        return Reach(found.rows, tiers, len(found.rows))

    def pin(self, rows: Iterable[int]) -> None:
        """Keep rows where they are until `unpin`."""
        leases = self.index.leases
        for row in rows:
            leases[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Undo `pin`."""
        leases = self.index.leases
        for row in rows:
            leases[row] -= 1

    def rows(
        self, keys: Sequence[bytes], lengths: Sequence[int], known: Sequence[int] = ()
    ) -> list[int]:
        """Return the rows of a chain of runs, made where they are new; `known` are the first."""
        rows, find = list(known), self.index.find
        for depth in range(len(rows), len(keys)):
            row = find(keys[depth])
            if row < 0:
                row = self._row(keys[depth], rows[-1] if rows else NOT_HERE, depth, lengths[depth])
            rows.append(row)
        return rows

    def save(self, now_s: float, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Note that the engine has these runs, a whole chain, each come from tier `sources[i]`.

        They are used now, on every tier that holds them, and enter those that take them.
        """
        lengths = self._lengths
        self.pin(rows)
        if self._rules:
            self._note_uses(now_s, rows)
        for number, shelf in enumerate(self.shelves):
            column = self.index.places[number]
            shelf.eviction.touch(rows, now_s)
            limit = self._limits[number]
            wanted = [
                (row, lengths[row])
                for row, source in zip(rows, sources, strict=True)
                if source > limit and column[row] < lengths[row]
            ]
            if wanted:
                self._put(now_s, number, wanted)
        self.unpin(rows)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Tell every tier when this chain is needed again."""
        for shelf in self.shelves:
            shelf.eviction.expect(rows, at_s)

    def bring_up(self, now_s: float, number: int, brought: Sequence[tuple[int, int]]) -> None:
        """Hold on tier `number` rows, a chain, and so many blocks of each; that is no use."""
        column = self.index.places[number]
        self._put_pinned(now_s, number, [each for each in brought if column[each[0]] < each[1]])

    def take(self, now_s: float, upper: Memory, gone: Sequence[tuple[int, int]]) -> None:
        """Take rows of `upper`, and so many blocks of each, that its last tier evicted."""
        mine = [(self._counterpart(upper, row), blocks) for row, blocks in gone]
        self._put_pinned(now_s, 0, mine)

    def holds(self, key: bytes, blocks: int) -> bool:
        """Return whether some tier holds the first `blocks` blocks of a run."""
        row = self.index.find(key)
        return row >= 0 and any(column[row] >= blocks for column in self.index.places)

    def _givers(self) -> list[bool]:
        """Return for each tier whether what leaves it may go further down."""
        after = [*self.shelves[1:], *(self._below.shelves[:1] if self._below else ())]
        gives = [
            shelf.entry is not Entry.ENGINE or lower.entry is Entry.ON_EVICTION
            for shelf, lower in zip(self.shelves, after, strict=False)
        ]
        return gives + [False] * (len(self.shelves) - len(gives))

    def _row(self, key: bytes, front: int, depth: int, length: int) -> int:
        parent = self._world.fingerprint if front < 0 else self._key(front)
        row = self.index.add(self._world, key, parent, depth)
        if row == len(self._parents):
            self._parents.append(front)
            self._lengths.append(length)
            self._uses.append(0)
        return row

    def _counterpart(self, upper: Memory, row: int) -> int:
        """Return my row for a row of `upper`, made with all in front of it where it is new."""
        unknown: list[int] = []
        mine = NOT_HERE
        while row >= 0 and mine < 0:
            mine = self.index.find(upper._key(row))
            if mine < 0:
                unknown.append(row)
                row = upper._parents[row]
        for new in reversed(unknown):
            mine = self._row(upper._key(new), mine, upper.index.depths[new], upper._lengths[new])
        return mine

    def _put(self, now_s: float, number: int, wanted: Sequence[tuple[int, int]]) -> None:
        """Write pinned rows, parents first, up to so many blocks each, as far as there is room."""
        shelf, column = self.shelves[number], self.index.places[number]
        size = self._block_bytes
        if shelf.admission:
            wanted = self._admitted(now_s, number, wanted)
        needed = 0
        for row, upto in wanted:
            held = column[row]
            needed += upto - held if held > 0 else upto
        room = shelf.writer.room(now_s)
        allowed = needed if needed * size <= room else int(room / size)
        shelf.refused += needed - allowed
        fit = self._make_room(now_s, number, allowed)
        entering = wanted if fit == needed else _first(column, wanted, fit)
        parents, names = self._parents, self.index.keys
        new = [row for row, _ in entering if column[row] < 0]
        if new:
            shelf.eviction.insert(
                new, [parents[row] for row in new], [names[row] for row in new], now_s
            )
        for row, upto in entering:
            column[row] = upto
        shelf.writer.write(now_s, fit * size)
        shelf.written += fit
        shelf.held += fit
        shelf.peak = max(shelf.peak, shelf.held)

    def _note_uses(self, now_s: float, rows: Sequence[int]) -> None:
        for row in rows:
            self._uses[row] = min(self._uses[row] + 1, USES_MAX)
            block = self._candidate(row, self._lengths[row])
            found = self.index.fastest(row)
            for number, rule in self._rules:
                rule.used(block, now_s, at_hand=NOT_HERE < found < number)

    def _admitted(
        self, now_s: float, number: int, wanted: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return those that the tier's rule of admission lets in."""
        shelf, column = self.shelves[number], self.index.places[number]
        admitted = []
        for row, upto in wanted:
            blocks = upto - max(0, column[row])
            block = self._candidate(row, blocks)
            if shelf.admission is None or shelf.admission.admit(block, now_s):
                admitted.append((row, upto))
            else:
                shelf.declined += blocks
        return admitted

    def _candidate(self, row: int, blocks: int) -> Candidate:
        nbytes, uses = blocks * self._block_bytes, self._uses[row]
        return Candidate(self._key(row), (0, uses), nbytes, uses=uses)

    def _make_room(self, now_s: float, number: int, blocks: int) -> int:
        """Evict until `blocks` fit; return how many do, since pinned rows stay."""
        shelf, column, leases = self.shelves[number], self.index.places[number], self.index.leases
        short = blocks - (shelf.capacity - shelf.held)
        if short <= 0:
            return blocks
        lost: list[tuple[int, int]] = []
        gives = self._gives[number]
        for row in shelf.eviction.victims(now_s):
            if leases[row]:
                continue
            held = column[row]
            falls = gives and self._nobody_below_holds(number, row, held)
            if held > short and not falls:  # its tail goes, the rest keeps its place in the order
                column[row] = held - short
                shelf.held -= short
                short = 0
                break
            shelf.eviction.remove(row)
            column[row] = NOT_HERE
            if shelf.admission:
                shelf.admission.gave_up(self._key(row), now_s)
            shelf.held -= held
            short -= held
            if falls:
                lost.append((row, held))
            if short <= 0:
                break
        if lost:
            self._fall(now_s, number, lost[::-1])
        return blocks - max(0, short)

    def _nobody_below_holds(self, number: int, row: int, blocks: int) -> bool:
        for column in self.index.places[number + 1 :]:
            if column[row] >= blocks:
                return False
        return self._below is None or not self._below.holds(self._key(row), blocks)

    def _fall(self, now_s: float, number: int, lost: Sequence[tuple[int, int]]) -> None:
        """Write rows that left a tier, parents first, to the next one."""
        if number + 1 < len(self.shelves):
            self._put_pinned(now_s, number + 1, lost)
        elif self._below:
            self._below.take(now_s, self, lost)

    def _put_pinned(self, now_s: float, number: int, wanted: Sequence[tuple[int, int]]) -> None:
        rows = [row for row, _ in wanted]
        self.pin(rows)
        self._put(now_s, number, wanted)
        self.unpin(rows)

    def _key(self, row: int) -> bytes:
        return self.index.keys[row] or b""


def _first(
    column: MutableSequence[int], wanted: Sequence[tuple[int, int]], fit: int
) -> list[tuple[int, int]]:
    """Return as many of the rows, the last one in part, as `fit` more blocks allow."""
    first: list[tuple[int, int]] = []
    for row, upto in wanted:
        if fit <= 0:
            break
        held = max(0, column[row])
        first.append((row, min(upto, held + fit)))
        fit -= upto - held
    return first
