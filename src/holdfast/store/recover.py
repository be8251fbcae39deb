"""Recovery: index what an earlier process left on local tiers, while the store already serves.

A surviving record is not trusted: it is verified when it is read. Until recovery reaches a block it
is a miss and may be written again; then the new copy stays, and the old one is freed. Records that
their domain cannot open any more are freed too. Plain records from before their domain was sealed
are overwritten, if the tier can, because no key protects them. Records of a fingerprint that was
dropped since the process started, or just before it ended, are freed.
"""

from __future__ import annotations

import logging
import threading
from array import array

from holdfast.blocks.namespace import namespace_of
from holdfast.store.block_table import BlockTable
from holdfast.tiers.base import NOWHERE, Erasable, LocalTier, SurvivingRecord

_log = logging.getLogger("holdfast.store")


class Recovery:
    """One background pass over the survivors of every tier below the host."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-recover", daemon=True)
        self._indexed = array("q")
        """By row, a hash of the key and place of its survivor on this tier; 0: none."""
        self.blocks = 0
        self.dropped = 0
        """Survivors that were freed because their fingerprint was dropped."""
        self.is_complete = False
        """Whether the pass reached every survivor."""
        self.seconds: float | None = None

    def start(self) -> None:
        """Begin; the store serves during recovery."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the pass has begun and may still find blocks."""
        return self.seconds is None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the pass; False if it still runs after `timeout_s`.

        Returns True at once before `start`.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop early if need be."""
        self._stop.set()
        self.wait()

    def _run(self) -> None:
        started = self._table.clock.now()
        for number, tier in enumerate(self._table.lower, start=1):
            if not isinstance(tier, LocalTier):
                continue
            try:  # one by one: a tier keeps only the last one that it yielded from reuse
                for survivor in tier.survivors():
                    if self._stop.is_set():
                        break
                    if not self._table.sealing.predates_sealing(survivor.header):
                        self._index(number, survivor)
                        continue
                    if isinstance(tier, Erasable):
                        tier.wipe(survivor)
                    tier.free([survivor.place])
            except Exception:  # noqa: BLE001  # a tier that cannot be scanned has no survivors
                _log.exception("recovery of tier=%s ended early", tier.name)
            self._indexed = array("q")
        self.is_complete = not self._stop.is_set()
        self.seconds = self._table.clock.now() - started
        if any(isinstance(tier, LocalTier) for tier in self._table.lower):
            _log.info(
                "recovered: %d blocks in %.3f s, freed dropped_blocks=%d",
                *(self.blocks, self.seconds, self.dropped),
            )

    def _index(self, number: int, survivor: SurvivingRecord) -> None:
        table, (header, place) = self._table, survivor
        with table.lock:
            if not table.sealing.may_open(header):
                table.free_place(number, place)
                return
            namespace = namespace_of(header)
            if table.drops.generation(namespace):
                row = table.index.find(namespace, header.key)
                if row < 0 or table.copies.place(row, number) != place:  # not written since
                    table.free_place(number, place)
                    self.dropped += 1
                return
            row = table.index.add(namespace, header.key, header.parent, header.depth)
            known = table.copies.place(row, number)
            if known == place:
                return  # the block was written since; the known place is not older
            if known != NOWHERE:
                # Rows and places are reused, so the mark names both the block and the place.
                marked = row < len(self._indexed)
                if not marked or self._indexed[row] != hash((header.key, known)):
                    table.free_place(number, place)  # the copy written since is newer
                    return
                table.remove_copy(row, number)
                row = table.index.add(namespace, header.key, header.parent, header.depth)
            table.publish_below(row, number, place, header.stored_bytes, header.epoch)
            if row >= len(self._indexed):
                self._indexed.extend([0] * (row + 1 - len(self._indexed)))
            self._indexed[row] = hash((header.key, place))
            self.blocks += known == NOWHERE
