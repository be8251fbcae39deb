"""Saves whose pages are copied into memory of the device, and into the arena at a later step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.client.connection import StoreClient
from holdfast.client.step_saves import (
    POLL_S,
    RESERVE_S,
    InflightSave,
    PendingReserve,
    SaveRequests,
)
from holdfast.client.tasks import SaveTask
from holdfast.devices.base import DeviceError, LockedRanges, StagedBlocks, StagingDevice
from holdfast.errors import BlockError, NodeGoneError, ProtocolError, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.wire.local.messages import Commit

COPY_BEFORE_S = RECLAIM_S / 4
"""Age of a request after which no copy into its slots begins: the node may use them again
`RECLAIM_S` after the session has ended."""

_log = logging.getLogger(__name__)


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
        devices: Sequence[StagingDevice],
        requests: SaveRequests,
        locks_of: Callable[[StoreClient], LockedRanges | None],
    ) -> None:
        self._devices = devices
        self._requests = requests
        self._locks_of = locks_of
        self._last_error = ""
        self._begun: list[_WaitingSave] = []
        self._waiting: list[_WaitingSave] = []
        self._inflight: list[InflightSave] = []

    def begin(self, saves: Sequence[SaveTask]) -> None:
        for save in saves:
            device = self._devices[save.group]
            size = device.pages.pages_per_block
            blocks = [save.pages[at : at + size] for at in range(0, len(save.pages), size)]
            try:
                staged = device.stage(blocks)
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

    def abandon(self) -> None:
        begun, self._begun = self._begun, []
        for save in begun:
            self._requests.forget(save.reserve)
            save.staged.release()

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
            if inflight.done():
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
        self.abandon()
        for save in self._waiting:
            self._requests.forget(save.reserve)
            save.staged.release()
        self._waiting = []
        for inflight in self._inflight:
            inflight.result()
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
        self._inflight.append(InflightSave([transfer], client, [commit], staged))
        return None

    def _count_failed(self, error: Exception) -> None:
        """Count a save, and log why it failed unless the last one failed for the same reason."""
        self._requests.counts.add("calls", "save", "failed")
        if str(error) != self._last_error:
            self._last_error = str(error)
            _log.warning("blocks not saved: %s", error)
