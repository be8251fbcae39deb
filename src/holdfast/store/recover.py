"""Recovery: index what an earlier process left on local tiers, while the store already serves.

A tier whose medium was replaced may hold blocks, too: they are recovered in a pass of their own.

A surviving record is not trusted: it is verified when it is read. Until recovery reaches a block it
is a miss and may be written again; then the new copy stays, and the old one is freed. Records whose
data key was destroyed are freed too. Those that were sealed with a key which this ring never had
are not indexed, and keep their places: another configuration may open them. Plain records from
before their domain was sealed are overwritten, if the tier can, because no key protects them.
Records of a fingerprint are freed if it was dropped since the process started, or just before it
ended, and their medium has not recorded that drop.

A block that was being written again when the power failed has two records. The later one may be
damaged, and the earlier one acknowledged as durable. So the later one is verified before the
earlier one is given up.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Sequence

from holdfast.blocks.namespace import namespace_of
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.store.block_table import BlockTable
from holdfast.store.sealing import Openable
from holdfast.store.unlisted_records import UnlistedRecord
from holdfast.store.verify import verify_record
from holdfast.tiers.base import (
    NOWHERE,
    Erasable,
    LocalTier,
    Replaceable,
    SurvivingRecord,
    TierGet,
    medium_of,
)

_log = logging.getLogger("holdfast.store")


class RecoveryPass:
    """One pass over the survivors of some tiers, on a thread of its own.

    `numbers`: the tiers. `at`: the one that is being read, 0 before the first. `indexed`: by row, a
    hash of the key and place of its survivor on this tier; 0: none. `medium`: identity of the
    medium of this tier, see `Replaceable.medium`. `stop`: whether the pass is to end early.
    `given_up`: whether another pass goes on in its place; set under the store's lock.
    """

    def __init__(self, run: Callable[[RecoveryPass], None], numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.at = 0
        self.indexed = array("q")
        self.medium = b""
        self.stop = threading.Event()
        self.given_up = threading.Event()
        self.is_over = False
        self._thread = threading.Thread(
            target=self._run, args=(run,), name="holdfast-recover", daemon=True
        )

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if none can be started."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the pass has begun and may still find blocks."""
        return self._thread.is_alive() and not self.is_over

    def left(self) -> Sequence[int]:
        """Return the tiers after the one that is being read."""
        return self.numbers[self.numbers.index(self.at) + 1 :]

    def join(self) -> None:
        """Wait until the thread ends, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, run: Callable[[RecoveryPass], None]) -> None:
        try:
            run(self)
        finally:
            self.is_over = True


class Recovery:
    """A background pass over the survivors of every tier below the host, and of replaced media."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._stop = threading.Event()
        self._pass = RecoveryPass(self._run_first, range(1, len(table.lower) + 1))
        """The only pass at a time, but for those that were given up."""
        self._is_started = False
        self._first_over = threading.Event()
        self._began_s = 0.0
        self.blocks = 0
        self.dropped = 0
        """Survivors that were freed because their fingerprint was dropped."""
        self.unopened = 0
        """Survivors that keep their places, because another key ring may open them."""
        self._ended_early = False
        """Whether a pass was stopped or failed."""
        self.seconds: float | None = None

    def start(self) -> None:
        """Begin; the store serves during recovery."""
        self._began_s = self._table.clock.now()
        self._pass.start()
        self._is_started = True

    @property
    def is_complete(self) -> bool:
        """Whether every survivor of every medium was reached."""
        return self.seconds is not None and not self.is_running and not self._ended_early

    @property
    def is_running(self) -> bool:
        """Whether the pass has begun and may still find blocks."""
        return self._pass.is_running

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the first pass; False if it still runs after `timeout_s`.

        Returns True at once before `start`.
        """
        return not self._is_started or self._first_over.wait(timeout_s)

    def recover_replaced(self) -> None:
        """Begin a pass over media that replaced others since the start, one pass at a time."""
        due = [
            number
            for number, tier in enumerate(self._table.lower, start=1)
            if isinstance(tier, Replaceable) and tier.has_survivors()
        ]
        if not due or self.is_running or self._stop.is_set():
            return
        self._pass = RecoveryPass(self._recover_tiers, due)
        self._pass.start()

    def give_up_hung_call(self, number: int) -> None:
        """Go on after tier `number` has lost its drive, though a call of it may never return.

        What the drive held is lost. A pass that reads it ends when its call does, and another one
        reads the tiers after it.
        """
        with self._table.lock:  # from now on, the former pass indexes nothing
            former = self._pass
            if not former.is_running or former.at != number or self._stop.is_set():
                return
            run = self._recover_tiers if self._first_over.is_set() else self._run_first
            following = RecoveryPass(run, former.left())
            try:
                following.start()
            except RuntimeError as error:
                _log.warning(
                    "%s: no thread to recover the tiers after a lost drive tier=%s; they are "
                    "recovered when the call on it has ended; raise the limit of threads",
                    *(error, self._table.tier_name(number)),
                )
                return
            self._pass = following
            former.given_up.set()
            former.stop.set()

    def close(self) -> None:
        """Stop early if need be. A pass that was given up ends with its call."""
        self._stop.set()
        self._pass.stop.set()
        self._pass.join()

    def _recover_tiers(self, this: RecoveryPass) -> None:
        """Index the survivors of local tiers."""
        for number in this.numbers:
            with self._table.lock:
                if this.given_up.is_set():
                    return
                this.at, this.indexed = number, array("q")
            tier = self._table.lower[number - 1]
            if not isinstance(tier, LocalTier):
                continue
            this.medium = medium_of(tier)
            unopened = self.unopened
            try:  # one by one: a tier keeps only the last one that it yielded from reuse
                for survivor in tier.survivors():
                    if this.stop.is_set():
                        self._ended_early |= not this.given_up.is_set()
                        break
                    if not self._table.sealing.predates_sealing(survivor.header):
                        self._index(this, survivor)
                        continue
                    if isinstance(tier, Erasable):
                        tier.wipe(survivor)
                    tier.free([survivor.place])
            except Exception:  # noqa: BLE001  # a tier that cannot be scanned has no survivors
                if this.given_up.is_set():
                    return
                self._ended_early = True
                _log.exception(
                    "recovery of tier=%s ended early: blocks that it did not reach are misses "
                    "until the store is opened again",
                    tier.name,
                )
            if self.unopened > unopened:
                _log.warning(
                    "tier %s: records sealed with data keys that the key ring never had "
                    "records=%d; they are misses, and kept until the tier needs their space; "
                    "restore the `keyring` file and the `seal` that they were written with",
                    *(tier.name, self.unopened - unopened),
                )

    def _run_first(self, this: RecoveryPass) -> None:
        """Index the survivors of all tiers, or of the rest after a pass that was given up."""
        try:
            self._recover_tiers(this)
            if this.given_up.is_set():
                return
            self.seconds = self._table.clock.now() - self._began_s
            if any(isinstance(tier, LocalTier) for tier in self._table.lower):
                _log.info(
                    "recovered: %d blocks in %.3f s; freed %d that were dropped",
                    *(self.blocks, self.seconds, self.dropped),
                )
        finally:
            if not this.given_up.is_set():
                self._first_over.set()

    def _index(self, this: RecoveryPass, survivor: SurvivingRecord) -> None:
        """Index one survivor; of two records of a block the later one that is intact."""
        if self._index_unless_second(this, survivor):
            return
        outcome = self._check(this.at, survivor)
        # A sealed record whose domain has no keys at the moment passes: it is the later one.
        if outcome in (Outcome.OK, Outcome.UNREADABLE):
            self._index_unless_second(this, survivor, replaces=True)
            return
        with self._table.lock:
            dropped = self._table.drops.applies(namespace_of(survivor.header), this.medium)
            if dropped or outcome in (Outcome.CORRUPT, Outcome.MISS):
                self._table.free_place(this.at, survivor.place)
            elif not this.given_up.is_set():
                self._keep_unlisted(this.at, survivor)

    def _check(self, number: int, survivor: SurvivingRecord) -> Outcome:
        """Read a survivor and verify it, as far as the keys at hand can tell."""
        table, (header, place) = self._table, survivor
        namespace = namespace_of(header)
        record = aligned_buffer(namespace.slot_bytes)
        get = TierGet(place, header.key, record, namespace, is_use=False)
        (outcome,) = table.lower[number - 1].read([get])
        if outcome is not Outcome.OK:
            return outcome
        return verify_record(table, record, header.key, namespace, number)

    def _keep_unlisted(self, number: int, survivor: SurvivingRecord) -> None:
        """Let a survivor keep its place without listing its block; call under the lock."""
        header, place = survivor
        record = UnlistedRecord(namespace_of(header), header.key, header.stored_bytes)
        self._table.unlisted.add(number, place, record)

    def _index_unless_second(
        self, this: RecoveryPass, survivor: SurvivingRecord, *, replaces: bool = False
    ) -> bool:
        """Index one survivor; False if another one of its block is indexed, unless it replaces it.

        Otherwise returns True, also for a survivor that is freed, kept without being indexed, or
        lost with its drive.
        """
        table, (header, place) = self._table, survivor
        number, indexed = this.at, this.indexed
        with table.lock:
            if this.given_up.is_set():
                return True
            openable, namespace = table.sealing.openable(header), namespace_of(header)
            if openable is Openable.NEVER:
                table.free_place(number, place)
                return True
            if table.drops.applies(namespace, this.medium):
                row = table.index.find(namespace, header.key)
                if row < 0 or table.copies.place(row, number) != place:  # not written since
                    table.free_place(number, place)
                    self.dropped += 1
                return True
            if openable is Openable.WITH_ANOTHER_RING:
                self._keep_unlisted(number, survivor)
                self.unopened += 1
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
