"""Requests to an object store that moving bytes takes, and their price.

They follow from the shape of a node's object tier: blocks are written in segment objects with an
index object each, read in ranges, and each node lists the index objects at an interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.sim.profile import Medium, ProfileRange
from holdfast.tiers.segments.format import SEGMENT_BYTES
from holdfast.tiers.segments.options import POLL_S
from holdfast.tiers.segments.range_reads import RANGE_BYTES

PUTS_PER_SEGMENT = 2
"""A segment object and its index object."""


class PaidRequests(NamedTuple):
    """Requests by verb; fractions are means."""

    gets: float
    puts: float
    lists: float

    def dollars(self, medium: Medium, price: Callable[[ProfileRange], float]) -> float:
        """Return their price; a listing is paid like a put. `price` chooses from a range."""
        gets = self.gets * price(medium.dollars_per_million_gets)
        return (gets + (self.puts + self.lists) * price(medium.dollars_per_million_puts)) / 1e6


def paid_requests(
    read_bytes: float, written_bytes: float, nodes: float, seconds: float
) -> PaidRequests:
    """Return the requests for stored bytes read and written by `nodes` nodes in some seconds.

    Segments are full, as those of a busy node are.
    """
    puts = PUTS_PER_SEGMENT * written_bytes / SEGMENT_BYTES
    return PaidRequests(read_bytes / RANGE_BYTES, puts, nodes * seconds / POLL_S)
