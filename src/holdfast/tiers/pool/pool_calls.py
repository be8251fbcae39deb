"""The calls to members of a pool that reads and lookups of striped segments are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.membership.members import Member
from holdfast.tiers.base import TierGet
from holdfast.tiers.pool.segment_batch import SegmentBatch
from holdfast.wire.remote.client import HeldFlags

T = TypeVar("T")


class CallEach(Protocol):
    """Calls a function for every item, concurrently; not at all once the tier is closed."""

    def __call__(self, items: Sequence[T], act: Callable[[T], object]) -> None: ...


class PoolCalls(NamedTuple):
    """Calls of one pool tier. All keep the deadline of their part, and none raises.

    `read`: from the members of a lane. `receive`: the leading run from one member; returns the
    indices left. Both set outcomes. `exist`: ask one member. `send`: write records to one member;
    returns the outcome of each that it answered for. `use`: tell one member that blocks are in use.
    `lost`: note blocks that no member has, so that they are written again.
    """

    each: CallEach
    read: Callable[[SegmentBatch, Sequence[TierGet], list[Outcome]], None]
    receive: Callable[[Member, SegmentBatch, Sequence[TierGet], list[Outcome]], list[int]]
    exist: Callable[[Member, SegmentBatch, Namespace, Sequence[bytes]], HeldFlags]
    send: Callable[[Member, SegmentBatch, Sequence[memoryview]], Sequence[Outcome]]
    use: Callable[[Member, SegmentBatch, Namespace, Sequence[bytes]], None]
    lost: Callable[[Namespace, Sequence[bytes]], None]
