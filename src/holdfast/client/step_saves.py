"""Saves of an engine's steps: slots are requested, blocks are copied into them, then committed.

`client.direct_saves` copies pages at the end of their step, into slots that were requested at its
beginning. `client.staged_saves` copies them into memory of the device there, and from it into their
slots at a later step: no step waits for the store or for a copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from holdfast.client.connection import Connection, StoreClient
from holdfast.client.counts import REFUSED, ClientCounts
from holdfast.client.tasks import SaveTask
from holdfast.devices.base import StagedBlocks, Transfer
from holdfast.errors import NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.wire.local.messages import Abort, Commit, Committed, Reserve, Reserved

RESERVE_S = 0.1
"""Timeout of slots at the end of a step; they were requested at its beginning."""

POLL_S = 0.0002
"""Interval of polls for the store's reply."""

COMMIT_S = 1.0
"""Timeout of the store's replies to the last commits in `close`."""

_log = logging.getLogger(__name__)


class PendingReserve(NamedTuple):
    """A `Reserve` request that was sent, and the save that needs the slots."""

    save: SaveTask
    client: StoreClient
    request_id: int
    at_s: float


class InflightSave(NamedTuple):
    """Copies of blocks to the arena, and the reservations to commit when they are done."""

    transfers: Sequence[Transfer]
    client: StoreClient
    commits: Sequence[Commit]
    staged: StagedBlocks | None = None

    def done(self) -> bool:
        """Return, without blocking, whether all copies have ended."""
        return all(transfer.done() for transfer in self.transfers)

    def result(self) -> bool:
        """Block until all copies have ended; return True if every byte was copied."""
        ended = [transfer.result() for transfer in self.transfers]  # of all, also after a failure
        return all(ended)


class StepSaves(Protocol):
    """The saves of an engine's steps; the calls of one step are `begin`, `copy` and `poll`."""

    @abstractmethod
    def begin(self, saves: Sequence[SaveTask]) -> None:
        """Before the forward: request the slots for this step's saves."""

    @abstractmethod
    def copy(self) -> None:
        """After the forward: copy the blocks of this step out of their pages."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up the saves that were begun and not copied; their slots go back to the node."""

    @abstractmethod
    def poll(self) -> None:
        """Continue what can continue, without waiting."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a save is not committed yet."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies, commit them, and wait at most `COMMIT_S` for the replies."""


class SaveRequests:
    """The store's side of saves: requests for slots, and commits that are not answered yet."""

    def __init__(
        self,
        connection: Connection,
        rank: int,
        counts: ClientCounts,
        now: Callable[[], float],
    ) -> None:
        self.counts = counts
        self.now = now
        self._connection = connection
        self._rank = rank
        self._committing: list[tuple[StoreClient, int]] = []

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

    def abort(self, client: StoreClient, commits: Sequence[Commit]) -> None:
        """Return slots to the node that nothing was or will be copied into."""
        with contextlib.suppress(NodeGoneError):  # a node reclaims a lost connection's slots
            for commit in commits:
                client.forget(client.send(Abort(commit.ticket)))

    def commit(self, save: InflightSave) -> None:
        """Commit a save whose copies have ended; abort it if they failed."""
        copied = save.result()
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

    def _send(self, client: StoreClient, save: SaveTask) -> PendingReserve:
        rank = self._rank
        message = Reserve(
            save.keys[rank], save.parents[rank], save.depth, save.segments[rank], save.group
        )
        return PendingReserve(save, client, client.send(message), self.now())
