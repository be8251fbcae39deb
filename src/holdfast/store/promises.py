"""What a store has promised to somebody: slots to fill, slots that stay where they are."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.tiers.base import Place


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


class Lease(NamedTuple):
    """Rows whose host slots stay where they are until released or expired."""

    rows: list[int]
    expires_at: float
