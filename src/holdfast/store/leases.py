"""Leases on blocks in memory, and reservations of host slots for blocks to come."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.tiers.base import NOWHERE, Place


class Generation(NamedTuple):
    """How often blocks of a namespace were erased (with their domain), and dropped, so far."""

    erasures: int
    drops: int


class Reservation(NamedTuple):
    """Slots reserved for consecutive blocks of a chain; NOWHERE where a block needs none.

    `generation` is the namespace's at the start; if it has changed since, nothing is published.
    `part`: the ranges of each payload that the writer fills; empty: all of it. A reservation with a
    part does not own the slots, see `PartialBlocks`. `alone`: see `save.ChainRun`.
    """

    namespace: Namespace
    keys: list[bytes]
    parent: bytes
    depth: int
    segment: bytes
    places: list[Place]
    generation: Generation
    part: bytes = b""
    alone: bool = False

    @property
    def slots(self) -> list[Place]:
        """The slots that belong to this reservation."""
        return [] if self.part else [place for place in self.places if place != NOWHERE]

    @property
    def nbytes(self) -> int:
        """Total size of its slots in bytes."""
        return len(self.slots) * self.namespace.slot_bytes


class BlockLease(NamedTuple):
    """Rows whose host slots are not evicted until the lease is released or expires."""

    rows: list[int]
    expires_at: float


class LeaseTable:
    """The leases and reservations of one store, each under a random number.

    `pin` keeps rows in their slots, `unpin` undoes one `pin`. Not thread-safe: the store calls it
    under its lock.
    """

    def __init__(
        self, pin: Callable[[list[int]], None], unpin: Callable[[list[int]], None]
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._leases: dict[int, BlockLease] = {}
        self._reservations: dict[int, Reservation] = {}
        self.issued = 0
        """Number of leases and reservations made so far; every save and read increases it."""

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._leases)

    def __contains__(self, number: int) -> bool:
        """Return whether a lease has not ended."""
        return number in self._leases

    @property
    def reservations(self) -> int:
        """Number of reservations that were neither committed nor aborted."""
        return len(self._reservations)

    def open_reservations(self) -> list[int]:
        """Return the numbers of the reservations that were neither committed nor aborted."""
        return list(self._reservations)

    def lease(self, rows: list[int], expires_at: float) -> int:
        """Pin rows in the host tier; return the lease's number."""
        self._pin(rows)
        number = self._unused_number()
        self._leases[number] = BlockLease(rows, expires_at)
        return number

    def release(self, number: int) -> bool:
        """End a lease; False if it had ended before."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        self._unpin(lease.rows)
        return True

    def extend(self, number: int, expires_at: float) -> bool:
        """Set the expiry time of a lease; False if it has ended."""
        lease = self._leases.get(number)
        if lease is not None:
            self._leases[number] = lease._replace(expires_at=expires_at)
        return lease is not None

    def shorten(self, number: int, blocks: int) -> None:
        """Keep only the first `blocks` rows of a lease."""
        lease = self._leases.get(number)
        if lease is not None:
            self._unpin(lease.rows[blocks:])
            self._leases[number] = lease._replace(rows=lease.rows[:blocks])

    def expire(self, now_s: float) -> None:
        """End every lease that expires at `now_s` or earlier."""
        for number in [n for n, lease in self._leases.items() if lease.expires_at <= now_s]:
            self.release(number)

    def reserved_keys(self, namespace: Namespace) -> set[bytes]:
        """Return the keys of the blocks that sessions are saving in a namespace."""
        return {
            key
            for reservation in self._reservations.values()
            if reservation.namespace == namespace
            for key in reservation.keys
        }

    def reserve(self, reservation: Reservation) -> int:
        """Add a reservation; return its number."""
        number = self._unused_number()
        self._reservations[number] = reservation
        return number

    def take_reservation(self, number: int) -> Reservation | None:
        """Remove a reservation and return it; None if it has ended. The caller owns its slots."""
        return self._reservations.pop(number, None)

    def end_domain(self, domain: bytes, domain_of: Callable[[int], bytes]) -> list[Reservation]:
        """Release a domain's leases; remove its reservations and return them.

        `domain_of` returns the domain of a row. The caller owns the slots of the reservations.
        """
        for number, lease in list(self._leases.items()):
            if any(domain_of(row) == domain for row in lease.rows):
                self.release(number)
        ended = [n for n, each in self._reservations.items() if each.namespace.domain == domain]
        return [self._reservations.pop(number) for number in ended]

    def _unused_number(self) -> int:
        """Return an unused random number.

        A counter would reveal to a session how many leases other sessions have. 63 bits fit a
        signed 64-bit integer.
        """
        self.issued += 1
        number = 0
        while not number or number in self._leases or number in self._reservations:
            number = secrets.randbits(63)
        return number
