"""How many tokens a block of a trace has: found from lengths and ids, and held against each line.

A trace lists either every block, the partial last one included, or full blocks only. One block size
and one of these two must fit every request.
"""

from __future__ import annotations

import numpy as np

from holdfast.sim.formats.rows import Rows
from holdfast.sim.trace import Bools, Longs

CANDIDATES = tuple(2**i for i in range(3, 13))
"""The sizes that are tried: powers of two, from 8 to 4,096 tokens."""
MOST = 0.5
"""The share of requests that a size must fit for the others to be called wrong."""
SLACK = 0.1
"""Lengths may be estimates: by how much the number of ids may be off a size that the user gives."""


def found(rows: Rows) -> int:
    """The size that fits all requests, the smallest of several; an error names a misfit.

    Lengths may be estimates that were rounded up; a size that fits without that is preferred.
    """
    counts, tokens = _lengths(rows)
    rounded = np.maximum(tokens - 1, 0)
    fits = {size: _fit(counts, tokens, size) for size in CANDIDATES}
    loose = {size: fits[size] | _fit(counts, rounded, size) for size in CANDIDATES}
    best: int = max(CANDIDATES, key=lambda size: (_share(loose[size]), _share(fits[size]), -size))
    if _share(loose[best]) < MOST:
        raise rows.source.fault(
            rows.lines[0],
            f"{counts[0]} ids for {tokens[0]} tokens: no power of two from {CANDIDATES[0]} to "
            f"{CANDIDATES[-1]:,} tokens a block fits most lines; say the block size with "
            "--block-tokens",
        )
    _refuse_misfit(rows, loose[best], best)
    return best


def held(rows: Rows, size: int) -> int:
    """Hold every request against this size, with slack for estimated lengths; return it."""
    counts, tokens = _lengths(rows)
    blocks = tokens / size
    _refuse_misfit(rows, np.abs(counts - blocks) <= 1 + SLACK * blocks, size)
    return size


def _lengths(rows: Rows) -> tuple[Longs, Longs]:
    rows.refuse_none()
    return np.array(rows.counts, np.int64), np.array(rows.input_tokens, np.int64)


def _fit(counts: Longs, tokens: Longs, size: int) -> Bools:
    """Which requests fit this size, under the better of the two ways to list blocks."""
    partial: Bools = counts == -(-tokens // size)
    full: Bools = counts == tokens // size
    return partial if _share(partial) >= _share(full) else full


def _share(fits: Bools) -> float:
    return float(np.mean(fits))


def _refuse_misfit(rows: Rows, fits: Bools, size: int) -> None:
    if not fits.all():
        at = int(np.argmin(fits))
        tokens, count = rows.input_tokens[at], rows.counts[at]
        raise rows.source.fault(
            rows.lines[at],
            f"{count} ids for {tokens} tokens, but about {tokens / size:.1f} blocks of {size} "
            "tokens: ids are missing or too many, or the file mixes block sizes; correct or "
            "remove the line, or say the block size with --block-tokens",
        )
