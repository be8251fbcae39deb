"""Value types: a member of a pool, and a view of the whole pool."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
import xxhash


class MemberState(enum.StrEnum):
    """The state of a member, as the member or its source reports it."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One target of a pool.

    `id` decides which segments it gets, so it should survive restarts and changes of address.
    `weight` is its relative share (its capacity in TiB, for example). `incarnation` distinguishes
    runs of its process, and `tls_name` is the name that its certificate must have (empty: the host
    of its address); neither affects placement.
    """

    id: str
    address: str
    weight: float = 1.0
    zone: str = ""
    state: MemberState = MemberState.SERVING
    incarnation: str = ""
    tls_name: str = ""

    @property
    def takes_segments(self) -> bool:
        """Whether segments are placed on it; a draining member only serves the blocks it holds."""
        return self.state in (MemberState.JOINING, MemberState.SERVING)


class PoolView(msgspec.Struct, frozen=True):
    """The members of a pool as one process sees them, in the order of their ids.

    `epoch` counts this process's views: it grows whenever placement may have changed. `digest`
    is a 64-bit hash over id, address and weight of the members that take segments: it is equal on
    two nodes if they place all segments on the same addresses. The epochs of two processes are not
    comparable.
    """

    epoch: int
    members: tuple[Member, ...]
    digest: int

    @staticmethod
    def of(epoch: int, members: Iterable[Member]) -> PoolView:
        """Return a view with its members sorted and its digest computed."""
        ordered = tuple(sorted(members, key=lambda member: member.id))
        placed = [(m.id, m.address, float(m.weight)) for m in ordered if m.takes_segments]
        return PoolView(epoch, ordered, xxhash.xxh3_64_intdigest(msgspec.json.encode(placed)))
