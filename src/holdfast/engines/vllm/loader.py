"""The loading threads of a worker: fetch blocks, copy them into the pages, release the lease.

vLLM's loop competes for the GIL while requests wait, so these threads take the GIL rarely: a load
makes a few calls, for any length of the context.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.client.load_queue import LoadQueue
from holdfast.devices.base import Device, DeviceError, LockedRanges, Move
from holdfast.devices.host import run_anywhere
from holdfast.engines.vllm.counters import REFUSED, ConnectorCounts
from holdfast.engines.vllm.work import LoadTask
from holdfast.errors import BlockError, NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import Fetch, Fetched, Release, Released
from holdfast.wire.local.reconnecting_client import ReconnectingClient

GRACE_S = 0.25
"""Time after a fetch's deadline at which a node without an answer counts as gone."""

RELEASE_S = 1.0
"""Minimum timeout for the node's confirmation that the lease was valid."""

COPY_S = 1.0
"""Minimum time for the copies of a load: the node may answer as late as at the load's deadline."""

LOADS_AT_ONCE = 4
"""Loading threads at most. Each but the first runs only loads much shorter than the others'."""

_log = logging.getLogger("vllm.holdfast")


class LoadJob(NamedTuple):
    """A load with its rank's keys, its deadline, and the device mark that copies must follow."""

    load: LoadTask
    keys: bytes
    deadline_s: float
    after: Any


class EndedLoad(NamedTuple):
    """A load that ended: its pages that must not be used, and its verified blocks by tier."""

    request: str
    failed: Sequence[int]
    landed: Mapping[str, int]


class _LoadResult(NamedTuple):
    """A load's outcome, the number of its leading pages that are valid, their blocks by tier."""

    outcome: str
    pages: int = 0
    blocks: Mapping[str, int] = MappingProxyType({})


class Loader:
    """Runs loads on threads of its own, in the order of `LoadQueue`.

    `connection` provides the client. Loads wait for the node beside each other, and copy one after
    the other, because a device may need memory for each copy.
    """

    def __init__(
        self,
        device: Device,
        connection: ReconnectingClient,
        locks_of: Callable[[Client], LockedRanges | None],
    ) -> None:
        """`locks_of` returns the page-locked memory of a session's arena, if there is any."""
        self._device = device
        self._locks_of = locks_of
        self._connection = connection
        self._jobs: LoadQueue[LoadJob] = LoadQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._copying = threading.Lock()
        self._ended: list[EndedLoad] = []
        self._counts = ConnectorCounts()
        self._under_way = 0
        self._load_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def put(self, job: LoadJob) -> None:
        """Queue a load."""
        self._under_way += 1
        with self._changed:
            self._jobs.put(len(job.load.pages), job)
            self._changed.notify()
        if len(self._threads) < min(self._under_way, LOADS_AT_ONCE):
            thread = threading.Thread(target=self._run, name="holdfast-load", daemon=True)
            thread.start()
            self._threads.append(thread)

    def rest(self, seconds: float) -> bool:
        """Yield the GIL until a load ends or the time is over; return False if no load runs."""
        if self._under_way:
            self._load_ended.wait(seconds)
        return bool(self._under_way)

    def take(self, counts: ConnectorCounts) -> list[EndedLoad]:
        """Return the loads that ended since the last call, and add their counts to `counts`."""
        if not self._under_way:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
            found, self._counts = self._counts, ConnectorCounts()
            self._load_ended.clear()
        self._under_way -= len(ended)
        counts.add_all(found)
        return ended

    def close(self) -> None:
        """Stop after the loads under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> LoadJob | None:
        """Wait for the next load; None after `close`."""
        with self._changed:
            while not self._closed:
                if (job := self._jobs.take()) is not None:
                    return job
                self._changed.wait()
        return None

    def _run(self) -> None:
        run_anywhere()
        while (job := self._next()) is not None:
            counts = ConnectorCounts()
            outcome, landed, blocks = self._carry_out(job, counts)
            failed = job.load.pages[landed:]
            counts.add("calls", "fetch", outcome if failed else Outcome.OK)
            if failed:
                _log.info(
                    "%d of %d pages not loaded (%s): they are computed",
                    len(failed),
                    len(job.load.pages),
                    outcome,
                )
            with self._changed:
                self._jobs.done(len(job.load.pages))
                self._ended.append(EndedLoad(job.load.request, failed, blocks))
                self._counts = self._counts.aggregate(counts)
                self._load_ended.set()
                self._changed.notify_all()

    def _carry_out(self, job: LoadJob, counts: ConnectorCounts) -> _LoadResult:
        """Run a load; return its result."""
        client = self._connection.client()
        if client is None or client.arena is None:
            return _LoadResult(REFUSED if self._connection.refused else Outcome.GONE)
        start_s = time.monotonic()
        landed = 0
        try:
            fetch = Fetch(job.keys, job.deadline_s, job.load.plan)
            fetched = client.call(fetch, Fetched, job.deadline_s + GRACE_S)
            moves = moves_of(job.load, fetched.places, self._device.pages.pages_per_block)
            until_s = max(start_s + job.deadline_s, time.monotonic() + COPY_S)
            moved = self._copy(client, fetched, moves, job.after, until_s)
            if not moved and time.monotonic() > until_s:
                client.forget(client.send(Release(fetched.lease)))
                return _LoadResult(Outcome.LATE)
            if fetched.lease:
                # The node has the rest of the deadline, at least `RELEASE_S`, to confirm the lease:
                # computing the pages, which are copied already, would cost more than the wait.
                left_s = job.deadline_s - (time.monotonic() - start_s)
                released = client.call(Release(fetched.lease), Released, max(RELEASE_S, left_s))
                # If the lease expired during the copy, the slots may have been overwritten.
                if moved and released.valid:
                    landed = sum(len(move.pages) for move in moves)
        except (NodeGoneError, ProtocolError, RefusedError) as error:
            _log.warning("load given up: %s", error)
            return _LoadResult(REFUSED if isinstance(error, RefusedError) else Outcome.GONE)
        except BlockError as error:
            _log.error("load given up, the node sent an invalid place: %s", error)
            return _LoadResult(Outcome.CORRUPT)
        except DeviceError as error:
            _log.warning("load given up: %s", error)
            return _LoadResult(Outcome.GONE)
        except Exception:  # noqa: BLE001  # e.g. device out of memory: the load must end
            _log.exception("load given up")
            return _LoadResult(Outcome.GONE)
        outcome = fetched.outcome if fetched.outcome != Outcome.OK else Outcome.GONE
        if landed:
            nbytes = len(fetched.places) * self._device.pages.raw_bytes
            tokens = job.load.tokens * landed // len(job.load.pages)
            counts.add("fetch_seconds", number=time.monotonic() - start_s)
            counts.add("fetched_bytes", number=nbytes)
            counts.add("fetched_tokens", number=tokens)
            return _LoadResult(outcome, landed, fetched.sources)
        return _LoadResult(outcome)

    def _copy(
        self, client: Client, fetched: Fetched, moves: Sequence[Move], after: Any, until_s: float
    ) -> bool:
        """Copy blocks into their pages; return whether all were copied.

        Stops between two pieces if the session has ended or it is too late: the pages are computed.
        """

        def proceed() -> bool:
            return time.monotonic() <= until_s and client.connected()

        arena = client.arena
        if arena is None:
            raise NodeGoneError("the session has no arena")
        try:
            locks = self._locks_of(client)
            with self._copying:
                return self._device.scatter(arena, moves, after, locks, proceed).result()
        except Exception:  # on any error of the device, release the slots now
            if fetched.lease:
                client.forget(client.send(Release(fetched.lease)))
            raise


def moves_of(load: LoadTask, places: Sequence[int], pages_per_block: int) -> list[Move]:
    """Return the copies for the leading blocks of a load, which are at `places`."""
    moves: list[Move] = []
    at, first = 0, load.first
    for place in places:
        pages = load.pages[at : at + pages_per_block - first]
        moves.append(Move(place + HEADER_BYTES, pages, first))
        at += len(pages)
        first = 0
    return moves
