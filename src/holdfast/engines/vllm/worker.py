"""The worker side: copy blocks between pages and the node's arena, beside the model's steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from holdfast.client.connection import StoreClient
from holdfast.client.engine_locks import EngineLocks
from holdfast.client.loader import GroupLoad, Loader, LoadJob, LoadResult, RunningLoad
from holdfast.devices.base import (
    CopiedBytes,
    DeviceError,
    DirectDevice,
    LockedRanges,
    LockingDevice,
    StagingDevice,
)
from holdfast.engines.vllm.counters import ConnectorCounts
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.saves import POLL_S, DirectSaves, SaveRequests, Saves, StagedSaves
from holdfast.engines.vllm.work import LoadTask, StepWork, WorkerReport
from holdfast.errors import Outcome
from holdfast.wire.local.locked_memory import LockedMemory
from holdfast.wire.local.reconnecting_client import ReconnectingClient

REST_S = 0.002
"""Maximum time for which a step without a forward yields the GIL to loads."""

DEADLINE_MIN_S = 0.01
"""Minimum deadline of a load; a shorter one is below scheduling jitter."""

_log = logging.getLogger("vllm.holdfast")


class WorkerSide:
    """Moves blocks for one tensor-parallel rank."""

    def __init__(
        self,
        connection: ReconnectingClient,
        device: DirectDevice | StagingDevice,
        rank: int,
        setting: ConnectorSettings,
        now: Callable[[], float] = time.monotonic,
        running: Callable[[], float] | None = None,
    ) -> None:
        """`running`: clock for the timeouts of slots; default `now`."""
        self.counts = ConnectorCounts()
        self._connection = connection
        self._device = device
        self._rank = rank
        self._deadline_max_s = setting.fetch_deadline_s
        self._saving = setting.saves
        self._locks = EngineLocks(None)
        self._loader = Loader(connection, self._locks_of)
        self._loading: list[tuple[LoadTask, RunningLoad]] = []
        self._requests = SaveRequests(connection, rank, self.counts, now)
        self._saves: Saves
        self._locking = device if isinstance(device, LockingDevice) else None
        if isinstance(device, StagingDevice):
            self._saves = StagedSaves(device, self._requests, self._locks_of)
        else:
            self._saves = DirectSaves(device, self._requests, self._locks_of, running or now)
        self._copied = CopiedBytes(0, 0)
        self._lock_seconds = 0.0
        self._failed: set[int] = set()
        self._landed: dict[str, dict[str, int]] = {}
        self._moving = True  # last reported value; True, so that the first step is reported
        self._passive = False
        """Whether the device has failed: then nothing is loaded or saved any more."""

    def lock_arena(self, device: LockingDevice) -> None:
        """Page-lock the node's arena for the device from now on.

        Call it once, before the engine captures graphs and serves: it locks what the node chooses.
        """
        self._locks = EngineLocks(device.registrar, by_default=device.locks_by_default)
        if (locked := self._locked_memory()) is not None:
            locked.lock_at_start()

    def begin(self, work: StepWork) -> None:
        """Before the forward: request the slots for this step's saves."""
        if self._device.failure and not self._passive:
            self._become_passive()
        if self._passive:
            return
        if (locked := self._locked_memory()) is not None:
            locked.start()
            self._count_locking(locked)
        if self._locking is not None:
            self._count_copies(self._locking)
        self._saves.poll()
        self._requests.poll()
        if self._saving:
            self._saves.begin(work.saves)

    def start_loads(self, work: StepWork) -> None:
        """Hand this step's loads to the loading thread."""
        if work.loads:
            after = None
            # If the device has failed, its loads fail, too, and the next step says why.
            with contextlib.suppress(DeviceError):
                after = self._device.mark()
            for load in work.loads:
                deadline_s = self._deadline_max_s
                if load.deadline_s:
                    deadline_s = min(max(load.deadline_s, DEADLINE_MIN_S), deadline_s)
                keys = load.keys[self._rank]
                blocks = GroupLoad(0, keys, self._device, load.pages, load.first)
                job = LoadJob((blocks,), deadline_s, load.plan, after)
                self._loading.append((load, self._loader.put(job)))

    def save(self, work: StepWork) -> None:
        """After the forward: copy full blocks out of their pages."""
        if work.tokens and not self._passive:
            self._saves.copy()
        # Nothing was computed: vLLM waits for loads or answers, and would poll without pause.
        elif not self._loader.rest(REST_S):
            time.sleep(POLL_S)
        if not self._passive:
            self._saves.poll()

    def ended(self) -> set[str]:
        """Return the requests whose loads ended; `failed_pages` returns the pages that failed."""
        ended, loading = set[str](), self._loading
        for load, running in loading:
            if (result := running.poll()) is not None:
                ended.add(load.request)
                self._failed.update(load.pages[result.pages :])
                self._landed[load.request] = dict(result.sources)
                self._count_load(load, result)
        if ended:
            self._loading = [each for each in loading if each[1].poll() is None]
        return ended

    def failed_pages(self) -> set[int]:
        """Return the pages of ended loads that must be computed, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self, work: StepWork) -> WorkerReport | None:
        """Return this step's report for the scheduler side; None if nothing changed."""
        before, self._moving = self._moving, self._saves.busy and not self._passive
        landed, self._landed = self._landed, {}
        # The scheduler side keeps the last report, so the end of all copies must be reported, too.
        if not (work.tokens or self._moving or before or landed):
            return None
        return WorkerReport(work.tokens > 0, self._moving, landed, self._passive)

    def close(self) -> None:
        """Wait for all copies, commit them, and stop."""
        if not self._passive:
            self._end_session()
        self._loader.close()
        self._locks.close()
        self._device.close()

    def _become_passive(self) -> None:
        """Load and save nothing any more, because the device has failed; say so once.

        Loads under way fail, and those that the scheduler side has planned, too. It ends its own
        session when it has this step's report.
        """
        self._passive = True
        self.counts.add("device_failures")
        _log.error(
            "Holdfast is off until this engine restarts, and all requests are computed, because "
            "the device that copies blocks has failed: %s",
            self._device.failure,
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
        failed = result.pages < len(load.pages)
        self.counts.add("calls", "fetch", result.outcome if failed else Outcome.OK)
        self.counts.add("fetch_seconds", number=result.seconds)
        self.counts.add("fetched_bytes", number=result.nbytes)
        tokens = load.tokens * result.pages // len(load.pages)
        self.counts.add("fetched_tokens", number=tokens)

    def _count_copies(self, device: LockingDevice) -> None:
        """Count what the device has copied since the last call."""
        before, self._copied = self._copied, device.copied_bytes()
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
