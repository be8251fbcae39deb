"""Simulated tiers behind one index: which blocks each tier holds, and eviction.

The index, the policies and the rules of movement are those of the store (`index.Residency`,
`policy`), without the bytes. A row is a run of blocks (`sim.runs`); its place on a tier is the
number of its leading blocks held there. Each worker has a memory of its own tiers, and one more
memory holds the shared tiers. A row belongs to its run until the simulation ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.index.residency import NOT_HERE, Residency
from holdfast.policy.admit import USES_MAX, Admission, AdmissionCandidate
from holdfast.policy.base import EvictionPolicy
from holdfast.policy.movement import REUSED
from holdfast.sim.link import Writer
from holdfast.sim.movement import SimulatedEntry, SimulatedMovement

_MARKS = [bytes([tier]) for tier in range(256)]


class SimulatedRules(NamedTuple):
    """Eviction order and admission of one tier; `admission` None admits every block.

    A tier that evicts by itself also evicts blocks in use, and only its own reads are uses.
    """

    eviction: EvictionPolicy
    admission: Admission | None = None
    evicts_by_itself: bool = False


class SimulatedTier:
    """One simulated tier: `capacity` in blocks, its eviction and admission, and counters.

    `writer` limits everything that is written to it. `mover` also limits what it gets of the blocks
    that other tiers below memory evict.
    """

    def __init__(
        self,
        capacity: int,
        entry: SimulatedEntry,
        rules: SimulatedRules,
        writer: Writer,
        mover: Writer | None = None,
    ) -> None:
        self.capacity = capacity
        self.entry = entry
        self.eviction = rules.eviction
        self.evicts_by_itself = rules.evicts_by_itself
        self.admission = rules.admission
        self.writer = writer
        self.mover = mover
        self.held = 0
        self.peak = 0
        self.written = 0
        self.demoted = 0
        """Blocks written because a faster tier evicted them."""
        self.refused = 0
        """Blocks not written because too many writes were queued."""
        self.declined = 0
        """Blocks that the admission rule rejected."""
        self.never_full = False
        """Whether all blocks of the trace fit, so that no eviction order is needed."""


class HeldRuns(NamedTuple):
    """The leading blocks of a chain that a memory holds: rows, and the tier of each block.

    The first `whole` rows are held completely; `part` leading blocks of the next row are held.
    """

    rows: list[int]
    tiers: bytes
    whole: int
    part: int = 0


class SimulatedMemory:
    """Tiers of one owner, fastest first. `below` receives blocks that the last tier evicts."""

    def __init__(
        self,
        namespace: Namespace,
        tier_states: Sequence[SimulatedTier],
        below: SimulatedMemory | None = None,
    ) -> None:
        self.index = Residency(max(1, len(tier_states)), list)
        self.tier_states = tier_states
        self._namespace = namespace
        self._block_bytes = namespace.slot_bytes
        self._below = below
        ladder = [*tier_states, *(below.tier_states if below else ())]
        self._movement = SimulatedMovement([tier_state.entry for tier_state in ladder])
        self._saving: frozenset[int] = frozenset()
        self._parents: list[int] = []
        self._lengths: list[int] = []
        self._uses: list[int] = []
        self._durable = set[int]()
        self._rules = [
            (n, tier_state.admission)
            for n, tier_state in enumerate(tier_states)
            if tier_state.admission
        ]
        self._counts_uses = bool(self._rules) or self._movement.counts_uses

    def cover(self, keys: Sequence[bytes]) -> HeldRuns:
        """Return which leading blocks of this chain of runs are held, and on which tiers."""
        _, rows, fastest = self.index.cover(self._namespace, keys)
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
                    return HeldRuns(rows[: whole + 1], b"".join(tiers), whole, held)
        return HeldRuns(rows, b"".join(tiers), len(rows))

    def pin(self, rows: Iterable[int]) -> None:
        """Protect rows from eviction until `unpin`."""
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
        """Return the rows of a chain of runs from run `at` on, creating missing rows.

        `known` are the first of these rows. The runs before `at` must have rows.
        """
        rows = [*known, *self.index.find_all(self._namespace, keys[at + len(known) :])]
        if rows and rows[-1] < 0:  # a row needs its parent: after a missing row all are missing
            first = rows.index(NOT_HERE)
            del rows[first:]
            first += at
            parent_run = self.index.find(self._namespace, keys[first - 1]) if first else NOT_HERE
            rows += self._create(keys[first:], parent_run, first, lengths[first:])
        return rows

    def create_rows(
        self, keys: Sequence[bytes], parent_runs: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Create a row for every run of a trace, in order, in an empty memory.

        `parent_runs[i]` is the number of the parent run, less than `i`; -1 at the head of a chain.
        """
        parents, depths = [], array("I")
        for parent_run in parent_runs:
            parents.append(keys[parent_run] if parent_run >= 0 else self._namespace.fingerprint)
            depths.append(depths[parent_run] + 1 if parent_run >= 0 else 0)
        self.index.extend(self._namespace, keys, parents, depths)
        self._parents += parent_runs
        self._lengths += lengths
        self._uses += [0] * len(keys)

    def save(
        self,
        now_s: float,
        rows: Sequence[int],
        sources: Sequence[int],
        *,
        is_durable: bool = False,
    ) -> None:
        """Save runs that the engine has, the last ones of a chain.

        Run `i` came from tier `sources[i]`; runs after those were computed. This counts as a use on
        every tier that holds them, and writes them to the tiers that admit them. `is_durable`: they
        are written to every tier below memory, whatever its rule says, and count as reused.
        """
        lengths, movement, uses = self._lengths, self._movement, self._uses
        chain = [(row, lengths[row]) for row in rows]
        computed = chain[len(sources) :]
        self._saving = frozenset(rows)
        if self._counts_uses:
            for row in rows[len(sources) :]:
                if uses[row] and self._is_gone(row):
                    uses[row] = 0
            for row in rows:
                if uses[row] < USES_MAX:
                    uses[row] += 1
            if is_durable:
                self._durable.update(rows)
            if self._durable:
                for row in self._durable.intersection(rows):
                    uses[row] = max(uses[row], REUSED)
        if self._rules:
            for row in rows:
                block = self._candidate(row, lengths[row])
                found = self.index.fastest(row)
                for number, rule in self._rules:
                    rule.used(block, now_s, at_hand=NOT_HERE < found < number)
        for number, tier_state in enumerate(self.tier_states):
            if not tier_state.never_full:
                used = rows
                if tier_state.evicts_by_itself:
                    used = [row for row, source in zip(rows, sources) if source == number]  # noqa: B905  # sources may be fewer
                tier_state.eviction.touch(used, now_s)
            wanted = computed if movement.gets_saves[number] else []
            if sources and (reused := movement.reused_from[number]):
                every, fetched = movement.promoted_from[number], zip(chain, sources)  # noqa: B905  # sources may be fewer
                wanted = [
                    each
                    for each, source in fetched
                    if source in every or (source in reused and uses[each[0]] >= REUSED)
                ] + wanted
            if is_durable and movement.is_below_memory(number):
                wanted = chain
            if wanted:
                self._put(now_s, number, wanted, is_durable=is_durable)
        self._saving = frozenset()

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Tell every tier when this chain is needed again."""
        for tier_state in self.tier_states:
            if not tier_state.never_full:
                tier_state.eviction.expect(rows, at_s)

    def promote(self, now_s: float, number: int, arrived: Sequence[tuple[int, int]]) -> None:
        """Put (row, number of blocks) of a chain on tier `number`, without counting a use."""
        column = self.index.places[number]
        self._put_pinned(now_s, number, [each for each in arrived if column[each[0]] < each[1]])

    def receive(
        self,
        now_s: float,
        number: int,
        upper: SimulatedMemory,
        evicted: Sequence[tuple[int, int]],
        *,
        is_move: bool,
    ) -> list[tuple[int, int]]:
        """Write (row, number of blocks) that a tier of `upper` evicted to tier `number`.

        Returns what its admission rule rejects. `is_move`: they come from below host memory.
        """
        mine: list[tuple[int, int]] = []
        for row, blocks in evicted:
            # Find this memory's row; create it and its missing ancestors.
            ancestor, found = row, NOT_HERE
            unknown: list[int] = []
            while ancestor >= 0 and found < 0:
                found = self.index.find(self._namespace, upper._key(ancestor))
                if found < 0:
                    unknown.append(ancestor)
                    ancestor = upper._parents[ancestor]
            if unknown:
                new = unknown[::-1]
                keys = [upper._key(each) for each in new]
                lengths = [upper._lengths[each] for each in new]
                found = self._create(keys, found, upper.index.depths[new[0]], lengths)[-1]
            mine.append((found, blocks))
        rejected = set(self._put_pinned(now_s, number, mine, is_move=is_move))
        return [each for each, here in zip(evicted, mine, strict=True) if here in rejected]

    def holds(self, key: bytes, blocks: int) -> bool:
        """Return whether any tier holds the first `blocks` blocks of a run."""
        row = self.index.find(self._namespace, key)
        return row >= 0 and any(column[row] >= blocks for column in self.index.places)

    def _create(
        self, keys: Sequence[bytes], parent_run: int, depth: int, lengths: Sequence[int]
    ) -> list[int]:
        """Create rows for runs, the first at `depth` below the row `parent_run` (-1: none)."""
        parent = self._namespace.fingerprint if parent_run < 0 else self._key(parent_run)
        depths = range(depth, depth + len(keys))
        rows = self.index.extend(self._namespace, keys, [parent, *keys[:-1]], depths)
        self._parents += [parent_run, *rows[:-1]]
        self._lengths += lengths
        self._uses += [0] * len(rows)
        return rows

    def _put(
        self,
        now_s: float,
        number: int,
        wanted: Sequence[tuple[int, int]],
        *,
        is_move: bool = False,
        is_durable: bool = False,
    ) -> list[tuple[int, int]]:
        """Put pinned (row, number of blocks), parents first, on a tier, as far as they fit.

        Returns what its admission rule rejects; it is not asked about durable blocks that are
        saved. `is_move`: a tier below host memory evicted them.
        """
        tier_state, column = self.tier_states[number], self.index.places[number]
        rejected: list[tuple[int, int]] = []
        if tier_state.admission and not is_durable:
            admitted = []
            for row, upto in wanted:
                blocks = upto - max(0, column[row])
                if blocks <= 0:
                    continue
                if tier_state.admission.admit(self._candidate(row, blocks), now_s):
                    admitted.append((row, upto))
                else:
                    tier_state.declined += blocks
                    rejected.append((row, upto))
            wanted = admitted
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
        fit, size, writer = needed, self._block_bytes, tier_state.writer
        mover = tier_state.mover if is_move else None
        free_bytes = writer.free_bytes(now_s)
        if mover:
            free_bytes = min(free_bytes, mover.free_bytes(now_s))
        if needed * size > free_bytes:
            fit = int(free_bytes / size)
            tier_state.refused += needed - fit
        if fit > tier_state.capacity - tier_state.held:
            fit = self._evict_for(now_s, number, fit, missing)
        if fit < needed:
            # Put the leading rows that fit, the last one perhaps in part.
            leading: list[tuple[int, int]] = []
            left = fit
            for row, upto in missing:
                if left <= 0:
                    break
                held = max(0, column[row])
                leading.append((row, min(upto, held + left)))
                left -= upto - held
            missing = leading
            new = [row for row, _ in missing if column[row] < 0]
        for row, upto in missing:
            column[row] = upto
        if new and not tier_state.never_full:
            parent_runs = map(self._parents.__getitem__, new)
            names = map(self.index.keys.__getitem__, new)
            tier_state.eviction.insert(new, list(parent_runs), list(names), now_s)
        writer.write(now_s, fit * size)
        if mover:
            mover.write(now_s, fit * size)
        tier_state.written += fit
        tier_state.demoted += fit if is_move else 0
        held = tier_state.held = tier_state.held + fit
        tier_state.peak = held if held > tier_state.peak else tier_state.peak  # noqa: FURB136  # a call takes longer
        return rejected

    def _candidate(self, row: int, blocks: int) -> AdmissionCandidate:
        nbytes, uses = blocks * self._block_bytes, self._uses[row]
        return AdmissionCandidate(self._key(row), (0, uses), nbytes, uses=uses)

    def _evict_for(
        self, now_s: float, number: int, blocks: int, incoming: Sequence[tuple[int, int]]
    ) -> int:
        """Evict until `blocks` blocks of the `incoming` rows fit; return how many fit.

        `blocks` exceeds the free capacity. Pinned rows and rows being saved are not evicted; from
        tiers that evict by themselves, all rows but the incoming ones are.
        """
        tier_state, column = self.tier_states[number], self.index.places[number]
        leases, by_itself = self.index.leases, tier_state.evicts_by_itself
        kept: Container[int] = {row for row, _ in incoming} if by_itself else self._saving
        remove, uses = tier_state.eviction.remove, self._uses
        least_uses = self._movement.demoted_uses[number]
        lower = self.index.places[number + 1 :]
        admission, short = tier_state.admission, blocks - (tier_state.capacity - tier_state.held)
        left, demoted = short, list[tuple[int, int]]()
        for row in tier_state.eviction.victims(now_s):
            if row in kept or (not by_itself and leases[row]):
                continue
            held = column[row]
            demote = (
                uses[row] >= least_uses
                and all(places[row] < held for places in lower)
                and not (self._below and self._below.holds(self._key(row), held))
            )
            if held > left and not (demote or by_itself):  # evict the tail; the rest stays in order
                column[row] = held - left
                left = 0
                break
            remove(row)
            column[row] = NOT_HERE
            if admission:
                admission.gave_up(self._key(row), now_s)
            left -= held
            if demote:
                demoted.append((row, held))
            if left <= 0:
                break
        tier_state.held -= short - left
        if demoted:
            self._demote(now_s, number, demoted)
        return blocks - left if left > 0 else blocks

    def _demote(self, now_s: float, source: int, evicted: list[tuple[int, int]]) -> None:
        """Offer (row, number of blocks) that a tier evicts to slower tiers, parents first."""
        movement, own, depths = self._movement, len(self.tier_states), self.index.depths
        is_move = movement.is_below_memory(source)
        if is_move:
            evicted.sort(key=lambda each: depths[each[0]])
        else:
            evicted.reverse()
        for target in movement.demotion_targets[source]:
            wanted = [
                each
                for each in evicted
                if movement.takes_evicted(target, source, self._uses[each[0]])
            ]
            if not wanted:
                continue
            if target < own:
                rejected = self._put_pinned(now_s, target, wanted, is_move=is_move)
            elif self._below:
                rejected = self._below.receive(now_s, target - own, self, wanted, is_move=is_move)
            if is_move:  # the first tier that takes a block is the only one
                taken = set(wanted).difference(rejected)
                evicted = [each for each in evicted if each not in taken]

    def _is_gone(self, row: int) -> bool:
        """Return whether no tier holds a row, so that a store has forgotten its uses."""
        below = self._below
        return self.index.fastest(row) < 0 and not (below and below.holds(self._key(row), 1))

    def _put_pinned(
        self, now_s: float, number: int, wanted: Sequence[tuple[int, int]], *, is_move: bool = False
    ) -> list[tuple[int, int]]:
        rows = [row for row, _ in wanted]
        self.pin(rows)
        rejected = self._put(now_s, number, wanted, is_move=is_move)
        self.unpin(rows)
        return rejected

    def _key(self, row: int) -> bytes:
        return self.index.keys[row] or b""
