"""The disk tier: records in the regions of one preallocated file, warm after a crash.

    reserve (state) -> write -> seal: footer -> snapshot now and then -> close
                       read <- survivors: footers, or a scan where there is no footer

Nothing here is flushed except superblocks: blocks can be recomputed, so a power cut may cost
blocks but never shows a wrong one. Every record carries the generation of its region's life, and
every read is checked for that and for its key.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.blocks.envelope import HEADER_BYTES, read_header, record_bytes, stamp
from holdfast.buffers import aligned_buffer
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError, FormatError, Outcome
from holdfast.failpoints import reach
from holdfast.tiers.base import NOWHERE, Get, Place, Put, Reserved, Survivor, Usage
from holdfast.tiers.disk.extent_io import Extents, Span, spread
from holdfast.tiers.disk.file import DiskConfig, check_superblock, open_file
from holdfast.tiers.disk.footers import Footers
from holdfast.tiers.disk.recovery import Found, Recovered, look, recover_regions
from holdfast.tiers.disk.region import (
    INCARNATION_SHIFT,
    SECTOR,
    SUPERBLOCKS,
    Life,
    Snapshot,
    pack_region_header,
    pack_snapshot,
    pack_superblock,
)
from holdfast.tiers.disk.region_log import Claim, RegionLog
from holdfast.tiers.gate import Gate
from holdfast.workers import workers

FAILURES_MAX = 8
FAILURES_WITHIN_S = 600.0
"""So many failed records in that time make the tier read-only."""

_logger = logging.getLogger(__name__)


class DiskTier:
    """See `holdfast.tiers.base.Tier` for the promises; a freed block may come back after a crash.

    Raises ConfigError, FormatError or BusyError when made, and the file is then as it was. `direct`
    and `why` say how the medium is reached, `read_only` whether it failed too often to write to.
    """

    def __init__(
        self,
        config: DiskConfig,
        clock: Clock | None = None,
        open_extents: Callable[[DiskConfig], Extents] = open_file,
    ) -> None:
        self.name = config.name
        self.read_only = False
        self._config = config
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._gate = Gate()
        self._header_mutex = threading.Lock()
        self._snapshot_mutex = threading.Lock()
        self._failed_at: deque[float] = deque(maxlen=FAILURES_MAX)
        self._failures = self._read_bytes = self._written_bytes = self._writing = 0
        self._changed = False
        self._extents = open_extents(config)
        with contextlib.ExitStack() as undo:
            undo.callback(self._extents.close)
            self._readers = workers(config.reader_threads, f"{self.name}-read")
            undo.callback(self._readers.shutdown)
            self._writers = workers(config.writer_threads, f"{self.name}-write")
            undo.pop_all()
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        self.direct, self.why = self._extents.direct, self._extents.why

    def _open(self) -> None:
        """Look at what is there, then begin a new incarnation; only then may anything be taken."""
        superblock = check_superblock(self._extents, self._config)
        found = look(self._extents, superblock, self._readers)
        latest = max(found.generations) >> INCARNATION_SHIFT
        incarnation = max(superblock.incarnation, latest) + 1
        self._superblock = superblock._replace(incarnation=incarnation)
        block = _aligned(pack_superblock(self._superblock))
        try:
            self._extents.write(incarnation % SUPERBLOCKS * SECTOR, [block])
            self._extents.flush()
            reach("disk_open")
        except OSError as error:
            raise ConfigError(
                f'{self._config.setting}.path: "{self._config.path}" can not be written: {error}; '
                "replace the device or choose another folder"
            ) from error
        first = incarnation << INCARNATION_SHIFT | 1
        self._regions = RegionLog(superblock.geometry, superblock.uuid, first)
        self._footers = Footers(
            self._extents, superblock.geometry, self._regions, self._mutex, self._may_go_on_after
        )
        self._lives = self._regions.adopt(found.generations, found.empty)
        for index in found.unreadable:
            self._regions.retire(index)
        self._found: Found = found
        self._recovered = not self._lives
        self._sequence = found.sequence
        self._snapshot_at = self._clock.now()

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        with self._mutex:
            if self._gate.is_shut or self.read_only:
                return Reserved([NOWHERE] * len(sizes), [])
            return self._regions.reserve(sizes)

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        if not self._gate.enter():
            return [Outcome.GONE] * len(batch)
        try:
            outcomes = self._write(batch)
            self._seal_due()
            if self._clock.now() - self._snapshot_at >= self._config.snapshot_s:
                self._save_snapshot()
            return outcomes
        finally:
            self._gate.leave()

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        if not self._gate.enter():
            return [Outcome.GONE] * len(batch)
        try:
            return self._read(batch)
        finally:
            self._gate.leave()

    def free(self, places: Sequence[Place]) -> None:
        with self._mutex:
            self._changed = True
            self._regions.free(places)

    def survivors(self) -> Iterator[Survivor]:
        lives, self._lives = self._lives, []
        regions = recover_regions(
            self._extents, self._superblock.geometry, lives, self._found.footers,
            self._readers, self._gate,
        )  # fmt: skip
        for recovered in regions:
            if recovered.error:
                self._count_failures({0: recovered.error})
            yield from self._revive(recovered)
        with self._mutex:
            self._recovered = True

    def wipe(self, survivor: Survivor) -> None:
        if not self._gate.enter():
            return
        header, place = survivor
        try:
            nothing = aligned_buffer(record_bytes(header.payload_bytes))
            with self._mutex:
                held = self._regions.held(place, header.key, len(nothing))
            if held is not None:
                self._extents.write(held.offset, [nothing[: held.nbytes]])
        except OSError as error:
            self._count_failures({0: error})
        finally:
            self._gate.leave()

    def usage(self) -> Usage:
        geometry = self._superblock.geometry
        with self._mutex:
            return Usage(
                capacity_bytes=geometry.region_count * geometry.region_bytes,
                used_bytes=self._regions.used_bytes,
                records=self._regions.records,
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
                failures=self._failures,
            )

    def close(self) -> None:
        if not self._gate.shut():
            return
        with self._mutex:
            self._regions.close_open()
        self._seal_due()
        self._save_snapshot()
        self._release()

    # Writing.

    def _write(self, batch: Sequence[Put]) -> list[Outcome]:
        outcomes = [Outcome.GONE] * len(batch)
        with self._mutex:
            claims = [self._regions.claim(put.place) for put in batch]
            self._writing += 1
            # Who writes beside others has a share of the threads, its own among them.
            threads = max(1, self._config.writer_threads // self._writing)
        heads = [b""] * len(batch)
        try:
            broken = self._begin_lives({claim.life for claim in claims if claim})
            spans = []
            for i, (put, claim) in enumerate(zip(batch, claims, strict=True)):
                if claim is None or claim.life in broken:
                    continue
                outcomes[i] = self._admit(put, claim)
                if outcomes[i] is Outcome.OK:
                    spans.append(Span(claim.offset, put.record, i))
            failed = spread(self._writers, threads, spans, self._extents.write)
            self._count_failures(failed)
            for i in failed:
                outcomes[i] = Outcome.GONE
            for span in spans:
                if span.owner not in failed:
                    heads[span.owner] = bytes(span.view[:HEADER_BYTES])
        finally:
            with self._mutex:
                self._writing -= 1
                for put, claim, head in zip(batch, claims, heads, strict=True):
                    if claim:
                        self._regions.finish(put.place, head)
                        self._written_bytes += len(put.record) if head else 0
        return outcomes

    def _admit(self, put: Put, claim: Claim) -> Outcome:
        """Stamp a record with its region's life; CORRUPT if it is no record of the length asked."""
        if self.read_only:
            return Outcome.FULL
        try:
            header, _ = read_header(put.record)
        except FormatError:
            return Outcome.CORRUPT
        if not record_bytes(header.payload_bytes) == len(put.record) == claim.nbytes:
            return Outcome.CORRUPT
        stamp(put.record, claim.life.generation)
        return Outcome.OK

    def _begin_lives(self, lives: set[Life]) -> set[Life]:
        """Write the headers of regions newly taken; return the lives whose header failed.

        A record of a life is written only after its region's header: an older header disowns it.
        """
        broken = set()
        for life in lives:
            with self._header_mutex:
                if self._regions.has_header(life):
                    continue
                offset = self._superblock.geometry.region_at(life.region)
                try:
                    self._extents.write(offset, [_aligned(pack_region_header(life))])
                    reach("region_header")
                except OSError as error:
                    self._count_failures({0: error})
                    broken.add(life)
                with self._mutex:
                    if life in broken:
                        self._regions.abandon(life)
                    else:
                        self._regions.begun(life)
        return broken

    def _seal_due(self) -> None:
        if not self.read_only and self._footers.write_due():
            with self._mutex:
                self._changed = True

    def _save_snapshot(self) -> None:
        """Write the other snapshot, if there is news.

        Not before every region is scanned: it would forget what the last one says was freed.
        """
        geometry = self._superblock.geometry
        with self._snapshot_mutex:
            with self._mutex:
                self._snapshot_at = self._clock.now()
                if not self._changed or self.read_only or not self._recovered:
                    return
                self._changed = False
            self._footers.prune()
            with self._mutex:
                self._sequence += 1
                snapshot = Snapshot(
                    self._superblock.uuid,
                    self._sequence,
                    self._regions.rows(),
                    self._regions.freed(),
                )
            blob = _aligned(pack_snapshot(snapshot, geometry.snapshot_bytes))
            reach("snapshot")
            try:
                self._extents.write(geometry.snapshot_at(snapshot.sequence % 2), [blob])
                reach("snapshot_written")
            except OSError as error:
                self._count_failures({0: error})

    # Reading.

    def _read(self, batch: Sequence[Get]) -> list[Outcome]:
        outcomes = [Outcome.MISS] * len(batch)
        with self._mutex:
            helds = [self._regions.held(get.place, get.key, len(get.into)) for get in batch]
        spans = [
            Span(held.offset, get.into[: held.nbytes], i)
            for i, (get, held) in enumerate(zip(batch, helds, strict=True))
            if held
        ]
        threads = self._config.reader_threads
        failed = spread(self._readers, threads, spans, self._extents.read)
        self._count_failures(failed)
        for span in spans:
            if span.owner in failed:
                outcomes[span.owner] = Outcome.GONE
        with self._mutex:
            for i, held in enumerate(helds):
                if held is None or i in failed:
                    continue
                self._read_bytes += held.nbytes
                current = self._regions.is_current(held.life)
                if current and _is_of(batch[i].into, batch[i].key, held.life):
                    outcomes[i] = Outcome.OK
        return outcomes

    def _revive(self, recovered: Recovered) -> Iterator[Survivor]:
        """Take over a region and yield its records; it is not reclaimed in the meantime.

        If it was reclaimed before, nobody knew its records: they are left out.
        """
        life, records, footer, _ = recovered
        freed = self._found.freed.get(life.region, set())
        with self._mutex:
            if self._gate.is_shut or not self._regions.begin_scan(life):
                return
            alive = self._regions.load(life, records, freed, footer)
        try:
            yield from alive
        finally:
            with self._mutex:
                self._regions.end_scan(life)

    # Inside.

    def _may_go_on_after(self, error: OSError) -> bool:
        """Count a failure; return whether more may be written."""
        self._count_failures({0: error})
        return not self.read_only

    def _count_failures(self, failed: Mapping[int, OSError]) -> None:
        """Count failed records; too many in a while, and nothing more is written."""
        if not failed:
            return
        now = self._clock.now()
        with self._mutex:
            self._failures += len(failed)
            self._failed_at.extend([now] * len(failed))
            full = len(self._failed_at) == FAILURES_MAX
            newly = full and now - self._failed_at[0] <= FAILURES_WITHIN_S and not self.read_only
            self.read_only = self.read_only or newly
        error = next(iter(failed.values()))
        _logger.warning("tier %s: %d records failed: %s", self.name, len(failed), error)
        if newly:
            _logger.error("tier %s is read-only now: %d failures", self.name, self._failures)

    def _release(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        self._extents.close()


def _aligned(blob: bytes) -> memoryview:
    buffer = aligned_buffer(len(blob))
    buffer[:] = blob
    return buffer


def _is_of(record: memoryview, key: bytes, life: Life) -> bool:
    """Whether a record is `key`'s, of this life; a header that can not be read is, too.

    What lies there is damaged then, and the caller who verifies it learns that it is corrupt.
    """
    try:
        header, generation = read_header(record)
    except FormatError:
        return True
    return header.key == key and generation == life.generation
