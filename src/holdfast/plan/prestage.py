"""Compute when to prestage a context that will be needed later; pure.

If it starts late, the request waits; if it starts early, the blocks occupy memory until then. On
public traces of coding agents, in more than 97 of 100 turns the client's pause is longer than
reading the whole context at 14 GB/s. So starting one read time ahead, with slack, is enough.
"""

from __future__ import annotations

SLACK = 2.0
"""Multiple of the expected fetch time to allow, because tiers are shared."""

MARGIN_S = 0.5
"""Time to allow for noticing that the start is due."""


def begin_in_s(needed_in_s: float, fetch_s: float) -> float:
    """Return the delay before a fetch that takes `fetch_s` should start; 0 if it is due."""
    return max(0.0, needed_in_s - SLACK * fetch_s - MARGIN_S)
