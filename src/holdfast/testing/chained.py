"""Test blocks of one chain, with their segments, for reads and writes of a shared tier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.codec.codec import Codec
from holdfast.errors import Outcome
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.testing.payloads import (
    encoded_record,
    fill_record,
    header_of,
    is_right,
    is_right_encoded,
    key_of,
    namespace_of,
)
from holdfast.tiers.base import Place, SharedTier, TierGet, TierPut, segment_place

_SEEDS = itertools.count()


class ChainedBlocks:
    """Test blocks of one chain, by number, with methods that write, read and check them.

    No two objects have a block in common, so that tests may share the remote side of a tier. With a
    `codec`, their records are encoded, and most are shorter than a slot.
    """

    def __init__(
        self,
        raw_bytes: int,
        seed: int | None = None,
        namespace_seed: int = 0,
        codec: Codec | None = None,
    ) -> None:
        self._codec = codec
        self._seed = next(_SEEDS) if seed is None else seed
        self.namespace = namespace_of(raw_bytes, namespace_seed)

    def twin(self) -> ChainedBlocks:
        """Return blocks with the same keys in another namespace."""
        return ChainedBlocks(self.namespace.raw_bytes, self._seed, 1, self._codec)

    def key(self, number: int) -> bytes:
        return key_of(number, self._seed)

    def keys(self, count: int) -> list[bytes]:
        """Return the first `count` keys of the chain."""
        return [self.key(number) for number in range(count)]

    def segment(self, number: int) -> bytes:
        return self.key(number - number % SEGMENT_BLOCKS)[:SEGMENT_BYTES]

    def place(self, number: int) -> Place:
        return segment_place(self.segment(number))

    def puts(self, numbers: Sequence[int]) -> list[TierPut]:
        """Return write requests for blocks, each with memory of its own."""
        puts = []
        for number in numbers:
            parent = self.key(number - 1) if number else None
            header = header_of(self.namespace, self.key(number), parent, number)
            header = header._replace(segment=self.segment(number))
            if self._codec is None:
                record = aligned_buffer(self.namespace.slot_bytes)
                fill_record(record, header)
            else:
                record = encoded_record(header, self._codec)
            puts.append(TierPut(self.place(number), record))
        return puts

    def gets(self, numbers: Sequence[int]) -> list[TierGet]:
        """Return read requests for blocks, each with memory of its own."""
        size = self.namespace.slot_bytes
        return [
            TierGet(self.place(number), self.key(number), aligned_buffer(size), self.namespace)
            for number in numbers
        ]

    def is_right(self, record: memoryview, key: bytes) -> bool:
        """Return whether a record that was read is that of a key; see `payloads.is_right`."""
        check = is_right if self._codec is None else is_right_encoded
        return check(record, self.namespace, key)

    def save(self, tier: SharedTier, numbers: Sequence[int]) -> list[Outcome]:
        return tier.write(self.puts(numbers))

    def load(self, tier: SharedTier, numbers: Sequence[int]) -> list[Outcome]:
        """Read blocks; return the outcomes. Raises AssertionError if one is OK with wrong bytes."""
        gets = self.gets(numbers)
        outcomes = tier.read(gets)
        self.check(gets, outcomes)
        return outcomes

    def check(self, gets: Sequence[TierGet], outcomes: Sequence[Outcome]) -> set[Outcome]:
        """Assert that blocks with outcome OK have the right bytes; return the set of outcomes."""
        for get, outcome in zip(gets, outcomes, strict=True):
            assert outcome is not Outcome.OK or self.is_right(get.into, get.key)
        return set(outcomes)
