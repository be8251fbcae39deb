"""Test blocks of one chain, with their segments, on their way in and out of a shared tier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.testing.payloads import fill_record, header_of, is_right, key_of, world_of
from holdfast.tiers.base import Get, Place, Put, Shared, segment_place

_SEEDS = itertools.count()


class Chained:
    """Test blocks of one chain, by number, and their way in and out of a shared tier.

    No two of these have a block in common, so that tests may share a far side.
    """

    def __init__(self, payload_bytes: int) -> None:
        self._seed = next(_SEEDS)
        self.world = world_of(payload_bytes)

    def key(self, number: int) -> bytes:
        """Return the key of block `number`."""
        return key_of(number, self._seed)

    def keys(self, count: int) -> list[bytes]:
        """Return the first `count` keys of the chain."""
        return [self.key(number) for number in range(count)]

    def segment(self, number: int) -> bytes:
        """Return the segment of block `number`."""
        return self.key(number - number % SEGMENT_BLOCKS)[:SEGMENT_BYTES]

    def place(self, number: int) -> Place:
        """Return where block `number` belongs."""
        return segment_place(self.segment(number))

    def puts(self, numbers: Sequence[int]) -> list[Put]:
        """Return blocks on their way in, each in memory of its own."""
        puts = []
        for number in numbers:
            record = aligned_buffer(self.world.record_bytes)
            header = header_of(self.world, self.key(number), depth=number)
            fill_record(record, header._replace(segment=self.segment(number)))
            puts.append(Put(self.place(number), record))
        return puts

    def gets(self, numbers: Sequence[int]) -> list[Get]:
        """Return wishes for blocks, each with memory of its own."""
        size = self.world.record_bytes
        return [
            Get(self.place(number), self.key(number), aligned_buffer(size), self.world)
            for number in numbers
        ]

    def save(self, tier: Shared, numbers: Sequence[int]) -> list[Outcome]:
        """Write blocks."""
        return tier.write(self.puts(numbers))

    def load(self, tier: Shared, numbers: Sequence[int]) -> list[Outcome]:
        """Read blocks; raise AssertionError if one is OK and wrong."""
        gets = self.gets(numbers)
        outcomes = tier.read(gets)
        self.check(gets, outcomes)
        return outcomes

    def check(self, gets: Sequence[Get], outcomes: Sequence[Outcome]) -> set[Outcome]:
        """Assert that what is OK is right; return the outcomes seen."""
        for get, outcome in zip(gets, outcomes, strict=True):
            assert outcome is not Outcome.OK or is_right(get.into, self.world, get.key)
        return set(outcomes)
