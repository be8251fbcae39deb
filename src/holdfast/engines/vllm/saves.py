"""Saves of a worker: slots are requested, blocks are copied into them, and then committed.

`DirectSaves` copies pages at the end of their step, into slots that were requested at its
beginning. `StagedSaves` copies them into memory of the device there, and from it into their slots
at a later step: no step waits for the node or for a copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.client.loader import REFUSED
from holdfast.client.timeouts import Backoff
from holdfast.devices.base import (
    DeviceError,
    DirectDevice,
    LockedRanges,
    Move,
    StagedBlocks,
    StagingDevice,
    Transfer,
)
from holdfast.engines.vllm.counters import ConnectorCounts
from holdfast.engines.vllm.work import SaveTask
from holdfast.errors import BlockError, NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import Abort, Commit, Committed, Reserve, Reserved
from holdfast.wire.local.reconnecting_client import ReconnectingClient

RESERVE_S = 0.1
"""Timeout of slots at the end of a step; they were requested at its beginning."""

POLL_S = 0.0002
"""Interval of polls for the node's reply."""

COMMIT_S = 1.0
"""Timeout of the node's replies to the last commits in `close`."""

COPY_BEFORE_S = RECLAIM_S / 4
"""Age of a request after which no copy into its slots begins: the node may use them again
`RECLAIM_S` after the session has ended."""

_log = logging.getLogger("vllm.holdfast")


class PendingReserve(NamedTuple):
    """A `Reserve` request that was sent, and the save that needs the slots."""

    save: SaveTask
    client: Client
    request_id: int
    at_s: float


class InflightSave(NamedTuple):
    """A copy of blocks to the arena, and the reservations to commit when it is done."""

    transfer: Transfer
    client: Client
    commits: Sequence[Commit]
    staged: StagedBlocks | None = None


class Saves(Protocol):
    """The saves of a worker; the calls of one step are `begin`, `copy` and `poll`."""

    def begin(self, saves: Sequence[SaveTask]) -> None:
        """Before the forward: request the slots for this step's saves."""

    def copy(self) -> None:
        """After the forward: copy the blocks of this step out of their pages."""

    def poll(self) -> None:
        """Continue what can continue, without waiting."""

    @property
    def busy(self) -> bool:
        """Whether a save is not committed yet."""

    def close(self) -> None:
        """Wait for all copies, commit them, and wait at most `COMMIT_S` for the replies."""


class SaveRequests:
    """The node's side of saves: requests for slots, and commits that are not answered yet."""

    def __init__(
        self,
        connection: ReconnectingClient,
        rank: int,
        counts: ConnectorCounts,
        now: Callable[[], float],
    ) -> None:
        self.counts = counts
        self.now = now
        self._connection = connection
        self._rank = rank
        self._committing: list[tuple[Client, int]] = []

    def reserve(self, save: SaveTask) -> PendingReserve | None:
        """Request the slots of a save; None, and counted, without a session."""
        connected = self._connection.client()
        if connected is None or connected.arena is None:
            self.counts.add("calls", "save", REFUSED if self._connection.refused else "gone")
            return None
        try:
            return self._send(connected, save)
        except (NodeGoneError, ProtocolError):
            self.counts.add("calls", "save", "gone")
            return None

    def again(self, pending: PendingReserve) -> PendingReserve:
        """Request the slots again; those of the first request go back."""
        pending.client.forget(pending.request_id)
        return self._send(pending.client, pending.save)

    def reply(self, pending: PendingReserve) -> Reserved | None:
        """Return the reserved slots; None if they are not there yet."""
        reply = pending.client.poll(pending.request_id)
        if reply is not None and not isinstance(reply, Reserved):
            raise ProtocolError(f"Reserve was answered with {type(reply).__name__}")
        if reply is not None and reply.outcome == Outcome.FULL:
            self.counts.add("calls", "save", "full")
        return reply

    def forget(self, pending: PendingReserve) -> None:
        """Give up a request: its slots go back to the node."""
        with contextlib.suppress(NodeGoneError):  # a node reclaims a lost connection's slots
            pending.client.forget(pending.request_id)

    def abort(self, client: Client, commits: Sequence[Commit]) -> None:
        """Return slots to the node that nothing was or will be copied into."""
        with contextlib.suppress(NodeGoneError):  # a node reclaims a lost connection's slots
            for commit in commits:
                client.forget(client.send(Abort(commit.ticket)))

    def commit(self, save: InflightSave) -> None:
        """Commit a save whose copies have ended; abort it if they failed."""
        copied = save.transfer.result()
        if not copied:
            self.counts.add("calls", "save", "failed", number=len(save.commits))
        try:
            for commit in save.commits:
                message = commit if copied else Abort(commit.ticket)
                self._committing.append((save.client, save.client.send(message)))
        except NodeGoneError:
            self.counts.add("calls", "save", "gone", number=len(save.commits))

    def poll(self) -> None:
        """Count the commits that the node has answered."""
        still = []
        for client, request_id in self._committing:
            try:
                reply = client.poll(request_id)
            except RefusedError as error:
                self.count_refused(error)
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

    def wait(self) -> None:
        """Wait at most `COMMIT_S` for the replies to all commits."""
        until_s = time.monotonic() + COMMIT_S
        for client, request_id in self._committing:
            with contextlib.suppress(NodeGoneError, RefusedError):
                client.wait(request_id, max(0.0, until_s - time.monotonic()))
        self._committing.clear()

    def count_refused(self, error: RefusedError) -> None:
        """Count a save that the node refused, and log its reason."""
        self.counts.add("calls", "save", REFUSED)
        _log.warning("blocks not saved: %s", error)

    def _send(self, client: Client, save: SaveTask) -> PendingReserve:
        rank = self._rank
        message = Reserve(save.keys[rank], save.parents[rank], save.depth, save.segments[rank])
        return PendingReserve(save, client, client.send(message), self.now())


class DirectSaves:
    """Saves whose pages are copied into the arena at the end of their step."""

    def __init__(
        self,
        device: DirectDevice,
        requests: SaveRequests,
        locks_of: Callable[[Client], LockedRanges | None],
        running: Callable[[], float],
    ) -> None:
        """`running`: clock for the timeouts of slots."""
        self._device = device
        self._requests = requests
        self._locks_of = locks_of
        self._running = running
        self._backoff = Backoff()
        self._reserves: list[PendingReserve] = []
        self._inflight: list[InflightSave] = []

    def begin(self, saves: Sequence[SaveTask]) -> None:
        for save in saves:
            if (pending := self._requests.reserve(save)) is not None:
                self._reserves.append(pending)

    def copy(self) -> None:
        reserves, self._reserves = self._reserves, []
        # The client may have reconnected between two requests of a step.
        for client, pending in groupby(reserves, lambda each: each.client):
            group = list(pending)
            try:
                self._copy(client, group)
            except (NodeGoneError, ProtocolError):
                self._requests.counts.add("calls", "save", "gone", number=len(group))
            except Exception:  # noqa: BLE001  # e.g. device out of memory: the engine continues
                _log.exception("blocks not saved")
                self._requests.counts.add("calls", "save", "failed", number=len(group))

    def poll(self) -> None:
        still = []
        for inflight in self._inflight:
            if inflight.transfer.done():
                self._requests.commit(inflight)
            else:
                still.append(inflight)
        self._inflight = still

    @property
    def busy(self) -> bool:
        return bool(self._reserves or self._inflight)

    def close(self) -> None:
        # Commits follow the copies, because the node seals a slot's content at the commit.
        for inflight in self._inflight:
            inflight.transfer.result()
        self.poll()
        self._requests.wait()

    def _copy(self, client: Client, reserves: Sequence[PendingReserve]) -> None:
        """Wait for the slots of these saves, and start copying their pages into them."""
        moves: list[Move] = []
        commits: list[Commit] = []
        size = self._device.pages.pages_per_block
        until_s = self._running() + self._backoff.timeout_s(RESERVE_S)
        try:
            for each in reserves:
                reserved = self._slots(each, until_s)
                if reserved is None:
                    continue
                commits.append(Commit(reserved.ticket, each.save.retention))
                moves += [
                    Move(place + HEADER_BYTES, each.save.pages[at * size : (at + 1) * size])
                    for at, place in enumerate(reserved.places)
                    if place >= 0
                ]
            if commits and client.arena is not None:
                transfer = self._device.gather(client.arena, moves, self._locks_of(client))
                self._inflight.append(InflightSave(transfer, client, commits))
        except Exception:  # on any error the slots must be returned to the node
            # No copy to them is running: a device whose `gather` raises has ended its copies.
            for each in reserves:
                self._requests.forget(each)
            self._requests.abort(client, commits)
            raise

    def _slots(self, pending: PendingReserve, until_s: float) -> Reserved | None:
        """Return the reserved slots; None if they are late or refused."""
        requests = self._requests
        if requests.now() - pending.at_s > RECLAIM_S / 2:
            # After a very long step, reserve again. If the domain was erased since, the node
            # reuses the slots after RECLAIM_S, perhaps during this worker's copy.
            pending = requests.again(pending)
        try:
            while (reply := requests.reply(pending)) is None:
                if self._running() > until_s:
                    requests.forget(pending)
                    self._backoff.late()
                    requests.counts.add("calls", "save", "late")
                    return None
                time.sleep(POLL_S)
        except RefusedError as error:
            requests.count_refused(error)
            return None
        self._backoff.answered()
        return reply


class _WaitingSave(NamedTuple):
    """Staged blocks that wait for the device and for their slots."""

    staged: StagedBlocks
    reserve: PendingReserve
    renewed: bool = False


class StagedSaves:
    """Saves whose pages are copied into memory of the device, and into the arena afterwards.

    A copy into slots is queued when the blocks have left their pages and the slots are reserved,
    if the request is younger than `COPY_BEFORE_S`; so it starts at once, and long before the node
    could use the slots again.
    """

    def __init__(
        self,
        device: StagingDevice,
        requests: SaveRequests,
        locks_of: Callable[[Client], LockedRanges | None],
    ) -> None:
        self._device = device
        self._requests = requests
        self._locks_of = locks_of
        self._last_error = ""
        self._begun: list[_WaitingSave] = []
        self._waiting: list[_WaitingSave] = []
        self._inflight: list[InflightSave] = []

    def begin(self, saves: Sequence[SaveTask]) -> None:
        size = self._device.pages.pages_per_block
        for save in saves:
            blocks = [save.pages[at : at + size] for at in range(0, len(save.pages), size)]
            try:
                staged = self._device.stage(blocks)
            except (DeviceError, BlockError) as error:
                self._count_failed(error)
                continue
            if staged is None:
                self._requests.counts.add("calls", "save", "full")
                continue
            if (pending := self._requests.reserve(save)) is None:
                staged.release()
            else:
                self._begun.append(_WaitingSave(staged, pending))

    def copy(self) -> None:
        begun, self._begun = self._begun, []
        for save in begun:
            try:
                save.staged.pack()
            except DeviceError as error:
                self._requests.forget(save.reserve)
                save.staged.release()
                self._count_failed(error)
            else:
                self._waiting.append(save)

    def poll(self) -> None:
        still = []
        for save in self._waiting:
            try:
                waiting = self._advance(save)
            except RefusedError as error:
                self._requests.count_refused(error)
            except (NodeGoneError, ProtocolError):
                self._requests.counts.add("calls", "save", "gone")
            except DeviceError as error:
                self._requests.forget(save.reserve)
                self._count_failed(error)
            else:
                if waiting is not None:
                    still.append(waiting)
                continue
            save.staged.release()
        self._waiting = still
        unfinished = []
        for inflight in self._inflight:
            if inflight.transfer.done():
                self._requests.commit(inflight)
                if inflight.staged is not None:
                    inflight.staged.release()
            else:
                unfinished.append(inflight)
        self._inflight = unfinished

    @property
    def busy(self) -> bool:
        return bool(self._begun or self._waiting or self._inflight)

    def close(self) -> None:
        until_s = time.monotonic() + RESERVE_S
        while self._waiting and time.monotonic() < until_s:
            self.poll()
            time.sleep(POLL_S)
        for save in (*self._begun, *self._waiting):
            self._requests.forget(save.reserve)
            save.staged.release()
        self._begun, self._waiting = [], []
        for inflight in self._inflight:
            inflight.transfer.result()
        self.poll()
        self._requests.wait()

    def _advance(self, save: _WaitingSave) -> _WaitingSave | None:
        """Start the copy of a save if it can start; return what still waits."""
        if not save.staged.ready():
            return save
        staged, pending = save.staged, save.reserve
        if self._requests.now() - pending.at_s > COPY_BEFORE_S:
            if save.renewed:
                self._requests.forget(pending)
                self._requests.counts.add("calls", "save", "late")
                staged.release()
                return None
            return _WaitingSave(staged, self._requests.again(pending), renewed=True)
        reserved = self._requests.reply(pending)
        if reserved is None:
            return save
        client, commit = pending.client, Commit(reserved.ticket, pending.save.retention)
        payloads = [
            (at, place + HEADER_BYTES) for at, place in enumerate(reserved.places) if place >= 0
        ]
        try:
            if client.arena is None:
                raise NodeGoneError("the session has no arena")
            transfer = staged.copy(client.arena, payloads, self._locks_of(client))
        except (DeviceError, BlockError, NodeGoneError) as error:
            # Nothing is copied into the slots any more: a call that raises has ended its copies.
            self._requests.abort(client, [commit])
            staged.release()
            self._count_failed(error)
            return None
        self._inflight.append(InflightSave(transfer, client, [commit], staged))
        return None

    def _count_failed(self, error: Exception) -> None:
        """Count a save, and log why it failed unless the last one failed for the same reason."""
        self._requests.counts.add("calls", "save", "failed")
        if str(error) != self._last_error:
            self._last_error = str(error)
            _log.warning("blocks not saved: %s", error)
