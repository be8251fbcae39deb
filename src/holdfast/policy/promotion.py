"""Promotion: which lower tiers are offered a block that is promoted to host memory.

Pure. Tiers are numbered from the fastest; *volatile* tiers lose their contents with the process.
The store and the simulator take the same answer.
"""

from __future__ import annotations

from collections.abc import Container


def promotion_targets(source: int, lower: range, volatile: Container[int]) -> tuple[int, ...]:
    """Return the tiers of `lower` that are offered a block read from tier `source`.

    They are offered it only if they lack it. The volatile tiers above `source` take what is used.
    A block that a volatile tier had is offered to every tier, because a persistent tier may have
    dropped it, or may admit it now.
    """
    if source in volatile:
        return tuple(tier for tier in lower if tier != source)
    return tuple(tier for tier in lower if tier in volatile and tier < source)
