"""Saves whose pages are copied into the arena at the end of their step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby

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
from holdfast.client.timeouts import Backoff
from holdfast.devices.base import DirectDevice, LockedRanges, Move, Transfer
from holdfast.errors import NodeGoneError, ProtocolError, RefusedError
from holdfast.limits import FILL_S
from holdfast.wire.local.messages import Commit, Reserved

_log = logging.getLogger(__name__)


class DirectSaves:
    """See `StepSaves`: `copy` waits for the slots, which takes a node less than a step."""

    def __init__(
        self,
        devices: Sequence[DirectDevice],
        requests: SaveRequests,
        locks_of: Callable[[StoreClient], LockedRanges | None],
        running: Callable[[], float],
    ) -> None:
        """`devices`: one for each KV group; `running`: clock for the timeouts of slots."""
        self._devices = devices
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

    def abandon(self) -> None:
        reserves, self._reserves = self._reserves, []
        for each in reserves:
            self._requests.forget(each)

    def poll(self) -> None:
        still = []
        for inflight in self._inflight:
            if inflight.done():
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
            inflight.result()
        self.poll()
        self._requests.wait()

    def _copy(self, client: StoreClient, reserves: Sequence[PendingReserve]) -> None:
        """Wait for the slots of these saves, and start copying their pages into them."""
        moves: dict[int, list[Move]] = {}
        commits: list[Commit] = []
        transfers: list[Transfer] = []
        until_s = self._running() + self._backoff.timeout_s(RESERVE_S)
        try:
            for each in reserves:
                reserved = self._slots(each, until_s)
                if reserved is None:
                    continue
                save = each.save
                commits.append(Commit(reserved.ticket, save.retention))
                size = self._devices[save.group].pages.pages_per_block
                moves.setdefault(save.group, []).extend(
                    Move(place + HEADER_BYTES, save.pages[at * size : (at + 1) * size])
                    for at, place in enumerate(reserved.places)
                    if place >= 0
                )
            if commits and client.arena is not None:
                arena, locks = client.arena, self._locks_of(client)
                for group, each_move in moves.items():
                    transfers.append(self._devices[group].gather(arena, each_move, locks))
                self._inflight.append(InflightSave(transfers, client, commits))
        except Exception:  # on any error the slots must be returned to the node
            # No copy to them is running then: a device whose `gather` raises has ended its copies.
            for transfer in transfers:
                transfer.result()
            for each in reserves:
                self._requests.forget(each)
            self._requests.abort(client, commits)
            raise

    def _slots(self, pending: PendingReserve, until_s: float) -> Reserved | None:
        """Return the reserved slots; None if they are late or refused."""
        requests = self._requests
        if requests.now() - pending.at_s > FILL_S:
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
