"""Footers of a disk tier: written when a region is full, and again when too much of it has died.

A snapshot lists what was freed since the footers were written. Where it has no room for all, the
footers of those regions that lost the most are written again without their dead. A crash while one
is written leaves a region without a footer, which is scanned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from holdfast.buffers import aligned_buffer
from holdfast.failpoints import reach
from holdfast.tiers.disk.extent_io import Extents
from holdfast.tiers.disk.recovery import read_footer
from holdfast.tiers.disk.region import (
    FREED_PER_REGION,
    Entry,
    Geometry,
    Life,
    pack_footer,
    parse_footer,
)
from holdfast.tiers.disk.region_log import RegionLog


class Footers:
    """Writes them; takes the tier's `mutex` for moments only, and holds none while it writes.

    `failed` is told what could not be written or read, and returns whether to go on.
    """

    def __init__(
        self,
        extents: Extents,
        geometry: Geometry,
        regions: RegionLog,
        mutex: threading.Lock,
        failed: Callable[[OSError], bool],
    ) -> None:
        self._extents = extents
        self._geometry = geometry
        self._regions = regions
        self._mutex = mutex
        self._failed = failed
        self._hopeless: set[Life] = set()
        """Those that could not be written again: once is enough to know."""

    def write_due(self) -> bool:
        """Write those of regions that are full; return whether there were any."""
        some, may_go_on = False, True
        while may_go_on:
            with self._mutex:
                seal = self._regions.next_seal()
            if seal is None:
                break
            some = True
            reach("region_seal")
            try:
                written = self._write(seal.life, seal.entries)
            except OSError as error:
                may_go_on, written = self._failed(error), 0
            reach("region_sealed")
            with self._mutex:
                self._regions.sealed(seal, written)
        return some

    def prune(self) -> None:
        """Leave the dead out of footers, most first, until a snapshot has room for the others."""
        with self._mutex:
            dead = self._regions.dead()
        left = sum(dead.values())
        for life in sorted(dead, key=dead.__getitem__, reverse=True):
            if left <= FREED_PER_REGION * self._geometry.region_count:
                return
            if life in self._hopeless:
                continue
            with self._mutex:
                alive = self._regions.begin_prune(life)
            if alive is None:
                left -= dead[life]
                continue
            may_go_on = True
            try:
                written = self._write_again(life, alive)
            except OSError as error:
                may_go_on, written = self._failed(error), 0
            with self._mutex:
                self._regions.end_prune(life, alive, written)
            if written:
                left -= dead[life]
            else:
                self._hopeless.add(life)
            if not may_go_on:
                return

    def _write_again(self, life: Life, alive: Collection[int]) -> int:
        """Write a footer with those of its entries that begin at these sectors; return its bytes.

        0 if there is none to go by.
        """
        footer = read_footer(self._extents, self._geometry, life)
        listed = parse_footer(footer, life, self._geometry.region_sectors) if footer else None
        if listed is None:
            return 0
        return self._write(life, [entry for _, entry in listed if entry.sector in alive])

    def _write(self, life: Life, entries: list[Entry]) -> int:
        packed = pack_footer(life, entries)
        footer = aligned_buffer(len(packed))
        footer[:] = packed
        end = self._geometry.region_at(life.region) + self._geometry.region_bytes
        self._extents.write(end - len(footer), [footer])
        return len(footer)
