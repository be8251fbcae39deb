"""A member of a pool and a view of all of them: values, nothing else."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
import xxhash


class State(enum.StrEnum):
    """What a member says of itself, or its source says of it."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One target.

    `id` decides which segments it gets, so it should outlive restarts and changes of address.
    `weight` is its share relative to the others (its capacity in TiB, say). `incarnation` tells
    one life of the process from the next; it moves nothing.
    """

    id: str
    address: str
    weight: float = 1.0
    zone: str = ""
    state: State = State.SERVING
    incarnation: str = ""

    @property
    def takes_segments(self) -> bool:
        """Whether segments are placed on it; a draining member only serves what it holds."""
        return self.state in (State.JOINING, State.SERVING)


class View(msgspec.Struct, frozen=True):
    """Who is in the pool, by id, as one process sees it.

    `epoch` counts this process's views: it grows whenever placement may have changed. `digest`
    (64 bits) is the same wherever the same segments go to the same addresses; it travels in
    requests, where an epoch of one's own would mean nothing to the other side.
    """

    epoch: int
    members: tuple[Member, ...]
    digest: int

    @staticmethod
    def of(epoch: int, members: Iterable[Member]) -> View:
        """Return a view with its members in order and its digest worked out."""
        ordered = tuple(sorted(members, key=lambda member: member.id))
        return View(epoch, ordered, placement_digest(ordered))

    def find(self, member_id: str) -> Member | None:
        """Return the member of that id, if it is in."""
        return next((member for member in self.members if member.id == member_id), None)


def placement_digest(members: Iterable[Member]) -> int:
    """Return 64 bits over everything that placement depends on, in the order of ids."""
    placed = sorted((m.id, m.address, float(m.weight)) for m in members if m.takes_segments)
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(placed))
