"""A store as tests see it: which copies it has, what moves, what is leased and how much is used.

Every method takes the store's lock and returns plain values, which do not change afterwards. A tier
is given by its number: 0 is the host (`HOST`), 1 the first tier below it. Blocks are given by their
namespace and key. `holdfast.testing.store_control` makes a store do what it does by itself at other
times.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.store.block_table import HOST
from holdfast.store.copies import CopyFault
from holdfast.store.store import Store
from holdfast.tiers.base import NOWHERE, Tier

__all__ = ["HOST", "WAIT_S", "Copy", "StoreView"]

WAIT_S = 60.0
"""Longest wait for a state, in seconds."""

_LOOK_AGAIN_S = 0.0005


class Copy(NamedTuple):
    """One record of a block on one tier; `nbytes` is its stored size."""

    namespace: Namespace
    key: bytes
    place: int
    nbytes: int


class StoreView:
    """What a store holds, moves and lends."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._table = store.table

    def tier(self, number: int) -> Tier:
        """Return a tier below the host, as the store calls it."""
        return self._table.lower[number - 1]

    # Copies

    def copies(self, tier: int, namespace: Namespace | None = None) -> list[Copy]:
        """Return the copies on a tier, of one namespace or of all."""
        index = self._table.index
        with self._table.lock:
            return [
                Copy(
                    index.namespace(row),
                    index.keys[row] or b"",
                    index.places[tier][row],
                    index.stored_bytes(row, tier),
                )
                for row in index.rows()
                if index.places[tier][row] != NOWHERE and namespace in (None, index.namespace(row))
            ]

    def copy(self, namespace: Namespace, key: bytes, tier: int = HOST) -> Copy | None:
        """Return the copy of a block on a tier; None if there is none."""
        index = self._table.index
        with self._table.lock:
            row = index.find(namespace, key)
            if row < 0 or index.places[tier][row] == NOWHERE:
                return None
            place, nbytes = index.places[tier][row], index.stored_bytes(row, tier)
            return Copy(namespace, key, place, nbytes)

    def place(self, namespace: Namespace, key: bytes, tier: int = HOST) -> int:
        """Return the place of a copy on a tier; -1 if the tier has none."""
        copy = self.copy(namespace, key, tier)
        return int(NOWHERE) if copy is None else copy.place

    def held(self, namespace: Namespace, keys: Sequence[bytes], tier: int = HOST) -> int:
        """Return how many of some blocks a tier has a copy of."""
        index = self._table.index
        with self._table.lock:
            rows = index.find_all(namespace, keys)
            return sum(row >= 0 and index.places[tier][row] != NOWHERE for row in rows)

    def tiers(self, namespace: Namespace, key: bytes) -> list[int]:
        """Return the tiers with a copy of a block, fastest first."""
        index = self._table.index
        with self._table.lock:
            row = index.find(namespace, key)
            return index.tiers(row) if row >= 0 else []

    def record(self, namespace: Namespace, key: bytes) -> memoryview:
        """Return the record of a block in host memory, in place; KeyError if there is none.

        It can be written to, so that a test can damage it. It is valid while the copy is there.
        """
        copy = self.copy(namespace, key)
        if copy is None:
            raise KeyError(key.hex())
        return self._store.record(namespace, copy.place)

    @property
    def entries(self) -> int:
        """Number of blocks that the store knows of, also without a copy."""
        with self._table.lock:
            return len(self._table.index)

    @property
    def remote_lookups(self) -> int:
        """Number of blocks that only shared tiers hold, and that the store remembers."""
        with self._table.lock:
            return len(self._table.remote_lookups)

    @property
    def faults(self) -> list[CopyFault]:
        """The last copies that failed a check, oldest first."""
        with self._table.lock:
            return list(self._table.faults)

    # Movement

    def is_saved(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether a tier holds the block that counts as saved: eviction loses nothing."""
        with self._table.lock:
            row = self._table.index.find(namespace, key)
            return row >= 0 and self._table.state(row).is_saved

    def is_admitted(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether a block must be saved on a lower tier before it is evicted."""
        with self._table.lock:
            return self._table.state(self._row(namespace, key)).is_admitted

    def is_evictable(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether a block may leave memory now; one that can be saved is queued instead."""
        with self._table.lock:
            return self._table.evictable(self._row(namespace, key))

    def is_in_use(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether a block is leased, being written, or being read into memory."""
        with self._table.lock:
            row = self._table.index.find(namespace, key)
            return row >= 0 and self._table.state(row).is_in_use

    def waiting(self, tier: int) -> int:
        """Return how many blocks wait to be written to a tier."""
        with self._table.lock:
            return self._table.queues.length(tier)

    def writing(self, tier: int | None = None) -> int:
        """Return how many blocks wait for a tier or are being written to it; by default to all."""
        queues = self._table.queues
        with self._table.lock:
            return len(queues) if tier is None else queues.length(tier) + queues.running(tier)

    def deferred(self, tier: int) -> int:
        """Return how many blocks wait until a tier takes writes again."""
        with self._table.lock:
            return self._table.queues.deferred(tier)

    @property
    def reading(self) -> set[bytes]:
        """Keys of the blocks that are read from a lower tier into memory, or queued for it."""
        with self._table.lock:
            return {self._table.index.keys[row] or b"" for row in self._table.copies.fillings(HOST)}

    @property
    def reading_ahead(self) -> int:
        """Number of blocks that are read into memory and that no fetch waits for yet."""
        return self._store.mover.prefetched

    @property
    def evictions(self) -> dict[int, int]:
        """Copies that left each tier for others, since the start."""
        with self._table.lock:
            return dict(self._table.evictions)

    @property
    def moves(self) -> Counter[tuple[int, int, str]]:
        """Copies that moves made since the start, by source, target and reason."""
        with self._table.lock:
            moved = self._table.movement.moved
            return Counter({(*move[:2], move[2].value): moved[move] for move in moved})

    @property
    def dropped_unmoved(self) -> Counter[int]:
        """Copies that tiers evicted before they were moved, by tier, since the start."""
        with self._table.lock:
            return Counter(self._table.movement.dropped_unmoved)

    # Leases and memory

    @property
    def leases(self) -> int:
        """Number of leases that have not ended."""
        with self._table.lock:
            return len(self._table.leases)

    @property
    def reservations(self) -> int:
        """Number of reservations that were neither committed nor aborted."""
        with self._table.lock:
            return self._table.leases.reservations

    @property
    def is_idle(self) -> bool:
        """Whether no block is leased, reserved, being read or waiting for its last reader."""
        with self._table.lock:
            return self._table.is_idle()

    def slots(self, namespace: Namespace) -> int:
        """Return how many blocks of a namespace fit in empty memory."""
        return self._table.host(namespace).slots(namespace.slot_bytes)

    def used_slots(self, namespace: Namespace | None = None) -> int:
        """Return the slots in use in the memory of a namespace's domain, published or not.

        By default those of all domains.
        """
        table = self._table
        with table.lock:
            hosts = table.all_hosts() if namespace is None else [table.host(namespace)]
            return sum(host.usage().records for host in hosts)

    def retained_slots(self, namespace: Namespace) -> int:
        """Return the slots of a namespace that a reader keeps although their copies have gone."""
        with self._table.lock:
            return self._table.pending_slots(namespace)

    def memory_bytes(self, namespace: Namespace) -> int:
        """Return the bytes of the slots in use in the memory of a namespace's domain."""
        with self._table.lock:
            return self._table.host(namespace).usage().used_bytes

    def used_bytes(self, tier: int, domain: bytes | None = None) -> int:
        """Return the bytes that a domain is counted with on a tier; by default all domains."""
        with self._table.lock:
            used = self._table.usage.used[tier]
            return used.total() if domain is None else used[domain]

    def recalls(self, outcome: str) -> int:
        """Return how many recalls of page-locked memory ended like this: `returned`, `missed`."""
        with self._table.lock:
            return self._table.recalls.outcomes[outcome]

    # Waiting

    @property
    def lock(self) -> threading.RLock:
        """The store's lock, for tests that check who holds it when."""
        return self._table.lock

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold the store's lock: no other thread changes anything before the end."""
        with self._table.lock:
            yield

    def wait_until(self, is_true: Callable[[], object], what: str) -> None:
        """Wait until a condition holds; raise AssertionError after `WAIT_S`, naming `what`."""
        until = time.monotonic() + WAIT_S
        while not is_true():
            if time.monotonic() > until:
                raise AssertionError(f"not within {WAIT_S:g} s: {what}")
            time.sleep(_LOOK_AGAIN_S)

    def wait_until_written(self, tier: int | None = None) -> None:
        """Wait until no write to a tier is queued or running; by default to any tier."""

        def is_written() -> bool:
            self._store.mover.hurry()
            return not self.writing(tier)

        self.wait_until(is_written, "all queued blocks are written")

    def wait_until_moved(self) -> None:
        """Wait until every move that may be made now is made; those beyond a limit may wait."""

        def is_moved() -> bool:
            self._store.mover.hurry()
            return not self._store.mover.has_moves()

        self.wait_until(is_moved, "all moves within their limits are made")

    def wait_until_read(self) -> None:
        """Wait until no read from a lower tier is queued or running."""
        self.wait_until(lambda: not self.reading, "all reads from lower tiers ended")

    def wait_until_idle(self) -> None:
        """Wait until nothing is written, read, leased or reserved."""
        self.wait_until_written()
        self.wait_until(lambda: self.is_idle, "no block is leased, reserved or read")

    def _row(self, namespace: Namespace, key: bytes) -> int:
        """Return the row of a block; raise KeyError if it has none."""
        row = self._table.index.find(namespace, key)
        if row < 0:
            raise KeyError(key.hex())
        return row
