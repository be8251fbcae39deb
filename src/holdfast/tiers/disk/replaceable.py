"""A disk tier whose drive may fail, go away and be replaced while the node runs.

    in use --(another file at the path; superblocks or many records unreadable)--> away
    in use --(a call does not return for `HANG_S`)-------------------------------> away
    away   --(the folder at the path is empty, or has blocks of its own)---------> in use
    in use --(detach)--> away, until another drive is at the path, or `replace`

A thread looks at the drive every `WATCH_S`. Each opened medium has places of its own, so a place on
a former medium is never mistaken for one on a later medium. The store learns by `lost` which copies
are gone, and by `has_survivors` that a medium with blocks was opened.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.errors import HoldfastError, Outcome
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
from holdfast.tiers.disk.calls_in_progress import PROBE_WAIT_S, CallsInProgress, DriveProbe
from holdfast.tiers.disk.extent_io import Extents
from holdfast.tiers.disk.file import (
    DiskConfig,
    check_file,
    check_space,
    file_uuid,
    open_file,
)
from holdfast.tiers.disk.folder import (
    FileIdentity,
    check_usable,
    file_identity,
    mount_point,
    why_not_same,
)
from holdfast.tiers.disk.tier import DiskTier

WATCH_S = 1.0
"""Time between two looks at the drive, in seconds."""

REOPEN_MAX_S = 30.0
"""Longest pause before a medium that failed again is opened again, in seconds."""

STEADY_S = 600.0
"""Time after which a medium counts as steady: its next failure begins with a short pause."""

RELEASE_S = 5.0
"""Longest wait for the former medium's I/O to end, in seconds; then it ends in the background."""

MEDIUM_SHIFT = 40
"""place = medium << 40 | sector. 2**40 sectors are more than the largest tier has."""

_MEDIA_MAX = 1 << 22

_log = logging.getLogger("holdfast.tiers.disk")


class OpenedMedium(NamedTuple):
    """An opened medium: its tier, the identity of its file, when it was opened, calls under way."""

    disk: DiskTier
    identity: FileIdentity | None
    opened_at_s: float
    calls: CallsInProgress


class Absence(NamedTuple):
    """Why and since when a tier has no medium; `uuid` is that of the former one.

    `detached`: an operator has detached it, so it is not used again without being asked.
    """

    why: str
    since_s: float
    uuid: bytes
    detached: bool


class ReplaceableDisk:
    """See `tiers.base.Replaceable`. The constructor raises what `DiskTier` raises."""

    def __init__(
        self,
        config: DiskConfig,
        clock: Clock | None = None,
        open_extents: Callable[[DiskConfig], Extents] = open_file,
        watch_s: float = WATCH_S,
    ) -> None:
        self.name = config.name
        self._config = config
        self._clock = clock or SystemClock()
        self._open_extents = open_extents
        self._watch_s = watch_s
        self._mutex = threading.Lock()
        self._changing = threading.Lock()
        self._number = 0
        self._absence: Absence | None = None
        self._replaced: tuple[float, str] | None = None
        self._losses = 0
        self._loss_untold = self._survivors_due = False
        self._before = TierUsage(0, 0, 0)
        """The counters of former media."""
        self._probe: DriveProbe | None = None
        self._release: threading.Thread | None = None
        """Waits for the I/O of the medium that was lost last."""
        self._pause_s = watch_s
        self._retry_at_s = 0.0
        self._medium: OpenedMedium | None = self._open(0)
        self._mounted_at = mount_point(config.path)
        self._stop = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, name=f"holdfast-{self.name}-watch", daemon=True
        )
        self._watcher.start()

    # The promises of `LocalTier`, `Erasable`, `StopsWrites`, `RecordsFrees` and `Lockable`.

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        disk = self._disk()
        return disk.reserve(sizes) if disk else ReservedPlaces([NOWHERE] * len(sizes), [])

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        if (medium := self._medium) is None:
            return [Outcome.GONE] * len(batch)
        with medium.calls.one():
            outcomes = medium.disk.write(batch)
        return outcomes if self._medium is medium else [Outcome.GONE] * len(batch)

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        if (medium := self._medium) is None:
            return [Outcome.GONE] * len(batch)
        with medium.calls.one():
            return medium.disk.read(batch)

    def free(self, places: Sequence[Place]) -> None:
        if disk := self._disk():
            disk.free(places)

    def candidates(self, nbytes: int) -> list[Candidate]:
        disk = self._disk()
        return disk.candidates(nbytes) if disk else []

    def survivors(self) -> Iterator[SurvivingRecord]:
        with self._mutex:
            self._survivors_due = False
        if disk := self._disk():
            yield from disk.survivors()

    def wipe(self, survivor: SurvivingRecord) -> None:
        if disk := self._disk():
            disk.wipe(survivor)

    def accepts_writes(self) -> bool:
        disk = self._disk()
        return disk is not None and disk.accepts_writes()

    def record_frees(self) -> bool:
        if (medium := self._medium) is None:
            return False
        with medium.calls.one():
            return medium.disk.record_frees()

    def flush(self, places: Sequence[Place]) -> list[bool]:
        """Flush the medium. A place on a former medium holds no record, so it is not safe."""
        unsafe = [False] * len(places)
        if (medium := self._medium) is None:
            return unsafe
        safe = medium.disk.flush(places, medium.calls.one)
        return safe if self._medium is medium else unsafe

    def verify_recovered(self, places: Sequence[Place], within_s: float) -> int:
        """Verify what an earlier process wrote to the medium; 0 while there is none."""
        if (medium := self._medium) is None:
            return 0
        return medium.disk.verify_recovered(places, within_s, medium.calls.one)

    def usage(self) -> TierUsage:
        with self._mutex:
            medium, absence, before, replaced = (
                self._medium, self._absence, self._before, self._replaced,
            )  # fmt: skip
            losses = self._losses
        now_s, away = self._clock.now(), ""
        if medium is not None:
            usage = _sum(before, medium.disk.usage())
        else:
            usage = msgspec.structs.replace(before, capacity_bytes=self._config.capacity_bytes)
        if absence is not None:
            away = f"{now_s - absence.since_s:.0f} s ago: {absence.why}"
        since = f"{now_s - replaced[0]:.0f} s ago: {replaced[1]}" if replaced else ""
        return msgspec.structs.replace(usage, away=away, replaced=since, losses=losses)

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(RELEASE_S)
        with self._mutex:
            medium = self._medium
        if medium is not None:
            medium.disk.close()

    def give_up_copy(self) -> None:
        if (medium := self._medium) is not None:  # in a forked child: no lock
            medium.disk.give_up_copy()

    # The promises of `Replaceable`.

    def lost(self) -> Callable[[Place], bool] | None:
        with self._mutex:
            if not self._loss_untold:
                return None
            self._loss_untold = False
            number = self._number if self._medium is not None else None
        return lambda place: place >> MEDIUM_SHIFT != number

    def medium(self) -> bytes:
        disk = self._disk()
        return disk.uuid if disk else b""

    def has_survivors(self) -> bool:
        with self._mutex:
            return self._survivors_due and not self._loss_untold

    def detach(self) -> None:
        with self._changing:
            why = "it was detached; `holdfast tier replace` ends that"
            self._lose(why, detached=True, level=logging.INFO)

    def replace(self, path: str = "") -> None:
        with self._changing:
            config = msgspec.structs.replace(self._config, path=path or self._config.path)
            # A folder that an operator names may be on any file system.
            mounted_at = mount_point(path) if path else self._mounted_at
            check_usable(config.path, config.setting, mounted_at)
            check_file(config)
            check_space(config)
            self._config, self._mounted_at = config, mounted_at
            self._lose("it is being replaced", detached=False, level=logging.INFO)
            try:
                self._reopen()
            except HoldfastError as error:
                self._note_why_away(str(error))
                raise

    # Internal.

    def _disk(self) -> DiskTier | None:
        medium = self._medium
        return medium.disk if medium is not None else None

    def _open(self, number: int) -> OpenedMedium:
        disk = DiskTier(
            self._config, self._clock, self._open_extents, first_place=number << MEDIUM_SHIFT
        )
        try:
            identity = file_identity(self._config.path)
        except OSError:  # the watcher finds out why
            identity = None
        return OpenedMedium(disk, identity, self._clock.now(), CallsInProgress(self._clock))

    def _watch(self) -> None:
        failure = ""
        while not self._stop.wait(self._watch_s):
            before, failure = failure, ""
            try:
                self.look()
            except Exception as error:  # noqa: BLE001  # the watch goes on
                failure = repr(error)
                if failure != before:
                    _log.exception("tier %s: the look at its drive failed", self.name)

    def look(self) -> None:
        """Check the medium, or try to open one if there is none; the tier's thread calls it."""
        medium = self._medium
        if medium is not None:
            if why := medium.calls.why_hanging() or self._probed(medium):
                with self._changing:
                    if self._medium is medium:
                        self._lose(why, detached=False)
        elif not self._is_released():
            self._note_why_away("its I/O has not ended; replace it, or name another folder")
        elif self._clock.now() >= self._retry_at_s and not self._stop.is_set():
            with self._changing:
                self._try_to_reopen()

    def _is_released(self) -> bool:
        """Return whether all I/O on the former medium has ended; waits for a moment."""
        if self._release is not None:
            self._release.join(PROBE_WAIT_S)
        return self._release is None or not self._release.is_alive()

    def _probed(self, medium: OpenedMedium) -> str:
        """Return why the medium cannot be used; empty if it can, or while the drive is asked."""
        path = self._config.path

        def check() -> str:
            why = medium.disk.medium_failure()
            if medium.identity is not None:
                why = why_not_same(path, medium.identity) or why
            return why

        probe = self._probe or DriveProbe(check, medium.calls, self.name)
        why = probe.result()
        self._probe = probe if why is None else None
        return why or ""

    def _lose(self, why: str, *, detached: bool, level: int = logging.ERROR) -> None:
        """Stop using the medium, if there is one, and note why there is none. Hold `_changing`.

        `level`: that of the line in the log; a loss that an operator asked for is no error.
        """
        medium, absence, now_s = self._medium, self._absence, self._clock.now()
        if medium is None:
            assert absence is not None  # noqa: S101 - there is no medium
            with self._mutex:
                self._absence = absence._replace(why=why, detached=detached)
            return
        counted = medium.disk.usage()
        is_steady = now_s - medium.opened_at_s >= STEADY_S
        with self._mutex:
            self._medium = self._probe = None
            self._absence = Absence(why, now_s, medium.disk.uuid, detached)
            self._losses += 1
            self._loss_untold = True
            self._survivors_due = False
            self._before = _counters(_sum(self._before, counted))
            self._pause_s = self._watch_s if is_steady else min(2 * self._pause_s, REOPEN_MAX_S)
            self._retry_at_s = now_s + self._pause_s
        _log.log(
            level,
            "tier %s: away, because %s; its blocks are forgotten, and the node serves without it "
            "until there is a drive at %s again",
            *(self.name, why, self._config.path),
        )
        # I/O on a drive that hangs does not end, so it is waited for on a thread of its own.
        is_hanging = bool(medium.calls.why_hanging())
        self._release = threading.Thread(
            target=medium.disk.abandon, name=f"holdfast-{self.name}-release", daemon=True
        )
        self._release.start()
        self._release.join(0 if is_hanging else RELEASE_S)

    def _try_to_reopen(self) -> None:
        """Open the medium at the path, if there is a usable one; note why not. Hold `_changing`."""
        config, absence = self._config, self._absence
        if absence is None:
            return
        try:
            check_usable(config.path, config.setting, self._mounted_at)
            if absence.detached and file_uuid(config) == absence.uuid:
                return
            self._reopen()
        except HoldfastError as error:
            self._note_why_away(str(error))

    def _reopen(self) -> None:
        """Open the medium at the path; raise what `DiskTier` raises. Hold `_changing`."""
        number, former = (self._number + 1) % _MEDIA_MAX, self._absence
        medium = self._open(number)
        is_same = former is not None and medium.disk.uuid == former.uuid
        with self._mutex:
            self._medium, self._number, self._absence = medium, number, None
            self._survivors_due = True
            if not is_same:
                self._replaced = self._clock.now(), f'by the drive at "{self._config.path}"'
        which = "the same drive" if is_same else "another drive"
        _log.warning("tier %s: %s is in use at %s", self.name, which, self._config.path)

    def _note_why_away(self, why: str) -> None:
        """Note why no medium can be opened; log it if it changed."""
        with self._mutex:
            absence = self._absence
            if absence is None or absence.why == why or absence.detached:
                return
            self._absence = absence._replace(why=why)
        _log.warning("tier %s: still away: %s", self.name, why)


def _counters(usage: TierUsage) -> TierUsage:
    """Return only what a usage has counted since its start."""
    return msgspec.structs.replace(
        usage, capacity_bytes=0, used_bytes=0, records=0, writes_stopped=""
    )


def _sum(before: TierUsage, now: TierUsage) -> TierUsage:
    """Return the usage of the present medium with the counters of former ones added."""
    return msgspec.structs.replace(
        now,
        read_bytes=before.read_bytes + now.read_bytes,
        written_bytes=before.written_bytes + now.written_bytes,
        failures=before.failures + now.failures,
    )
