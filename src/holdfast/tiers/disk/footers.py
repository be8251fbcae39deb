"""Write the footers of a disk tier, and rewrite them when too many of their records are freed.

A region gets its footer when it is full. A snapshot lists the records freed since the footers were
written. If there are too many for a snapshot, the footers of the regions with the most freed
records are rewritten without them. A crash during such a write leaves a region without a footer; a
restart then scans the region.
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
    RegionEntry,
    RegionGeometry,
    RegionLife,
    pack_footer,
    parse_footer,
)
from holdfast.tiers.disk.region_log import RegionLog


class FooterWriter:
    """Writes footers. Does no I/O while it holds the tier's `mutex`.

    `on_error` receives each I/O error, and returns whether writing may continue.
    """

    def __init__(
        self,
        extents: Extents,
        geometry: RegionGeometry,
        regions: RegionLog,
        mutex: threading.Lock,
        on_error: Callable[[OSError], bool],
    ) -> None:
        self._extents = extents
        self._geometry = geometry
        self._regions = regions
        self._mutex = mutex
        self._on_error = on_error
        self._not_rewritable: set[RegionLife] = set()
        """Regions whose footer could not be rewritten; there is no second attempt."""

    def write_due(self) -> bool:
        """Write the footers of full regions; return whether there were any."""
        found, may_continue = False, True
        while may_continue:
            with self._mutex:
                full = self._regions.next_full()
            if full is None:
                break
            found = True
            reach("region_seal")
            try:
                written = self._write(full.life, full.entries)
            except OSError as error:
                may_continue, written = self._on_error(error), 0
            reach("region_sealed")
            with self._mutex:
                self._regions.footer_written(full, written)
        return found

    def prune(self) -> None:
        """Rewrite footers without dead records, most dead first, until the rest fits a snapshot."""
        with self._mutex:
            dead = self._regions.dead()
        left = sum(dead.values())
        for life in sorted(dead, key=dead.__getitem__, reverse=True):
            if left <= FREED_PER_REGION * self._geometry.region_count:
                return
            if life in self._not_rewritable:
                continue
            with self._mutex:
                alive = self._regions.begin_prune(life)
            if alive is None:
                left -= dead[life]
                continue
            may_continue = True
            try:
                written = self._rewrite(life, alive)
            except OSError as error:
                may_continue, written = self._on_error(error), 0
            with self._mutex:
                self._regions.end_prune(life, alive, written)
            if written:
                left -= dead[life]
            else:
                self._not_rewritable.add(life)
            if not may_continue:
                return

    def _rewrite(self, life: RegionLife, alive: Collection[int]) -> int:
        """Rewrite a footer with its entries that begin at these sectors; return its bytes.

        Returns 0 if there is no intact footer.
        """
        footer = read_footer(self._extents, self._geometry, life)
        listed = parse_footer(footer, life, self._geometry.region_sectors) if footer else None
        if listed is None:
            return 0
        return self._write(life, [entry for _, entry in listed if entry.sector in alive])

    def _write(self, life: RegionLife, entries: list[RegionEntry]) -> int:
        packed = pack_footer(life, entries)
        footer = aligned_buffer(len(packed))
        footer[:] = packed
        end = self._geometry.region_at(life.region) + self._geometry.region_bytes
        self._extents.write(end - len(footer), [footer])
        return len(footer)
