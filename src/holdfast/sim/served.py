"""What became of each request of a simulation, as flat columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.trace import Floats, Ints, Longs


class Served(NamedTuple):
    """What became of each of `n` requests, in the order of the trace; times in seconds."""

    arrived_s: Floats
    """[n] from the start of the run."""
    looked_s: Floats
    """[n] when its turn came: what is held was looked up, and planned."""
    fetched_s: Floats
    """[n] when the last block had come."""
    started_s: Floats
    """[n] when the engine began to compute."""
    first_s: Floats
    """[n] when the first token was there."""
    worker: Ints
    """[n] who computed it."""
    held: Ints
    """[n] leading blocks that some tier held."""
    fetched: Longs
    """[n, tiers] blocks that came from each tier."""
    computed_tokens: Longs
    """[n]"""
    computed_s: Floats
    """[n] seconds of prefill."""
    saved_s: Floats
    """[n] seconds of prefill that the fetched blocks made unnecessary."""
    late: Ints
    """[n] 1 where a fetch passed its deadline and was cut short."""


def nothing_yet(requests: int, tiers: int) -> Served:
    """Return the columns of so many requests and tiers, all zero."""

    def times() -> Floats:
        return np.zeros(requests, np.float64)

    return Served(
        arrived_s=times(),
        looked_s=times(),
        fetched_s=times(),
        started_s=times(),
        first_s=times(),
        worker=np.zeros(requests, np.int32),
        held=np.zeros(requests, np.int32),
        fetched=np.zeros((requests, tiers), np.int64),
        computed_tokens=np.zeros(requests, np.int64),
        computed_s=times(),
        saved_s=times(),
        late=np.zeros(requests, np.int32),
    )
