"""A session: one fingerprint in one domain of a store, in terms of tokens and blocks.

The few lines between a program that has tokens and KV state and the streets of the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.key import Chain, Tokens
from holdfast.blocks.world import World
from holdfast.codec.pack import payload
from holdfast.errors import BlockError, Outcome
from holdfast.policy.retention import Retention
from holdfast.store import cover, fetch, hints, save
from holdfast.store.core import Core

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Blocks: TypeAlias = "npt.NDArray[np.generic]"
"""Block payloads, one a row: any dtype and shape whose rows have `layout.payload_bytes` bytes."""

DEADLINE_S = 5.0


class Landed(NamedTuple):
    """What a fetch brought: leading tokens and blocks, where from, and why not more."""

    tokens: int
    blocks: int
    sources: dict[str, int]
    outcome: Outcome
    reason: str


class Session:
    """Saves and fetches whole blocks of one world. Tokens that do not fill a block are ignored."""

    def __init__(self, store: Core, fingerprint: Fingerprint, domain: str) -> None:
        self._store = store
        self._domain_key, domain_id = store.domain(domain)
        layout = fingerprint.layout
        self.world = World(
            fingerprint.digest(), domain_id, layout.payload_bytes, layout.block_tokens
        )

    def chain(self, tokens: Tokens) -> Chain:
        """Name the full blocks of a context."""
        chain = Chain(self._domain_key, self.world.fingerprint, self.world.block_tokens)
        chain.extend(tokens)
        return chain

    def follow(self, tokens: Tokens, session: str) -> None:
        """Note that this context is a session's, so that `closed` and `returns` can name it."""
        hints.follow(self._store, self.world, session, self.chain(tokens).keys)

    def closed(self, session: str) -> int:
        """Say that a session is over; return how many of its blocks are here."""
        return hints.closed(self._store, self.world.domain, session)

    def returns(self, session: str, in_s: float) -> int:
        """Say that a session comes back in `in_s` seconds; return how many blocks are here."""
        return hints.returns(self._store, self.world.domain, session, in_s)

    def prestage(self, tokens: Tokens, in_s: float = 0.0) -> int:
        """Have what is held of a context in memory in `in_s` seconds; return its tokens."""
        blocks = hints.prestage(self._store, self.world, self.chain(tokens).keys, in_s)
        return blocks * self.world.block_tokens

    def pin(self, tokens: Tokens, ttl_s: float) -> int:
        """Keep what is held of a context in memory for `ttl_s`; return its tokens."""
        blocks = hints.pin(self._store, self.world, self.chain(tokens).keys, ttl_s)
        return blocks * self.world.block_tokens

    def cover(self, tokens: Tokens) -> int:
        """Return how many leading tokens are held, on whatever tier."""
        covered = cover.cover(self._store.states, self.world, self.chain(tokens).keys)
        return covered.blocks * self.world.block_tokens

    def save(self, tokens: Tokens, blocks: Blocks, retention: Retention = Retention.SESSION) -> int:
        """Save the KV state of a context, one row per full block; return how many blocks are new.

        Raise BlockError if rows or their bytes do not fit the tokens and the layout. What finds no
        room is left out: a cache may.
        """
        chain = self.chain(tokens)
        rows = self._rows(blocks, len(chain))
        reserved = save.reserve(self._store, self.world, chain.keys, chain.fingerprint, 0, b"")
        try:
            arena = self._store.arena(self.world.domain).view
            for place, row in zip(reserved.places, rows, strict=True):
                if place >= 0:
                    payload(arena[place:], self.world.payload_bytes)[:] = row
        except BaseException:
            save.abort(self._store, reserved.ticket)
            raise
        return save.commit(self._store, reserved.ticket, retention)

    def fetch(self, tokens: Tokens, into: Blocks, deadline_s: float = DEADLINE_S) -> Landed:
        """Copy the longest held prefix into the leading rows of `into`; the rest stays as it is.

        `into` has one row per full block of `tokens`, contiguous and writable.
        """
        hints.check_within("fetch: deadline_s", deadline_s, hints.AHEAD_S_MAX)
        chain = self.chain(tokens)
        rows = self._rows(into, len(chain))
        fetched = fetch.fetch(self._store, self.world, chain.keys, deadline_s)
        arena = self._store.arena(self.world.domain).view
        try:
            for place, row in zip(fetched.places, rows, strict=False):
                row[:] = payload(arena[place:], self.world.payload_bytes)
        finally:
            whole = self._store.release(fetched.lease)
        blocks = len(fetched.places)
        if not whole:
            return Landed(0, 0, {}, Outcome.LATE, "the lease ended before the copy did")
        tokens_landed = blocks * self.world.block_tokens
        return Landed(tokens_landed, blocks, fetched.sources, fetched.outcome, fetched.reason)

    def _rows(self, blocks: Blocks, count: int) -> list[memoryview]:
        if len(blocks) != count:
            raise BlockError(f"{len(blocks)} blocks given, but the tokens fill {count}")
        if not blocks.flags.c_contiguous:
            raise BlockError("blocks must be contiguous; pass numpy.ascontiguousarray(blocks)")
        size = self.world.payload_bytes
        if count and blocks.nbytes != count * size:
            raise BlockError(f"a block has {blocks.nbytes // count} bytes, the layout says {size}")
        if not count:
            return []
        flat = blocks.reshape(-1).view("u1").data
        return [flat[i * size : (i + 1) * size] for i in range(count)]
