"""What became of each request of a simulation, as flat columns."""

from __future__ import annotations

from array import array
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


class Ledger:
    """`Served` in the making: a few columns at hand, whose items are set far sooner than numpy's.

    What nobody notes is 0.
    """

    def __init__(self, requests: int, tiers: int) -> None:
        self.arrived_s = array("d", bytes(8 * requests))
        self.looked_s = array("d", bytes(8 * requests))
        self.fetched_s = array("d", bytes(8 * requests))
        self.started_s = array("d", bytes(8 * requests))
        self.first_s = array("d", bytes(8 * requests))
        self.worker = array("i", bytes(4 * requests))
        self.held = array("i", bytes(4 * requests))
        self.fetched = array("q", bytes(8 * requests * tiers))
        """The counts of one request after the other."""
        self.computed_tokens = array("q", bytes(8 * requests))
        self.computed_s = array("d", bytes(8 * requests))
        self.saved_s = array("d", bytes(8 * requests))
        self.late = array("i", bytes(4 * requests))
        self._shape = requests, tiers

    def fetch(self, request: int, counts: list[int]) -> None:
        """Note how many blocks come from each tier."""
        at = request * len(counts)
        self.fetched[at : at + len(counts)] = array("q", counts)

    def served(self) -> Served:
        """Return what was noted until now; a copy."""
        return Served(
            arrived_s=np.array(self.arrived_s),
            looked_s=np.array(self.looked_s),
            fetched_s=np.array(self.fetched_s),
            started_s=np.array(self.started_s),
            first_s=np.array(self.first_s),
            worker=np.array(self.worker),
            held=np.array(self.held),
            fetched=np.array(self.fetched).reshape(self._shape),
            computed_tokens=np.array(self.computed_tokens),
            computed_s=np.array(self.computed_s),
            saved_s=np.array(self.saved_s),
            late=np.array(self.late),
        )
