"""What a store promised to somebody: slots to fill, slots that stay, slots that will be full."""

from __future__ import annotations

import threading
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.tiers.base import NOWHERE, Place


class Ticket(NamedTuple):
    """Slots reserved for consecutive blocks of a chain; NOWHERE where a block needs none.

    `era` is that of the domain when it began: in another one it publishes nothing.
    """

    world: World
    keys: list[bytes]
    parent: bytes
    depth: int
    segment: bytes
    places: list[Place]
    era: int

    @property
    def nbytes(self) -> int:
        """The bytes of its slots."""
        return (len(self.places) - self.places.count(NOWHERE)) * self.world.record_bytes


class Lease(NamedTuple):
    """Rows whose host slots stay where they are until released or expired."""

    rows: list[int]
    expires_at: float


class Loading:
    """A host slot that is being filled from a lower tier, and how many wait for that.

    Those do not count who claimed the slot. `over` is set when it is full, or will not be.
    """

    __slots__ = ("over", "waiting")

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waiting = 0
