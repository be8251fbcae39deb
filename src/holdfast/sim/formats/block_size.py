"""The block size of a trace: inferred from prompt lengths and ids, and checked for each line.

A trace lists either all blocks, with a partial last one, or full blocks only. The same block size
and the same of these two conventions must fit every request.
"""

from __future__ import annotations

import numpy as np

from holdfast.sim.formats.rows import Rows
from holdfast.sim.trace import Bools, Longs

CANDIDATES = tuple(2**i for i in range(3, 13))
"""Block sizes that are tried: powers of two from 8 to 4,096 tokens."""

FIT_SHARE_MIN = 0.5
"""Share of requests that a block size must fit; the other requests are then reported as errors."""

SLACK = 0.1
"""Tolerance for the number of ids at a given block size, because lengths may be estimates."""


def find(rows: Rows, given: int | None) -> int:
    """Return the block size: `given` if not None, else the smallest that fits the requests.

    Lengths may be estimates that were rounded up; a size that fits without rounding is preferred.
    Raises TraceError for the first request that does not fit.
    """
    if given:
        return check(rows, given)
    counts, tokens = _lengths(rows)
    rounded = np.maximum(tokens - 1, 0)
    exact = {size: _fit(counts, tokens, size) for size in CANDIDATES}
    loose = {size: exact[size] | _fit(counts, rounded, size) for size in CANDIDATES}
    best: int = max(CANDIDATES, key=lambda size: (_share(loose[size]), _share(exact[size]), -size))
    if _share(loose[best]) < FIT_SHARE_MIN:
        raise rows.source.error(
            rows.lines[0],
            f"{counts[0]} ids for {tokens[0]} tokens: no power of two from {CANDIDATES[0]} to "
            f"{CANDIDATES[-1]:,} tokens per block fits most lines; give the block size with "
            "--block-tokens",
        )
    _check_fits(rows, loose[best], best)
    return best


def check(rows: Rows, size: int) -> int:
    """Return `size`. Raises TraceError if the ids of a request do not fit it within `SLACK`."""
    counts, tokens = _lengths(rows)
    blocks = tokens / size
    _check_fits(rows, np.abs(counts - blocks) <= 1 + SLACK * blocks, size)
    return size


def _lengths(rows: Rows) -> tuple[Longs, Longs]:
    rows.check_not_empty()
    return np.array(rows.counts, np.int64), np.array(rows.input_tokens, np.int64)


def _fit(counts: Longs, tokens: Longs, size: int) -> Bools:
    """Return which requests fit a size, by the convention that fits more of them."""
    partial: Bools = counts == -(-tokens // size)
    full: Bools = counts == tokens // size
    return partial if _share(partial) >= _share(full) else full


def _share(fits: Bools) -> float:
    return float(np.mean(fits))


def _check_fits(rows: Rows, fits: Bools, size: int) -> None:
    if not fits.all():
        at = int(np.argmin(fits))
        tokens, count = rows.input_tokens[at], rows.counts[at]
        raise rows.source.error(
            rows.lines[at],
            f"{count} ids for {tokens} tokens, but about {tokens / size:.1f} blocks of {size} "
            "tokens: ids are missing or too many, or the file mixes block sizes; correct or "
            "remove the line, or give the block size with --block-tokens",
        )
