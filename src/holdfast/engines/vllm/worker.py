"""The worker side: copy blocks between pages and the node's arena, beside the model's steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.buffers import Registrar
from holdfast.client.engine_locks import EngineLocks
from holdfast.client.timeouts import Backoff
from holdfast.devices.base import DirectDevice, Move, Transfer
from holdfast.engines.vllm.counters import REFUSED, ConnectorCounts
from holdfast.engines.vllm.loader import EndedLoad, Loader, LoadJob
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.work import SaveTask, StepWork, WorkerReport
from holdfast.errors import NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.wire.local.client import Client
from holdfast.wire.local.locked_memory import LockedMemory
from holdfast.wire.local.messages import Abort, Commit, Committed, Reserve, Reserved
from holdfast.wire.local.reconnecting_client import ReconnectingClient

RESERVE_S = 0.1
"""Timeout of slots at the end of a step; they were requested at its beginning."""

POLL_S = 0.0002
"""Interval of polls for the node's reply."""

REST_S = 0.002
"""Maximum time for which a step without a forward yields the GIL to loads."""

COMMIT_S = 1.0
"""Timeout of the node's replies to the last commits in `close`."""

DEADLINE_MIN_S = 0.01
"""Minimum deadline of a load; a shorter one is below scheduling jitter."""

_log = logging.getLogger("vllm.holdfast")


class PendingReserve(NamedTuple):
    """A `Reserve` request that was sent, and the save that needs the slots."""

    save: SaveTask
    client: Client
    request_id: int
    at_s: float


class InflightSave(NamedTuple):
    """A copy of pages to the arena, and the reservations to commit when it is done."""

    transfer: Transfer
    client: Client
    commits: Sequence[Commit]


class WorkerSide:
    """Moves blocks for one tensor-parallel rank."""

    def __init__(
        self,
        connection: ReconnectingClient,
        device: DirectDevice,
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
        self._saves = setting.saves
        self._now = now
        self._running = running or now
        self._locks = EngineLocks(None)
        self._backoff = Backoff()
        self._loader = Loader(device, connection)
        self._reserves: list[PendingReserve] = []
        self._inflight: list[InflightSave] = []
        self._committing: list[tuple[Client, int]] = []
        self._failed: set[int] = set()
        self._landed: dict[str, dict[str, int]] = {}
        self._moving = True  # last reported value; True, so that the first step is reported

    def lock_arena(self, registrar: Registrar) -> None:
        """Page-lock the node's arena for the device from now on.

        Call it once, before the engine captures graphs and serves: it locks what the node chooses.
        """
        self._locks = EngineLocks(registrar)
        if (locked := self._locked_memory()) is not None:
            locked.lock_at_start()

    def begin(self, work: StepWork) -> None:
        """Before the forward: request the slots for this step's saves."""
        if (locked := self._locked_memory()) is not None:
            locked.start()
        self._commit_done()
        still = []
        for client, request_id in self._committing:
            try:
                reply = client.poll(request_id)
            except RefusedError as error:
                self._count_refused(error)
                continue
            except NodeGoneError:
                self.counts.add("calls", "save", "gone")
                continue
            if reply is None:
                still.append((client, request_id))
            elif isinstance(reply, Committed):
                self.counts.add("calls", "save", "ok")
                self.counts.add("saved_blocks", number=reply.blocks)
        self._committing = still
        for save in work.saves if self._saves else ():
            connected = self._connection.client()
            if connected is None or connected.arena is None:
                self.counts.add("calls", "save", REFUSED if self._connection.refused else "gone")
                continue
            try:
                self._reserves.append(self._reserve(connected, save))
            except (NodeGoneError, ProtocolError):
                self.counts.add("calls", "save", "gone")

    def start_loads(self, work: StepWork) -> None:
        """Hand this step's loads to the loading thread."""
        if work.loads:
            after = self._device.mark()
            for load in work.loads:
                deadline_s = self._deadline_max_s
                if load.deadline_s:
                    deadline_s = min(max(load.deadline_s, DEADLINE_MIN_S), deadline_s)
                self._loader.put(LoadJob(load, load.keys[self._rank], deadline_s, after))

    def save(self, work: StepWork) -> None:
        """After the forward: copy full blocks into their slots."""
        if not work.tokens:
            # Nothing was computed: vLLM waits for loads or answers, and would poll without pause.
            if not self._loader.rest(REST_S):
                time.sleep(POLL_S)
            self._commit_done()
            return
        reserves, self._reserves = self._reserves, []
        # The client may have reconnected between two requests of a step.
        for client, pending in groupby(reserves, lambda each: each.client):
            group = list(pending)
            try:
                self._copy_saves(client, group)
            except (NodeGoneError, ProtocolError):
                self.counts.add("calls", "save", "gone", number=len(group))
            except Exception:  # noqa: BLE001  # e.g. device out of memory: the engine continues
                _log.exception("blocks not saved")
                self.counts.add("calls", "save", "failed", number=len(group))
        self._commit_done()

    def ended(self) -> set[str]:
        """Return the requests whose loads ended; `failed_pages` returns the pages that failed."""
        ended: list[EndedLoad] = self._loader.take(self.counts)
        for each in ended:
            self._failed.update(each.failed)
            self._landed[each.request] = dict(each.landed)
        return {each.request for each in ended}

    def failed_pages(self) -> set[int]:
        """Return the pages of ended loads that must be computed, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self, work: StepWork) -> WorkerReport | None:
        """Return this step's report for the scheduler side; None if nothing changed."""
        before, self._moving = self._moving, bool(self._reserves or self._inflight)
        landed, self._landed = self._landed, {}
        # The scheduler side keeps the last report, so the end of all copies must be reported, too.
        if not (work.tokens or self._moving or before or landed):
            return None
        return WorkerReport(work.tokens > 0, self._moving, landed)

    def close(self) -> None:
        """Wait for all copies, commit them, wait `COMMIT_S` at most for the replies, and stop."""
        try:
            # Commits follow the copies, because the node seals a slot's content at the commit.
            for inflight in self._inflight:
                inflight.transfer.result()
            self._commit_done()
            until_s = time.monotonic() + COMMIT_S
            for client, request_id in self._committing:
                with contextlib.suppress(NodeGoneError, RefusedError):
                    client.wait(request_id, max(0.0, until_s - time.monotonic()))
            self._committing.clear()
        except Exception:  # noqa: BLE001  # a failed device must not keep the rest from closing
            _log.exception("blocks not saved")
        self._connection.close()
        self._loader.close()
        self._locks.close()
        self._device.close()

    def _locked_memory(self) -> LockedMemory | None:
        """Return the page-locked memory of the present connection; None if there is none."""
        client = self._connection.client()
        return None if client is None else self._locks.of(client)

    def _reserve(self, client: Client, save: SaveTask) -> PendingReserve:
        rank = self._rank
        message = Reserve(save.keys[rank], save.parents[rank], save.depth, save.segments[rank])
        return PendingReserve(save, client, client.send(message), self._now())

    def _copy_saves(self, client: Client, reserves: Sequence[PendingReserve]) -> None:
        """Wait for the slots of these saves, and start copying their pages into them."""
        moves: list[Move] = []
        commits: list[Commit] = []
        size = self._device.pages.pages_per_block
        until_s = self._running() + self._backoff.timeout_s(RESERVE_S)
        try:
            for each in reserves:
                reserved = self._slots(client, each, until_s)
                if reserved is None:
                    continue
                if reserved.outcome == Outcome.FULL:
                    self.counts.add("calls", "save", "full")
                commits.append(Commit(reserved.ticket, each.save.retention))
                moves += [
                    Move(place + HEADER_BYTES, each.save.pages[at * size : (at + 1) * size])
                    for at, place in enumerate(reserved.places)
                    if place >= 0
                ]
            if commits and client.arena is not None:
                transfer = self._device.gather(client.arena, moves)
                self._inflight.append(InflightSave(transfer, client, commits))
        except Exception:  # on any error the slots must be returned to the node
            # No copy to them is running: a device whose `gather` raises has ended its copies.
            with contextlib.suppress(NodeGoneError):  # a node reclaims a lost connection's slots
                for each in reserves:
                    client.forget(each.request_id)
                for commit in commits:
                    client.forget(client.send(Abort(commit.ticket)))
            raise

    def _slots(self, client: Client, pending: PendingReserve, until_s: float) -> Reserved | None:
        """Return the reserved slots; None if they are late or refused."""
        if self._now() - pending.at_s > RECLAIM_S / 2:
            # After a very long step, reserve again. If the domain was erased since, the node
            # reuses the slots after RECLAIM_S, perhaps during this worker's copy.
            client.forget(pending.request_id)
            pending = self._reserve(client, pending.save)
        try:
            while (reply := client.poll(pending.request_id)) is None:
                if self._running() > until_s:
                    client.forget(pending.request_id)
                    self._backoff.late()
                    self.counts.add("calls", "save", "late")
                    return None
                time.sleep(POLL_S)
        except RefusedError as error:
            self._count_refused(error)
            return None
        self._backoff.answered()
        if not isinstance(reply, Reserved):
            raise ProtocolError(f"Reserve was answered with {type(reply).__name__}")
        return reply

    def _count_refused(self, error: RefusedError) -> None:
        """Count a save that the node refused, and log its reason."""
        self.counts.add("calls", "save", REFUSED)
        _log.warning("blocks not saved: %s", error)

    def _commit_done(self) -> None:
        """Commit the saves whose copies are done."""
        still = []
        for inflight in self._inflight:
            if not inflight.transfer.done():
                still.append(inflight)
                continue
            copied = inflight.transfer.result()
            if not copied:
                self.counts.add("calls", "save", "failed", number=len(inflight.commits))
            try:
                for commit in inflight.commits:
                    message = commit if copied else Abort(commit.ticket)
                    self._committing.append((inflight.client, inflight.client.send(message)))
            except NodeGoneError:
                self.counts.add("calls", "save", "gone", number=len(inflight.commits))
        self._inflight = still
