"""Lookups of chains whose segments are striped over members: which leading blocks are held.

    1. each block: the owner of its lane, one question per member
    2. blocks that are missing: all members that may hold blocks of their segment, and whether a
       parity record protects them

A block whose member is lost counts as held if a parity record exists and no other block of its row
is missing. Blocks of the row beyond the end of this chain are not known; if one of these is missing
too, the read is a miss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.membership.members import Member
from holdfast.tiers.base import HeldAnswer, chain_segments
from holdfast.tiers.pool.chain_links import ChainLinks
from holdfast.tiers.pool.lookup import SegmentLookup
from holdfast.tiers.pool.parity import parity_key, parity_namespace
from holdfast.tiers.pool.pool_calls import PoolCalls
from holdfast.tiers.pool.segment_batch import SegmentBatch, segment_of

SURE_MISSES = 64
"""If none of this number of blocks is on its lane, the chain is not in the pool: the lookup ends.

After a change of the number of members at least every ninth block is where it was.
"""


class StripedLookup:
    """Answers which blocks of a chain the members hold."""

    def __init__(
        self, lookup: SegmentLookup, links: ChainLinks, calls: PoolCalls, segment_blocks: int
    ) -> None:
        self._lookup = lookup
        self._links = links
        self._calls = calls
        self._segment_blocks = segment_blocks

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, until: float
    ) -> HeldAnswer:
        """Ask until a `time.monotonic()`; OK if the members asked about the first gap answered."""
        begin = max(0, start - self._lookup.stripe)
        self._links.note(keys[begin:], begin)
        question = _ChainQuestion(namespace, keys, start, until)
        self._ask_lanes(question)
        first = question.found.find(0, start)
        last = question.found.rfind(1)
        nothing = last < start and len(keys) - start >= SURE_MISSES
        further, end = self._lookup.stripe, first
        while end <= first < len(keys) and not nothing:
            # Blocks after the last one that was found may be there, each on another lane.
            end = min(len(keys), max(last + 1, first) + further)
            self._search(question, first, end)
            first, further = question.found.find(0, start), 2 * further
        if first < 0:
            return HeldAnswer(len(keys) - start, Outcome.OK)
        return HeldAnswer(first - start, question.outcome(first))

    def _ask_lanes(self, question: _ChainQuestion) -> None:
        """Ask the owner of each block's lane."""
        size, lanes = self._segment_blocks, self._lookup.lanes()
        of_member = defaultdict[Member, list[int]](list)
        for place, blocks in chain_segments(question.keys, question.start, size):
            segment = segment_of(place)
            routes = [self._lookup.route(segment, block=lane).read[:1] for lane in range(lanes)]
            for index in blocks:
                route = routes[index % size % lanes]
                for member in route:
                    of_member[member].append(index)
                if not route:
                    question.note(index, Outcome.GONE)
        self._calls.each(
            list(of_member.items()), lambda one: self._ask_member(question, one[0], one[1])
        )

    def _ask_member(self, question: _ChainQuestion, member: Member, indices: Sequence[int]) -> None:
        part = SegmentBatch(b"", [], question.until)
        keys = [question.keys[index] for index in indices]
        answer = self._calls.exist(member, part, question.namespace, keys)
        for index, there in zip(indices, answer.held, strict=True):
            question.found[index] |= there
            question.note(index, answer.outcome)

    def _search(self, question: _ChainQuestion, first: int, end: int) -> None:
        """Ask all members that may hold the missing ones of some blocks, or their parity."""
        size, begin = self._segment_blocks, max(0, first - self._lookup.stripe)
        hidden = parity_namespace(question.namespace)
        asks: list[tuple[Member, Namespace, list[int]]] = []
        for place, blocks in chain_segments(question.keys, begin, size):
            wanted = [i for i in blocks if first <= i < end and not question.found[i]]
            starts = [i for i in blocks if i < end]
            if wanted:
                for member in self._lookup.holders(segment_of(place)):
                    asks.append((member, question.namespace, wanted))
                    asks.append((member, hidden, starts))
        rows = set[range]()

        def ask(one: tuple[Member, Namespace, list[int]]) -> None:
            member, namespace, indices = one
            if namespace is hidden:
                rows.update(self._rows_at(question, member, indices))
            else:
                self._ask_member(question, member, indices)

        self._calls.each(asks, ask)
        _count_protected(question, rows)

    def _rows_at(
        self, question: _ChainQuestion, member: Member, starts: Sequence[int]
    ) -> list[range]:
        """Return the rows that begin with one of some blocks and whose parity a member has."""
        shapes = [range(i, i + blocks) for i in starts for blocks in range(1, self._lookup.stripe)]
        keys = [parity_key(question.keys[row.start], len(row)) for row in shapes]
        part = SegmentBatch(b"", [], question.until)
        held = self._calls.exist(member, part, parity_namespace(question.namespace), keys).held
        return [row for row, there in zip(shapes, held, strict=True) if there]


def _count_protected(question: _ChainQuestion, rows: Collection[range]) -> None:
    """Count a missing block as held if it is the only missing one of a row with parity."""
    rebuilt = list[int]()
    for row in rows:
        missing = [i for i in row if i < len(question.keys) and not question.found[i]]
        rebuilt += missing if len(missing) == 1 else []
    for index in rebuilt:
        question.found[index] = 1


class _ChainQuestion:
    """A chain, and what is known of its blocks so far; several threads add to it."""

    def __init__(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, until: float
    ) -> None:
        self.namespace = namespace
        self.keys = keys
        self.start = start
        self.until = until
        self.found = bytearray(b"\1" * start + bytes(len(keys) - start))
        self._failed: dict[int, Outcome] = {}

    def note(self, index: int, outcome: Outcome) -> None:
        """Note how a question about a block ended."""
        if outcome is not Outcome.OK:
            self._failed[index] = Outcome.LATE if outcome is Outcome.UNSENT else outcome

    def outcome(self, index: int) -> Outcome:
        """Return OK if all members that were asked about a block have answered."""
        return self._failed.get(index, Outcome.OK)
