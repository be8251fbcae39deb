"""Which prefixes of a context SGLang can restore, from the pages of each pool that are held.

A pool holds one kind of state of a page: the KV of full attention, of sliding windows, recurrent
states and others. Its hit policy says which of its pages a prefix needs. Counts are in pages. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ALL_PAGES = "all_pages"
"""A prefix needs every one of its pages of the pool."""

TRAILING_PAGES = "trailing_pages"
"""A prefix needs its last pages of the pool: those of a window, or the state at its end."""

BLOCK_GROUPS = "block_groups"
"""A second form of the same pages, which limits no prefix. Version 0.5.23 does not use it yet."""


class PoolHits(NamedTuple):
    """The held pages of one pool, and its hit policy.

    `held[i]`: whether page `i` of the context is held. `trailing`: pages that a prefix needs at its
    end, for TRAILING_PAGES.
    """

    policy: str
    held: Sequence[bool]
    trailing: int = 1


class RestorablePrefixes(NamedTuple):
    """The answer to SGLang's question about a context.

    `pages`: the longest prefix that every pool can restore. `by_pool`: the longest prefix of each
    pool alone, for those with any. `lengths`: all prefixes that every pool can restore, ascending.
    """

    pages: int
    by_pool: dict[str, int]
    lengths: list[int]


def leading(held: Sequence[bool]) -> int:
    """Return how many pages are held from the start without a gap."""
    return next((i for i, one in enumerate(held) if not one), len(held))


def restorable(kv_name: str, kv_pages: int, pools: Mapping[str, PoolHits]) -> RestorablePrefixes:
    """Return the prefixes that can be restored if the KV pool holds the first `kv_pages`.

    `pools`: the other pools that the context needs. A pool with an unknown policy restores nothing.
    """
    lengths = list(range(1, kv_pages + 1))
    by_pool = {kv_name: kv_pages} if kv_pages else {}
    for name, pool in pools.items():
        if pool.policy == BLOCK_GROUPS:
            continue
        own = _own_lengths(pool, kv_pages)
        if own:
            by_pool[name] = max(own)
        lengths = [length for length in lengths if length in own]
    return RestorablePrefixes(lengths[-1] if lengths else 0, by_pool, lengths)


def _own_lengths(pool: PoolHits, kv_pages: int) -> set[int]:
    """Return the prefixes that one pool can restore."""
    held = pool.held[:kv_pages]
    if pool.policy == ALL_PAGES:
        return set(range(1, leading(held) + 1))
    found: set[int] = set()
    if pool.policy == TRAILING_PAGES:
        run = 0
        for length, one in enumerate(held, start=1):
            run = run + 1 if one else 0
            if run >= min(pool.trailing, length):
                found.add(length)
    return found
