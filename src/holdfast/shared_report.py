"""The report on shared tiers: what their remote sides answered to a node, for `inspect pool`.

The status of a node (`status`) has what the node knows without asking.
"""

from __future__ import annotations

import msgspec

from holdfast.prepared import prepared
from holdfast.status import StatusFields, TierStatus, read_as


class MemberReport(StatusFields, frozen=True):
    """One member of a shared tier, as a check found it: it asked the member.

    `share`: part of the keys that belong to the member. `condition`: how it answered, in `answer_s`
    seconds, and `why` not well; None if the tier checks no members. `tiers`: its own.
    """

    id: str = ""
    address: str = ""
    state: str = ""
    share: float = 0.0
    phase: str = "closed"
    ejected: bool = False
    latency_s: float | None = None
    first_byte_s: float | None = None
    condition: str | None = None
    why: str = ""
    answer_s: float = 0.0
    tiers: list[TierStatus] = msgspec.field(default_factory=list)


class SegmentMediumReport(StatusFields, frozen=True):
    """A bucket or shared folder, and what this node knows of the segments in it, of all nodes.

    `reads` and `writes`: "active", or why they fail.
    """

    address: str = ""
    reads: str = "active"
    writes: str = "active"
    segments: int = 0
    stored_bytes: int = 0
    blocks: int = 0


@prepared
class SharedTierReport(StatusFields, frozen=True):
    """What a shared tier tells of its remote side; `trouble`: why it cannot tell more.

    `limits`: what this node's credentials do not permit there. `lanes`: members of a stripe.
    `medium`: None if the tier has members instead.
    """

    tier: str
    epoch: int = 0
    trouble: str = ""
    members: list[MemberReport] = msgspec.field(default_factory=list)
    limits: str = ""
    lanes: int = 1
    rebuilt: int = 0
    parity_records: int = 0
    parity_refused: int = 0
    medium: SegmentMediumReport | None = None


@prepared
class SharedReport(StatusFields, frozen=True):
    """A node's answer about all of its shared tiers."""

    shared: list[SharedTierReport] = msgspec.field(default_factory=list)


def read_shared(data: object) -> SharedReport:
    """Return the shared tiers in a node's answer. Raises ProtocolError for anything else."""
    return read_as(data, SharedReport)
