"""The transfers of one rank: blocks between its pages and the arena, beside the model's steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from holdfast.client.connection import Connection, StoreClient
from holdfast.client.counts import ClientCounts
from holdfast.client.direct_saves import DirectSaves
from holdfast.client.engine_locks import EngineLocks
from holdfast.client.loader import GroupLoad, Loader, LoadJob, LoadResult, RunningLoad
from holdfast.client.staged_saves import StagedSaves
from holdfast.client.step_saves import POLL_S, SaveRequests, StepSaves
from holdfast.client.tasks import LoadTask, SaveTask
from holdfast.devices.base import (
    CopiedBytes,
    DeviceError,
    DirectDevice,
    LockedRanges,
    LockingDevice,
    StagingDevice,
)
from holdfast.errors import Outcome
from holdfast.wire.local.locked_memory import LockedMemory

REST_S = 0.002
"""Maximum time for which a step without a forward yields the GIL to loads."""

FINISH_S = 10.0
"""Maximum wait for copies before the engine takes the memory of its pages away."""

DEADLINE_MIN_S = 0.01
"""Minimum deadline of a load; a shorter one is below scheduling jitter."""

_log = logging.getLogger(__name__)


class StepTasks(Protocol):
    """What a rank has to do in one step: loads to start, saves to make; tokens that it computes."""

    loads: list[LoadTask]
    saves: list[SaveTask]
    tokens: int


class TransferOptions(NamedTuple):
    """Options of a rank's transfers.

    `deadline_s`: maximum duration of a load. `saves`: for each KV group, whether this rank saves
    blocks; of ranks with equal pages, one does. `rank`: the entry of tasks' tuples that is its own.
    """

    deadline_s: float
    saves: tuple[bool, ...] = (True,)
    rank: int = 0


class StepReport(NamedTuple):
    """What changed by the end of a step.

    `computed`: the step had a forward. `moving`: blocks are still being copied to the arena.
    `landed`: verified blocks of the loads that ended, by request and tier. `passive`: a device has
    failed, so nothing is loaded or saved any more.
    """

    computed: bool = False
    moving: bool = False
    landed: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    passive: bool = False


class RankTransfers:
    """Loads and saves the blocks of one rank; the engine calls it at fixed points of each step.

    `devices`: one for each KV group, all of one kind; they are closed with the transfers.
    """

    def __init__(
        self,
        connection: Connection,
        devices: Sequence[DirectDevice | StagingDevice],
        options: TransferOptions,
        now: Callable[[], float] = time.monotonic,
        running: Callable[[], float] | None = None,
    ) -> None:
        """`running`: clock for the timeouts of slots; default `now`."""
        self.counts = ClientCounts()
        self._connection = connection
        self._devices = devices
        self._options = options
        self._locks = EngineLocks(None)
        self._loader = Loader(connection, self._locks_of)
        self._loading: list[tuple[LoadTask, RunningLoad]] = []
        self._requests = SaveRequests(connection, options.rank, self.counts, now)
        self._saves: StepSaves
        self._locking = [device for device in devices if isinstance(device, LockingDevice)]
        staging = [device for device in devices if isinstance(device, StagingDevice)]
        direct = [device for device in devices if not isinstance(device, StagingDevice)]
        if staging:
            self._saves = StagedSaves(staging, self._requests, self._locks_of)
        else:
            self._saves = DirectSaves(direct, self._requests, self._locks_of, running or now)
        self._copied = CopiedBytes(0, 0)
        self._lock_seconds = 0.0
        self._failed: set[int] = set()
        self._landed: dict[str, Mapping[str, int]] = {}
        self._failed_requests: set[str] = set()
        self._refused: set[str] = set()
        """Requests whose loads are of an earlier model."""
        self._moving = True  # last reported value; True, so that the first step is reported
        self._passive = False
        """Whether a device has failed: then nothing is loaded or saved any more."""

    def lock_arena(self, device: LockingDevice) -> None:
        """Page-lock the node's arena for the device from now on.

        Call it once, before the engine captures graphs and serves: it locks what the node chooses.
        """
        self._locks = EngineLocks(device.registrar, by_default=device.locks_by_default)
        if (locked := self._locked_memory()) is not None:
            locked.lock_at_start()

    def begin(self, work: StepTasks) -> None:
        """Before the forward: request the slots for this step's saves."""
        if not self._passive and (failure := self._failure()):
            self._become_passive(failure)
        if self._passive:
            return
        if (locked := self._locked_memory()) is not None:
            locked.start()
            self._count_locking(locked)
        if self._locking:
            self._count_copies()
        self._saves.abandon()  # of a step that failed: these pages are used for other blocks now
        self._saves.poll()
        self._requests.poll()
        saves = self._options.saves
        if work.saves and any(saves):
            self._saves.begin([save for save in work.saves if saves[save.group]])

    def start_loads(self, work: StepTasks) -> None:
        """Hand this step's loads to the loading threads."""
        if not work.loads:
            return
        after = None
        # If a device has failed, its loads fail, too, and the next step says why.
        with contextlib.suppress(DeviceError):
            after = self._devices[0].mark()
        rank, most_s = self._options.rank, self._options.deadline_s
        for load in work.loads:
            deadline_s = most_s
            if load.deadline_s:
                deadline_s = min(max(load.deadline_s, DEADLINE_MIN_S), most_s)
            blocks = [
                GroupLoad(task.group, task.keys[rank], device, task.pages, task.first)
                for task in load.groups
                for device in [self._devices[task.group]]
            ]
            job = LoadJob(tuple(blocks), deadline_s, load.plan, after)
            self._loading.append((load, self._loader.put(job)))

    def refuse_loads(self, work: StepTasks) -> None:
        """In place of `start_loads`, after the model has changed: its states are other ones now.

        This step's loads fail without being started, and those under way fail when they end.
        """
        for load in work.loads:
            running = RunningLoad(LoadJob((), 0.0))
            running.end(LoadResult(Outcome.MISS))
            self._loading.append((load, running))
        self._refused.update(load.request for load, _ in self._loading)

    def save(self, work: StepTasks) -> None:
        """After the forward, or in its place: copy this step's blocks out of their pages.

        A step without a forward may have blocks, too: their pages are used again from the next on.
        """
        if not self._passive and (work.tokens or work.saves):
            self._saves.copy()
        # Nothing was computed: the engine waits for loads or answers, and would poll without pause.
        if not work.tokens and not self._loader.rest(REST_S):
            time.sleep(POLL_S)
        if not self._passive:
            self._saves.poll()

    def abandon_saves(self) -> None:
        """In place of `save`, if the forward failed: its pages may not have been computed."""
        self._saves.abandon()

    def ended(self) -> set[str]:
        """Return the requests whose loads ended since the last call.

        `failed_pages` and `failed_requests` return what must be computed.
        """
        ended, loading = set[str](), list[tuple[LoadTask, RunningLoad]]()
        for load, running in self._loading:
            result = running.poll()  # once: a load may end at any time
            if result is None:
                loading.append((load, running))
                continue
            if load.request in self._refused:
                self._refused.remove(load.request)
                result = result._replace(outcome=Outcome.MISS, pages=0, sources={})
            ended.add(load.request)
            self._landed[load.request] = dict(result.sources)
            self._count_load(load, result)
            if len(load.groups) == 1:
                self._failed.update(load.groups[0].pages[result.pages :])
            if result.pages < load.pages:
                self._failed_requests.add(load.request)
        self._loading = loading
        return ended

    def failed_pages(self) -> set[int]:
        """Return the pages of ended loads of one group that must be computed, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Return the requests of ended loads of which a page must be computed, each once."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self, work: StepTasks) -> StepReport | None:
        """Return this step's report for the engine's scheduler; None if nothing changed."""
        before, self._moving = self._moving, self._saves.busy and not self._passive
        landed, self._landed = self._landed, {}
        # The scheduler keeps the last report, so the end of all copies must be reported, too.
        if not (work.tokens or self._moving or before or landed):
            return None
        return StepReport(work.tokens > 0, self._moving, landed, self._passive)

    def finish_copies(self) -> bool:
        """Wait until no copy reads or writes a page any more; return whether that is so.

        Call it before the engine takes the memory of its pages away, between two steps. Saves that
        were begun and not copied, because their step failed, are given up.
        """
        until_s = time.monotonic() + FINISH_S
        loads = [running for _, running in self._loading]
        ended = all(each.wait(max(0.0, until_s - time.monotonic())) is not None for each in loads)
        if self._passive:
            return ended
        self._saves.abandon()
        while self._saves.busy and time.monotonic() < until_s:
            self._saves.poll()
            time.sleep(POLL_S)
        return ended and not self._saves.busy

    def close(self) -> None:
        """Wait for all copies, commit them, and stop."""
        if not self._passive:
            self._end_session()
        self._loader.close()
        self._locks.close()
        for device in self._devices:
            device.close()

    def _failure(self) -> str:
        """Return why a device has failed; empty if all work."""
        return next((device.failure for device in self._devices if device.failure), "")

    def _become_passive(self, failure: str) -> None:
        """Load and save nothing any more, because the device has failed; say so once.

        Loads under way fail, and those that the scheduler side has planned, too. It ends its own
        session when it has this step's report.
        """
        self._passive = True
        self.counts.add("device_failures")
        _log.error(
            "Holdfast is off until this engine restarts, and all requests are computed, because "
            "the device that copies blocks has failed: %s",
            failure,
        )
        self._end_session()

    def _end_session(self) -> None:
        """Commit the saves whose copies have ended or end now, and leave the node."""
        try:
            self._saves.close()
        except Exception:  # noqa: BLE001  # a failed device must not keep the rest from closing
            _log.exception("blocks not saved")
        self._connection.close()

    def _count_load(self, load: LoadTask, result: LoadResult) -> None:
        """Count a load that has ended."""
        failed = result.pages < load.pages
        self.counts.add("calls", "fetch", result.outcome if failed else Outcome.OK)
        self.counts.add("fetch_seconds", number=result.seconds)
        self.counts.add("fetched_bytes", number=result.nbytes)
        tokens = load.tokens * result.pages // load.pages
        self.counts.add("fetched_tokens", number=tokens)

    def _count_copies(self) -> None:
        """Count what the devices have copied since the last call."""
        copied = [device.copied_bytes() for device in self._locking]
        total = CopiedBytes(
            sum(each.locked for each in copied), sum(each.bounced for each in copied)
        )
        before, self._copied = self._copied, total
        self.counts.add("copied_bytes", "locked", number=self._copied.locked - before.locked)
        self.counts.add("copied_bytes", "bounced", number=self._copied.bounced - before.bounced)

    def _count_locking(self, locked: LockedMemory) -> None:
        """Count the driver's time since the last call; a new session begins at 0."""
        before, self._lock_seconds = self._lock_seconds, locked.lock_seconds
        spent_s = self._lock_seconds - before
        self.counts.add("lock_seconds", number=spent_s if spent_s >= 0 else self._lock_seconds)

    def _locked_memory(self) -> LockedMemory | None:
        """Return the page-locked memory of the present connection; None if there is none."""
        client = self._connection.client()
        return None if client is None else self._locks.of(client)

    def _locks_of(self, client: StoreClient) -> LockedRanges | None:
        """Return what of a session's arena is page-locked; any thread may ask."""
        return self._locks.present(client)
