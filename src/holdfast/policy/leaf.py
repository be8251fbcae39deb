"""Leaf-first LRU: evict the least recently used block that has no children on this tier.

A block is useless without its whole prefix, so a block is evicted only after its children. This is
the order of SGLang's radix cache (Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs", 2024), and the baseline that every other policy must beat. Do not use it alone if
scans of contexts that never return flood the tier: an admission policy must keep those out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.policy.cost_aware import CostAware


class LeafLru(CostAware):
    """Exact leaf-first LRU: cost-aware eviction that ignores hints and worth."""

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Ignore hints: LRU uses past uses only."""

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """Ignore the worth of blocks."""
