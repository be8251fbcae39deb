"""The disk tier: records in the regions of one preallocated file, recovered after a crash.

    reserve (state only) -> write -> footer of a full region -> snapshot at intervals -> close
    read                 <- survivors: footers, or a scan of regions without a footer

A region gets its footer when it is full. A snapshot lists the records freed since the footers were
written. If there are too many for a snapshot, the footers of the regions with the most freed
records are rewritten without them. A crash during such a write leaves a region without a footer; a
restart then scans the region.

By itself the tier flushes superblocks only: blocks can be recomputed, so a power cut may lose
blocks but never yields a wrong one. Every record contains the generation of its region's life;
every read checks it, and the record's key.

`flush` is for durable blocks, see `record_flush`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.blocks.envelope import Header, header_of_record, read_header, stamp
from holdfast.buffers import aligned_buffer
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError, FormatError, Outcome
from holdfast.failpoints import reach
from holdfast.tiers.base import (
    NOWHERE,
    Candidate,
    Place,
    ReservedPlaces,
    SurvivingRecord,
    TierGet,
    TierPut,
    TierUsage,
)
from holdfast.tiers.disk.extent_io import CALL_BYTES_MIN, ByteSpan, Extents, transfer
from holdfast.tiers.disk.file import DiskConfig, check_superblock, open_file
from holdfast.tiers.disk.read_limit import ReadLimit
from holdfast.tiers.disk.record_flush import InCall, RecordFlush
from holdfast.tiers.disk.recovery import (
    read_footer,
    read_state,
    read_superblock,
    recover_regions,
)
from holdfast.tiers.disk.region import (
    FREED_PER_REGION,
    INCARNATION_SHIFT,
    SECTOR,
    SUPERBLOCKS,
    RegionEntry,
    RegionLife,
    RegionSnapshot,
    pack_footer,
    pack_region_header,
    pack_snapshot,
    pack_superblock,
    parse_footer,
)
from holdfast.tiers.disk.region_log import RecordExtent, RegionLog
from holdfast.tiers.disk.write_stop import WriteStop
from holdfast.tiers.gate import MediumGate
from holdfast.workers import workers

UNREAD_MAX = 32
"""Records that cannot be read, without one between them that can, at which a medium has failed."""


class DiskTier:
    """See `tiers.base.LocalTier` for the promises. A freed block may reappear after a crash.

    The constructor raises ConfigError, FormatError or BusyError, without changing the file.
    `direct` is whether I/O bypasses the page cache. After many failed writes, writes stop and are
    tried again now and then; see `write_stop`. `first_place` is that of region 0.
    """

    def __init__(
        self,
        config: DiskConfig,
        clock: Clock | None = None,
        open_extents: Callable[[DiskConfig], Extents] = open_file,
        first_place: int = 0,
    ) -> None:
        self.name = config.name
        self._first_place = first_place
        self._config = config
        self._clock = clock or SystemClock()
        self._mutex = threading.Lock()
        self._gate = MediumGate()
        self._read_limit = ReadLimit(config.read_bytes_per_s)
        self._snapshot_mutex = threading.Lock()
        self._writes = WriteStop(self.name, self._clock)
        self._failures = self._read_bytes = self._written_bytes = 0
        self._writing = self._reading = 0
        self._unread = 0
        self._unread_error: OSError | None = None
        """Records that could not be read since the last one that could, and the last error."""
        self._changed = False
        self._not_rewritable: set[RegionLife] = set()
        """Regions whose footer could not be rewritten; there is no second attempt."""
        self._extents = open_extents(config)
        with contextlib.ExitStack() as undo:
            undo.callback(self._extents.close)
            self._readers = workers(config.reader_threads, f"holdfast-{self.name}-read")
            undo.callback(self._readers.shutdown)
            self._writers = workers(config.writer_threads, f"holdfast-{self.name}-write")
            undo.callback(self._writers.shutdown)
            self._open()
            undo.pop_all()
        self.direct = self._extents.direct

    def _open(self) -> None:
        """Read the state of the file, then begin a new incarnation, before any region is used."""
        superblock = check_superblock(self._extents, self._config)
        state = read_state(self._extents, superblock, self._readers)
        latest = max(state.generations) >> INCARNATION_SHIFT
        incarnation = max(superblock.incarnation, latest) + 1
        self._superblock = superblock._replace(incarnation=incarnation)
        block = _aligned(pack_superblock(self._superblock))
        try:
            self._extents.write(incarnation % SUPERBLOCKS * SECTOR, [block])
            self._extents.flush()
            reach("disk_open")
        except OSError as error:
            raise ConfigError(
                f'{self._config.setting}.path: "{self._config.path}" cannot be written: {error}; '
                "replace the device or choose another folder"
            ) from error
        first = incarnation << INCARNATION_SHIFT | 1
        self._regions = RegionLog(superblock.geometry, superblock.uuid, first, self._first_place)
        self._flushes = RecordFlush(
            self._extents, self._regions, self._mutex, self._readers, self._gate
        )
        self._unscanned = self._regions.add_unscanned(state.generations, state.empty)
        for index in state.unreadable:
            self._regions.retire(index)
        self._state = state
        self._recovered = not self._unscanned
        self._sequence = state.sequence
        self._snapshot_at = self._clock.now()

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        with self._mutex:
            if self._gate.is_shut or not self._writes.allows():
                return ReservedPlaces([NOWHERE] * len(sizes), [])
            return self._regions.reserve(sizes)

    def candidates(self, nbytes: int) -> list[Candidate]:
        with self._mutex:
            return self._regions.candidates(nbytes)

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        with self._gate.enter() as admitted:
            if not admitted:
                return [Outcome.GONE] * len(batch)
            outcomes = self._write(batch)
            self._write_footers()
            if self._clock.now() - self._snapshot_at >= self._config.snapshot_s:
                self._save_snapshot()
            return outcomes

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        # The wait for the rate limit is outside the gate, so that a close does not wait for it.
        limited = self._read_limit.paced(self._stored_bytes(batch))
        with limited, self._gate.enter() as admitted:
            return self._read(batch) if admitted else [Outcome.GONE] * len(batch)

    def free(self, places: Sequence[Place]) -> None:
        with self._mutex:
            self._changed = True
            self._regions.free(places)

    def survivors(self) -> Iterator[SurvivingRecord]:
        lives, self._unscanned = self._unscanned, []
        regions = recover_regions(
            self._extents, self._superblock.geometry, lives, self._state.footers,
            self._readers, self._gate,
        )  # fmt: skip
        for life, records, footer, error in regions:
            if error:
                self._count_failures(error)
            freed = self._state.freed.pop(life.region, set())
            with self._mutex:
                # The records of a region that was reclaimed before its scan are lost.
                if self._gate.is_shut or not self._regions.begin_scan(life):
                    continue
                alive = self._regions.load(life, records, freed, footer)
            try:
                yield from alive
            finally:
                with self._mutex:
                    self._regions.end_scan(life)
        with self._mutex:
            self._recovered = True

    def wipe(self, survivor: SurvivingRecord) -> None:
        header, place = survivor
        with self._gate.enter() as admitted:
            if not admitted:
                return
            zeros = aligned_buffer(header.stored_bytes)
            with self._mutex:
                held = self._regions.held(place, header.key, len(zeros))
            if held is not None:
                try:
                    self._extents.write(held.offset, [zeros[: held.nbytes]])
                except OSError as error:
                    self._count_failed_writes(error)

    def usage(self) -> TierUsage:
        geometry = self._superblock.geometry
        with self._mutex:
            return TierUsage(
                capacity_bytes=geometry.region_count * geometry.region_bytes,
                used_bytes=self._regions.used_bytes,
                records=self._regions.records,
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
                failures=self._failures,
                writes_stopped=self._writes.reason(),
            )

    @property
    def read_only(self) -> bool:
        """Whether writes have stopped, because too many failed, and none has succeeded since."""
        return self._writes.is_stopped

    def accepts_writes(self) -> bool:
        return self._writes.allows()

    def close(self) -> None:
        if not self._gate.shut():
            return
        with self._mutex:
            self._regions.close_open()
        self._write_footers()
        self._save_snapshot()
        self._release()

    def abandon(self) -> None:
        """Release the medium without writing to it. Waits until I/O in progress has ended."""
        if self._gate.shut():
            self._release()

    def medium_failure(self) -> str:
        """Return why the medium cannot be used; empty if it can. Reads its superblocks."""
        with self._mutex:
            unread, error = self._unread, self._unread_error
        if unread >= UNREAD_MAX:
            return f"the last {unread} reads of records failed: {error}"
        with self._gate.enter() as admitted:
            if not admitted:
                return ""
            try:
                superblock = read_superblock(self._extents)
            except FormatError as failure:
                return f"{failure}"
        return "" if superblock.uuid == self.uuid else "its file was overwritten by another one"

    @property
    def uuid(self) -> bytes:
        """Identity of the file, given when it was formatted."""
        return self._superblock.uuid

    def record_frees(self) -> bool:
        with self._gate.enter() as admitted:
            if not admitted:
                return False
            with self._mutex:
                self._regions.close_freed()
            self._write_footers()
            with self._mutex:
                if self._regions.frees_without_footer():  # a write in its region is in progress
                    return False
            return self._save_snapshot()

    def flush(
        self, places: Sequence[Place], in_call: InCall = contextlib.nullcontext
    ) -> list[bool]:
        """Flush the file; a failure counts as one of a write of each of these records."""
        with self._gate.enter() as admitted:
            if not admitted:
                return [False] * len(places)
            safe, error = self._flushes.flush(places, in_call)
            if error is not None:
                self._count_failed_writes(*[error] * max(1, len(places)))
            return safe

    def verify_recovered(
        self,
        places: Sequence[Place],
        within_s: float,
        in_call: InCall = contextlib.nullcontext,
    ) -> int:
        """Read and verify records of an earlier process, a few at a time in one `in_call` each."""
        with self._gate.enter() as admitted:
            if not admitted:
                return 0
            done, failed = self._flushes.verify_recovered(places, within_s, in_call)
            self._count_failures(*failed)
            return done

    def give_up_copy(self) -> None:
        self._extents.close()

    # Writing.

    def _write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        outcomes = [Outcome.GONE] * len(batch)
        with self._mutex:
            claims = [self._regions.claim(put.place) for put in batch]
            self._writing += 1
            # Concurrent writes share the threads evenly, each including the calling thread.
            threads = max(1, self._config.writer_threads // self._writing)
        written: list[Header | None] = [None] * len(batch)
        try:
            spans, headers = list[ByteSpan](), dict[int, Header]()
            lives = dict[int, RegionLife]()
            for i, (put, claim) in enumerate(zip(batch, claims, strict=True)):
                if claim is None:
                    continue
                stamped = self._stamp(put, claim)
                if isinstance(stamped, Outcome):
                    outcomes[i] = stamped
                    continue
                headers[i], lives[i] = stamped, claim.life
                spans.append(ByteSpan(claim.offset, put.record, i))
            missing = self._missing_headers(set(lives.values()))
            spans += self._header_spans(missing)
            # Beside a read that a request waits for, only the calling thread goes on.
            failed = transfer(
                self._writers, threads, spans, self._extents.write, helps=lambda: not self._reading
            )
            broken = self._headers_ended(missing, failed)
            self._count_failed_writes(
                *(error for i, error in failed.items() if i < 0 or lives[i] not in broken)
            )
            if spans and not failed:
                self._note_written()
            for i, header in headers.items():
                if i not in failed and lives[i] not in broken:
                    outcomes[i], written[i] = Outcome.OK, header
        finally:
            with self._mutex:
                self._writing -= 1
                for put, claim, header_written in zip(batch, claims, written, strict=True):
                    if claim:
                        self._regions.finish(put.place, header_written)
                        self._written_bytes += len(put.record) if header_written else 0
        return outcomes

    def _stamp(self, put: TierPut, claim: RecordExtent) -> Header | Outcome:
        """Write the generation into a record; return its header, or why it is not written.

        CORRUPT: it is no record of the reserved length.
        """
        if not self._writes.allows():
            return Outcome.FULL
        header = header_of_record(put.record)
        if header is None or header.stored_bytes != len(put.record):
            return Outcome.CORRUPT
        if len(put.record) != claim.nbytes:
            return Outcome.CORRUPT
        stamp(put.record, claim.life.generation)
        return header

    def _missing_headers(self, lives: set[RegionLife]) -> dict[int, RegionLife]:
        """Return the lives whose region has no header on the medium, by the owner of its span."""
        with self._mutex:
            missing = [life for life in lives if not self._regions.has_header(life)]
        return {-1 - number: life for number, life in enumerate(missing)}

    def _header_spans(self, missing: Mapping[int, RegionLife]) -> list[ByteSpan]:
        """Return the headers to write, one before the records of each region.

        Under the header of an earlier life records are ignored. So a record counts as written only
        if the header of its region is written, too.
        """
        region_at = self._superblock.geometry.region_at
        return [
            ByteSpan(region_at(life.region), _aligned(pack_region_header(life)), owner)
            for owner, life in missing.items()
        ]

    def _headers_ended(
        self, missing: Mapping[int, RegionLife], failed: Mapping[int, OSError]
    ) -> set[RegionLife]:
        """Note which headers were written; return the lives whose header was not."""
        if missing:
            reach("region_header")
        with self._mutex:
            for owner, life in missing.items():
                if owner in failed:
                    self._regions.header_failed(life)
                else:
                    self._regions.header_written(life)
        return {life for owner, life in missing.items() if owner in failed}

    # Footers and snapshots. No I/O while the mutex is held.

    def _write_footers(self) -> None:
        """Write the footers of full regions."""
        while self._writes.allows():
            with self._mutex:
                full = self._regions.next_full()
            if full is None:
                return
            life, entries = full
            reach("region_close")
            written = 0
            try:
                written = self._write_footer(life, entries)
            except OSError as error:
                self._count_failed_writes(error)
            reach("region_closed")
            with self._mutex:
                self._regions.footer_written(life, written)
                self._changed = True

    def _prune_footers(self) -> None:
        """Rewrite footers without dead records, most dead first, until the rest fits a snapshot."""
        geometry = self._superblock.geometry
        with self._mutex:
            dead = self._regions.dead()
        self._not_rewritable.intersection_update(dead)
        left = sum(dead.values())
        for life in sorted(dead, key=dead.__getitem__, reverse=True):
            if not self._writes.allows() or left <= FREED_PER_REGION * geometry.region_count:
                return
            if life in self._not_rewritable:
                continue
            with self._mutex:
                alive = self._regions.begin_prune(life)
            if alive is None:
                left -= dead[life]
                continue
            written = 0
            try:
                footer = read_footer(self._extents, geometry, life)
                listed = parse_footer(footer, life, geometry.region_sectors) if footer else None
                if listed is not None:
                    entries = [entry for _, entry in listed if entry.sector in alive]
                    written = self._write_footer(life, entries)
            except OSError as error:
                self._count_failed_writes(error)
            with self._mutex:
                self._regions.end_prune(life, alive, written)
            if written:
                left -= dead[life]
            else:
                self._not_rewritable.add(life)

    def _write_footer(self, life: RegionLife, entries: list[RegionEntry]) -> int:
        """Write a footer at the end of its region; return its bytes."""
        geometry, footer = self._superblock.geometry, _aligned(pack_footer(life, entries))
        end = geometry.region_at(life.region) + geometry.region_bytes
        self._extents.write(end - len(footer), [footer])
        return len(footer)

    def _save_snapshot(self) -> bool:
        """Overwrite the older of the two snapshots, if regions or records have changed.

        Returns whether the medium has the present state. Does nothing before every region is
        scanned, because the new snapshot would lack the freed records of unscanned regions.
        """
        geometry = self._superblock.geometry
        with self._snapshot_mutex:
            with self._mutex:
                self._snapshot_at = self._clock.now()
                if not self._writes.allows() or not self._recovered:
                    return False
                if not self._changed:
                    return True
                self._changed = False
            self._prune_footers()
            with self._mutex:
                self._sequence += 1
                snapshot = RegionSnapshot(
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
                self._count_failed_writes(error)
                with self._mutex:
                    self._changed = True
                return False
            return True

    # Reading.

    def _read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        outcomes, is_wanted = [Outcome.MISS] * len(batch), any(get.is_use for get in batch)
        with self._mutex:
            extents = [self._regions.held(get.place, get.key, len(get.into)) for get in batch]
            # As for writes: more threads for a batch would only divide it into more system calls.
            self._reading += is_wanted
            threads = max(1, self._config.reader_threads // max(1, self._reading))
        spans = [
            ByteSpan(extent.offset, get.into[: extent.nbytes], i)
            for i, (get, extent) in enumerate(zip(batch, extents, strict=True))
            if extent
        ]
        try:
            if is_wanted:
                failed = transfer(self._readers, threads, spans, self._extents.read)
            else:
                # One short call at a time: the drive's queue is short when a request comes.
                failed = transfer(self._readers, 1, spans, self._extents.read, CALL_BYTES_MIN)
        finally:
            with self._mutex:
                self._reading -= is_wanted
        self._count_failures(*failed.values())
        if spans:
            self._note_read(len(spans), failed)
        for i in failed:
            outcomes[i] = Outcome.GONE
        with self._mutex:
            for i, extent in enumerate(extents):
                if extent is None or i in failed:
                    continue
                self._read_bytes += extent.nbytes
                current = self._regions.is_current(extent.life)
                if current and _may_be(batch[i].into, batch[i].key, extent.life):
                    outcomes[i] = Outcome.OK
        return outcomes

    # Internal.

    def _stored_bytes(self, batch: Sequence[TierGet]) -> int:
        """Return the bytes that a read limit counts: those on the medium, not those of the slots.

        0 without a limit.
        """
        if math.isinf(self._config.read_bytes_per_s):
            return 0
        with self._mutex:
            extents = [self._regions.held(get.place, get.key, len(get.into)) for get in batch]
        return sum(extent.nbytes for extent in extents if extent)

    def _count_failures(self, *errors: OSError) -> None:
        """Count records that could not be read. They do not stop writes."""
        if errors:
            with self._mutex:
                self._failures += len(errors)
                self._writes.warn(len(errors), errors[0])

    def _note_read(self, records: int, failed: Mapping[int, OSError]) -> None:
        """Count the records that could not be read since the last one that could."""
        if len(failed) < records:
            self._unread = 0
        else:
            with self._mutex:
                self._unread += records
                self._unread_error = next(iter(failed.values()))

    def _release(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        self._extents.close()

    def _count_failed_writes(self, *errors: OSError) -> None:
        """Count records that could not be written; too many stop writes."""
        if errors:
            with self._mutex:
                self._failures += len(errors)
                self._writes.failed(len(errors), errors[0])

    def _note_written(self) -> None:
        if self._writes.is_stopped:
            with self._mutex:
                self._writes.succeeded()


def _aligned(blob: bytes) -> memoryview:
    buffer = aligned_buffer(len(blob))
    buffer[:] = blob
    return buffer


def _may_be(record: memoryview, key: bytes, life: RegionLife) -> bool:
    """Return whether a record is that of `key` in this life, or its header is unreadable.

    A record with an unreadable header is damaged; the caller finds it corrupt when it verifies it.
    """
    try:
        header, generation = read_header(record)
    except FormatError:
        return True
    return header.key == key and generation == life.generation
