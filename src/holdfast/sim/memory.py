"""Modelled tiers behind one index: what is held where, and what leaves to make room.

The index and the policies are those of the store (`index.Residency`, `policy`); only the bytes are
missing. A row is a run of blocks (`sim.runs`), its place on a tier the number of its leading blocks
that are held there. Each worker has a memory of its own tiers; the tiers that all workers share are
one more. A row stays with its run for as long as the simulation lasts.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.policy.admit import USES_MAX, Admission, Candidate
from holdfast.policy.base import Eviction
from holdfast.sim.link import Writer

_MARKS = [bytes([tier]) for tier in range(256)]


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
        self.roomy = False
        """Whether every block that there is has room, so that no order is needed."""


class Reach(NamedTuple):
    """The leading blocks of a chain that a memory holds: their rows, and a tier for each block.

    `whole` counts the rows that are held to their end; of one more, `part` blocks may be held.
    """

    rows: list[int]
    tiers: bytes
    whole: int
    part: int = 0


class Memory:
    """Tiers of one owner, fastest first. `below` is where blocks go that the last one evicts."""

    def __init__(self, world: World, shelves: Sequence[Shelf], below: Memory | None = None) -> None:
        self.index = Residency(max(1, len(shelves)), list)
        self.shelves = shelves
        self._world = world
        self._block_bytes = world.record_bytes
        self._below = below
        self._falling = self._falling_from()
        self._saving: frozenset[int] = frozenset()
        self._parents: list[int] = []
        self._lengths: list[int] = []
        self._uses: list[int] = []
        self._rules = [(n, shelf.admission) for n, shelf in enumerate(shelves) if shelf.admission]

    def cover(self, keys: Sequence[bytes]) -> Reach:
        """Return how far the runs of these keys are held."""
        _, rows, fastest = self.index.cover(self._world, keys)
        places, lengths = self.index.places, self._lengths
        tiers: list[bytes] = []
        for whole, row in enumerate(rows):
            tier = fastest[whole]
            length, held = lengths[row], places[tier][row]
            tiers.append(_MARKS[tier] * held)
            if held < length:
                for lower in range(tier + 1, len(places)):
                    more = places[lower][row] - held
                    if more > 0:
                        tiers.append(_MARKS[lower] * more)
                        held += more
                if held < length:
                    return Reach(rows[: whole + 1], b"".join(tiers), whole, held)
        return Reach(rows, b"".join(tiers), len(rows))

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
        self, keys: Sequence[bytes], lengths: Sequence[int], known: Sequence[int] = (), at: int = 0
    ) -> list[int]:
        """Return the rows of a chain of runs from run `at` on, made where they are new.

        `known` are the first of them. The runs in front of `at` have rows already.
        """
        rows = [*known, *self.index.find_all(keys[at + len(known) :])]
        if rows and rows[-1] < 0:  # a row is made behind its front only: no known one follows
            first = rows.index(NOT_HERE)
            del rows[first:]
            first += at
            front = self.index.find(keys[first - 1]) if first else NOT_HERE
            rows += self._make(keys[first:], front, first, lengths[first:])
        return rows

    def make_all(
        self, keys: Sequence[bytes], fronts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Make a row for every run of a trace, in order; nothing has been held yet.

        `fronts[i]`: the number of the run in front, a smaller one; -1 for the head of a chain.
        """
        parents, depths = [], array("I")
        for front in fronts:
            parents.append(keys[front] if front >= 0 else self._world.fingerprint)
            depths.append(depths[front] + 1 if front >= 0 else 0)
        self.index.extend(self._world, keys, parents, depths)
        self._parents += fronts
        self._lengths += lengths
        self._uses += [0] * len(keys)

    def save(self, now_s: float, rows: Sequence[int], sources: Sequence[int]) -> None:
        """Note that the engine has these runs, the last ones of a chain.

        Run `i` came from tier `sources[i]`, those behind them were computed. They are used now, on
        every tier that holds them, and enter those that take them.
        """
        lengths = self._lengths
        chain = [(row, lengths[row]) for row in rows]
        computed = chain[len(sources) :]
        self._saving = frozenset(rows)
        if self._rules:
            self._note_uses(now_s, rows)
        for number, shelf in enumerate(self.shelves):
            if not shelf.roomy:
                shelf.eviction.touch(rows, now_s)
            if shelf.entry is Entry.ON_EVICTION:
                continue
            wanted = computed
            if sources and shelf.entry is not Entry.BEHIND:  # it takes what comes from below too
                fetched = zip(chain, sources)  # noqa: B905
                wanted = [each for each, source in fetched if source > number] + computed
            if wanted:
                self._put(now_s, number, wanted)
        self._saving = frozenset()

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Tell every tier when this chain is needed again."""
        for shelf in self.shelves:
            if not shelf.roomy:
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
        if row >= 0:
            for column in self.index.places:
                if column[row] >= blocks:
                    return True
        return False

    def _falling_from(self) -> list[bool]:
        """Return for each tier whether what leaves it may go further down."""
        after = [*self.shelves[1:], *(self._below.shelves[:1] if self._below else ())]
        falling = [False] * len(self.shelves)
        for number, (shelf, lower) in enumerate(zip(self.shelves, after, strict=False)):
            falling[number] = shelf.entry is not Entry.ENGINE or lower.entry is Entry.ON_EVICTION
        return falling

    def _make(
        self, keys: Sequence[bytes], front: int, depth: int, lengths: Sequence[int]
    ) -> list[int]:
        """Return the rows of new runs, the first at `depth` behind row `front` (-1: none)."""
        parent = self._world.fingerprint if front < 0 else self._key(front)
        depths = range(depth, depth + len(keys))
        rows = self.index.extend(self._world, keys, [parent, *keys[:-1]], depths)
        self._parents += [front, *rows[:-1]]
        self._lengths += lengths
        self._uses += [0] * len(rows)
        return rows

    def _counterpart(self, upper: Memory, row: int) -> int:
        """Return my row for a row of `upper`, made with all in front of it where it is new."""
        unknown: list[int] = []
        mine = NOT_HERE
        while row >= 0 and mine < 0:
            mine = self.index.find(upper._key(row))
            if mine < 0:
                unknown.append(row)
                row = upper._parents[row]
        if not unknown:
            return mine
        new = unknown[::-1]
        keys, lengths = [upper._key(row) for row in new], [upper._lengths[row] for row in new]
        return self._make(keys, mine, upper.index.depths[new[0]], lengths)[-1]

    def _put(self, now_s: float, number: int, wanted: Sequence[tuple[int, int]]) -> None:
        """Hold pinned rows, parents first, up to so many blocks each, as far as there is room."""
        shelf, column = self.shelves[number], self.index.places[number]
        if shelf.admission:
            wanted = self._admitted(now_s, number, wanted)
        missing: list[tuple[int, int]] = []
        new: list[int] = []
        needed = 0
        for each in wanted:
            row, upto = each
            held = column[row]
            if held < upto:
                missing.append(each)
                if held < 0:
                    new.append(row)
                    needed += upto
                else:
                    needed += upto - held
        fit, size, writer = needed, self._block_bytes, shelf.writer
        if needed * size > (room := writer.room(now_s)):
            fit = int(room / size)
            shelf.refused += needed - fit
        if fit > shelf.capacity - shelf.held:
            fit = self._make_room(now_s, number, fit)
        if fit < needed:
            missing, new = _first(column, missing, fit)
        for row, upto in missing:
            column[row] = upto
        if new and not shelf.roomy:
            fronts = map(self._parents.__getitem__, new)
            names = map(self.index.keys.__getitem__, new)
            shelf.eviction.insert(new, list(fronts), list(names), now_s)
        writer.write(now_s, fit * size)
        shelf.written += fit
        held = shelf.held = shelf.held + fit
        shelf.peak = held if held > shelf.peak else shelf.peak  # noqa: FURB136  # a call takes longer

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
        """Return those that the tier does not hold and its rule of admission lets in."""
        shelf, column = self.shelves[number], self.index.places[number]
        admitted = []
        for row, upto in wanted:
            blocks = upto - max(0, column[row])
            block = self._candidate(row, blocks)
            if blocks <= 0:
                continue
            if shelf.admission is None or shelf.admission.admit(block, now_s):
                admitted.append((row, upto))
            else:
                shelf.declined += blocks
        return admitted

    def _candidate(self, row: int, blocks: int) -> Candidate:
        nbytes, uses = blocks * self._block_bytes, self._uses[row]
        return Candidate(self._key(row), (0, uses), nbytes, uses=uses)

    def _make_room(self, now_s: float, number: int, blocks: int) -> int:
        """Evict until `blocks`, more than there is room for, fit; return how many do.

        Pinned rows stay, and those that are being saved.
        """
        shelf, column, leases = self.shelves[number], self.index.places[number], self.index.leases
        remove, saving, falling = shelf.eviction.remove, self._saving, self._falling[number]
        admission, short = shelf.admission, blocks - (shelf.capacity - shelf.held)
        left, lost = short, []
        for row in shelf.eviction.victims(now_s):
            if leases[row] or row in saving:
                continue
            held = column[row]
            falls = falling and self._nobody_below_holds(number, row, held)
            if held > left and not falls:  # its tail goes, the rest keeps its place in the order
                column[row] = held - left
                left = 0
                break
            remove(row)
            column[row] = NOT_HERE
            if admission:
                admission.gave_up(self._key(row), now_s)
            left -= held
            if falls:
                lost.append((row, held))
            if left <= 0:
                break
        shelf.held -= short - left
        if lost:
            self._fall(now_s, number, lost[::-1])
        return blocks - left if left > 0 else blocks

    def _nobody_below_holds(self, number: int, row: int, blocks: int) -> bool:
        places = self.index.places
        for lower in range(number + 1, len(places)):
            if places[lower][row] >= blocks:
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
    column: Sequence[int], missing: Sequence[tuple[int, int]], fit: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return as many rows, the last one in part, as `fit` more blocks allow; and the new of them.

    New is what `column` holds nothing of.
    """
    first: list[tuple[int, int]] = []
    for row, upto in missing:
        if fit <= 0:
            break
        held = max(0, column[row])
        first.append((row, min(upto, held + fit)))
        fit -= upto - held
    return first, [row for row, _ in first if column[row] < 0]
