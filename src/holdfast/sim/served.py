"""The result of a simulation for each request, as columns."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from holdfast.sim.trace import Floats, Ints, Longs, Trace, share


class ServedRequests(NamedTuple):
    """The result for each of `n` requests, in the order of the trace; times in seconds."""

    arrived_s: Floats
    """[n] arrival, since the start of the run."""
    looked_s: Floats
    """[n] when the worker looked its chain up and planned it."""
    fetched_s: Floats
    """[n] when the last fetched block arrived."""
    started_s: Floats
    """[n] when its prefill started."""
    first_s: Floats
    """[n] when the first token was done."""
    worker: Ints
    """[n] number of the worker."""
    held: Ints
    """[n] leading blocks that the tiers held."""
    fetched: Longs
    """[n, tiers] blocks fetched from each tier."""
    saved_s: Floats
    """[n] seconds of prefill that the fetched blocks saved."""
    late: Ints
    """[n] 1 if the fetch was cancelled at its deadline, else 0."""

    def token_hit(self, trace: Trace) -> float:
        """Return the share of the trace's input tokens that were fetched."""
        tokens = np.minimum(self.fetched.sum(axis=1) * trace.block_tokens, trace.input_tokens)
        return share(float(tokens.sum()), int(trace.input_tokens.sum()))


class Ledger:
    """Builds `ServedRequests`; entries that are not set are 0.

    The columns are `array`s, because setting one item is much faster than in numpy.
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
        """[requests * tiers] the counts of each request in turn."""
        self.saved_s = array("d", bytes(8 * requests))
        self.late = array("i", bytes(4 * requests))
        self._shape = requests, tiers

    def fetch(self, request: int, counts: list[int]) -> None:
        """Set the number of blocks that a request fetches from each tier."""
        at = request * len(counts)
        self.fetched[at : at + len(counts)] = array("q", counts)

    def served(self) -> ServedRequests:
        """Return a copy of the present state."""
        columns = {name: np.array(getattr(self, name)) for name in ServedRequests._fields}
        columns["fetched"] = columns["fetched"].reshape(self._shape)
        return ServedRequests(**columns)
