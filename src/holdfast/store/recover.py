"""Recovery: index what an earlier process left on local tiers, while the store already serves.

A tier whose medium was replaced may hold blocks, too: they are recovered in a pass of their own.

A surviving record is not trusted: it is verified when it is read. Until recovery reaches a block it
is a miss and may be written again; then the new copy stays, and the old one is freed. Records that
their domain cannot open any more are freed too. Plain records from before their domain was sealed
are overwritten, if the tier can, because no key protects them. Records of a fingerprint that was
dropped since the process started, or just before it ended, are freed.

A block that was being written again when the power failed has two records. The later one may be
damaged, and the earlier one acknowledged as durable. So the later one is verified before the
earlier one is given up.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Sequence

from holdfast.blocks.namespace import namespace_of
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.store.block_table import BlockTable
from holdfast.store.verify import verify_record
from holdfast.tiers.base import (
    NOWHERE,
    Erasable,
    LocalTier,
    Replaceable,
    SurvivingRecord,
    TierGet,
)

_log = logging.getLogger("holdfast.store")


class Recovery:
    """A background pass over the survivors of every tier below the host, and of replaced media."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-recover", daemon=True)
        self._later: threading.Thread | None = None
        self.blocks = 0
        self.dropped = 0
        """Survivors that were freed because their fingerprint was dropped."""
        self._ended_early = False
        """Whether a pass was stopped or failed."""
        self.seconds: float | None = None

    def start(self) -> None:
        """Begin; the store serves during recovery."""
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Whether every survivor of every medium was reached."""
        return self.seconds is not None and not self.is_running and not self._ended_early

    @property
    def is_running(self) -> bool:
        """Whether the pass has begun and may still find blocks."""
        first = self.seconds is None and self._thread.is_alive()
        return first or (self._later is not None and self._later.is_alive())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the pass; False if it still runs after `timeout_s`.

        Returns True at once before `start`.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def recover_replaced(self) -> None:
        """Begin a pass over media that replaced others since the start, one pass at a time."""
        due = [
            number
            for number, tier in enumerate(self._table.lower, start=1)
            if isinstance(tier, Replaceable) and tier.has_survivors()
        ]
        if not due or self.is_running or self._stop.is_set():
            return
        self._later = threading.Thread(
            target=self._recover_tiers, args=(due,), name="holdfast-recover", daemon=True
        )
        self._later.start()

    def close(self) -> None:
        """Stop early if need be."""
        self._stop.set()
        self.wait()
        if self._later is not None:
            self._later.join()

    def _recover_tiers(self, numbers: Sequence[int]) -> None:
        """Index the survivors of local tiers."""
        for number in numbers:
            tier = self._table.lower[number - 1]
            if not isinstance(tier, LocalTier):
                continue
            indexed = array("q")
            try:  # one by one: a tier keeps only the last one that it yielded from reuse
                for survivor in tier.survivors():
                    if self._stop.is_set():
                        self._ended_early = True
                        break
                    if not self._table.sealing.predates_sealing(survivor.header):
                        self._index(number, survivor, indexed)
                        continue
                    if isinstance(tier, Erasable):
                        tier.wipe(survivor)
                    tier.free([survivor.place])
            except Exception:  # noqa: BLE001  # a tier that cannot be scanned has no survivors
                self._ended_early = True
                _log.exception(
                    "recovery of tier=%s ended early: blocks that it did not reach are misses "
                    "until the store is opened again",
                    tier.name,
                )

    def _run(self) -> None:
        started = self._table.clock.now()
        self._recover_tiers(range(1, len(self._table.lower) + 1))
        self.seconds = self._table.clock.now() - started
        if any(isinstance(tier, LocalTier) for tier in self._table.lower):
            _log.info(
                "recovered: %d blocks in %.3f s, freed dropped_blocks=%d",
                *(self.blocks, self.seconds, self.dropped),
            )

    def _index(self, number: int, survivor: SurvivingRecord, indexed: array[int]) -> None:
        """Index one survivor; of two records of a block the later one that is intact.

        `indexed`: by row, a hash of the key and place of its survivor on this tier; 0: none.
        """
        if self._index_unless_second(number, survivor, indexed):
            return
        if self._is_intact(number, survivor):
            self._index_unless_second(number, survivor, indexed, replaces=True)
            return
        with self._table.lock:
            self._table.free_place(number, survivor.place)

    def _is_intact(self, number: int, survivor: SurvivingRecord) -> bool:
        """Read a survivor and return whether it verifies, as far as the keys at hand can tell.

        A sealed record whose domain has no keys at the moment passes: it is the later one.
        """
        table, (header, place) = self._table, survivor
        namespace = namespace_of(header)
        record = aligned_buffer(namespace.slot_bytes)
        get = TierGet(place, header.key, record, namespace, is_use=False)
        if table.lower[number - 1].read([get]) != [Outcome.OK]:
            return False
        found = verify_record(table, record, header.key, namespace, number)
        return found in (Outcome.OK, Outcome.UNREADABLE)

    def _index_unless_second(
        self,
        number: int,
        survivor: SurvivingRecord,
        indexed: array[int],
        *,
        replaces: bool = False,
    ) -> bool:
        """Index one survivor; False if another one of its block is indexed, unless it replaces it.

        Otherwise returns True, also for a survivor that is freed.
        """
        table, (header, place) = self._table, survivor
        with table.lock:
            if not table.sealing.may_open(header):
                table.free_place(number, place)
                return True
            namespace = namespace_of(header)
            if table.drops.generation(namespace):
                row = table.index.find(namespace, header.key)
                if row < 0 or table.copies.place(row, number) != place:  # not written since
                    table.free_place(number, place)
                    self.dropped += 1
                return True
            row = table.index.add(namespace, header.key, header.parent, header.depth)
            known = table.copies.place(row, number)
            if known == place:
                return True  # the block was written since; the known place is not older
            if known != NOWHERE:
                # Rows and places are reused, so the mark names both the block and the place.
                marked = row < len(indexed)
                if not marked or indexed[row] != hash((header.key, known)):
                    table.free_place(number, place)  # the copy written since is newer
                    return True
                if not replaces:
                    return False
                table.remove_copy(row, number)
                row = table.index.add(namespace, header.key, header.parent, header.depth)
            table.publish_below(row, number, place, header.stored_bytes, header.epoch)
            if row >= len(indexed):
                indexed.extend([0] * (row + 1 - len(indexed)))
            indexed[row] = hash((header.key, place))
            self.blocks += known == NOWHERE
            return True
