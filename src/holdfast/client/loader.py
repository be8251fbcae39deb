"""The loading threads of an engine: fetch blocks, copy them into the pages, release the leases.

The engine's own threads compete for the GIL, so these threads take it rarely: a load makes a few
calls, for any length of the context.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.key import KEY_BYTES
from holdfast.client.connection import Connection, StoreClient
from holdfast.client.counts import REFUSED
from holdfast.client.load_queue import LoadQueue
from holdfast.devices.base import NO_PAGE, Device, DeviceError, LockedRanges, Move
from holdfast.devices.host import run_anywhere
from holdfast.errors import BlockError, NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.wire.local.messages import Fetch, Fetched, Release, Released

GRACE_S = 0.25
"""Time after a fetch's deadline at which a node without an answer counts as gone."""

RELEASE_S = 1.0
"""Minimum timeout for the node's confirmation that the lease was valid."""

COPY_S = 1.0
"""Minimum time for the copies of a load: the node may answer as late as at the load's deadline."""

LOADS_AT_ONCE = 4
"""Loading threads at most. Each but the first runs only loads much shorter than the others'."""

_log = logging.getLogger(__name__)


class GroupLoad(NamedTuple):
    """Blocks of one KV group to load: their keys, and the pages that they fill.

    `pages` are in the order of the tokens. The first is page `first` of the first block; the last
    block may be partial. Pages that are `NO_PAGE` are left out.
    """

    group: int
    keys: bytes
    device: Device
    pages: Sequence[int]
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return len(self.keys) // KEY_BYTES * self.device.pages.raw_bytes


class LoadJob(NamedTuple):
    """A load: one part for each group, its plan and deadline, and the mark that copies follow."""

    loads: tuple[GroupLoad, ...]
    deadline_s: float
    plan: int = 0
    after: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(load.nbytes for load in self.loads)

    @property
    def wanted(self) -> int:
        """The number of pages to fill."""
        return sum(len(load.pages) - load.pages.count(NO_PAGE) for load in self.loads)


class LoadResult(NamedTuple):
    """How a load ended.

    `pages`: leading pages of the only group that are valid; if there are several groups, all pages
    are valid or, with 0, none. `sources`: verified blocks by tier. `nbytes` and `seconds`: what was
    fetched and verified, and how long it took. `reason`: the node's, for people.
    """

    outcome: str
    pages: int = 0
    sources: Mapping[str, int] = MappingProxyType({})
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""


_CLOSED = LoadResult(Outcome.GONE, reason="the engine client was closed")


class RunningLoad:
    """A load that is queued or runs; see `holdfast.client.engine.Pending`."""

    def __init__(self, job: LoadJob) -> None:
        self.job = job
        self._ended = threading.Event()
        self._result: LoadResult | None = None

    def poll(self) -> LoadResult | None:
        """Return the result if the load has ended, else None."""
        return self._result

    def wait(self, timeout_s: float) -> LoadResult | None:
        """Return the result if the load ends within this time, else None."""
        self._ended.wait(timeout_s)
        return self._result

    def end(self, result: LoadResult) -> None:
        """Give the load its result."""
        self._result = result
        self._ended.set()


class Loader:
    """Runs loads on threads of its own, in the order of `LoadQueue`.

    `connection` provides the client. Loads wait for the node beside each other, and copy one after
    the other, because a device may need memory for each copy.
    """

    def __init__(
        self,
        connection: Connection,
        locks_of: Callable[[StoreClient], LockedRanges | None] = lambda _: None,
    ) -> None:
        """`locks_of` returns the page-locked memory of a session's arena, if there is any."""
        self._locks_of = locks_of
        self._connection = connection
        self._jobs: LoadQueue[RunningLoad] = LoadQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._copying = threading.Lock()
        self._under_way = 0
        self._load_ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def put(self, job: LoadJob) -> RunningLoad:
        """Queue a load."""
        load = RunningLoad(job)
        with self._changed:
            if self._closed:
                load.end(_CLOSED)
                return load
            self._under_way += 1
            self._jobs.put(job.nbytes, load)
            self._changed.notify()
            starts = len(self._threads) < min(self._under_way, LOADS_AT_ONCE)
        if starts:
            thread = threading.Thread(target=self._run, name="holdfast-load", daemon=True)
            thread.start()
            self._threads.append(thread)
        return load

    def rest(self, seconds: float) -> bool:
        """Yield the GIL until a load ends or the time is over; return False if no load runs."""
        if not self._under_way:
            return False
        self._load_ended.clear()
        if self._under_way:
            self._load_ended.wait(seconds)
        return True

    def close(self) -> None:
        """Stop after the loads under way; loads that have not begun end as GONE."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while (load := self._jobs.take()) is not None:
            self._jobs.done(load.job.nbytes)
            load.end(_CLOSED)

    def _next(self) -> RunningLoad | None:
        """Wait for the next load; None after `close`."""
        with self._changed:
            while not self._closed:
                if (load := self._jobs.take()) is not None:
                    return load
                self._changed.wait()
        return None

    def _run(self) -> None:
        run_anywhere()
        while (load := self._next()) is not None:
            result = self._carry_out(load.job)
            wanted = load.job.wanted
            if result.pages < wanted:
                _log.info(
                    "%d of %d pages not loaded (%s): they are computed",
                    wanted - result.pages,
                    wanted,
                    result.outcome,
                )
            load.end(result)
            with self._changed:
                self._jobs.done(load.job.nbytes)
                self._under_way -= 1
                self._changed.notify_all()
            self._load_ended.set()

    def _carry_out(self, job: LoadJob) -> LoadResult:
        """Run a load; return its result."""
        client = self._connection.client()
        if client is None or client.arena is None:
            return LoadResult(REFUSED if self._connection.refused else Outcome.GONE)
        try:
            return self._load(client, job)
        except (NodeGoneError, ProtocolError, RefusedError) as error:
            _log.warning("load given up: %s", error)
            outcome = REFUSED if isinstance(error, RefusedError) else Outcome.GONE
            return LoadResult(outcome, reason=str(error))
        except BlockError as error:
            _log.error("load given up, the node sent an invalid place: %s", error)
            return LoadResult(Outcome.CORRUPT, reason=str(error))
        except DeviceError as error:
            _log.warning("load given up: %s", error)
            return LoadResult(Outcome.GONE, reason=str(error))
        except Exception as error:  # noqa: BLE001  # e.g. device out of memory: the load must end
            _log.exception("load given up")
            return LoadResult(Outcome.GONE, reason=str(error))

    def _load(self, client: StoreClient, job: LoadJob) -> LoadResult:
        """Fetch, copy and release; raises whatever ends the load early."""
        start_s = time.monotonic()
        replies = self._fetch(client, job)
        outcome = _outcome_of(replies)
        reason = "; ".join(dict.fromkeys(reply.reason for reply in replies))
        moves = [
            moves_of(load, reply.places) for load, reply in zip(job.loads, replies, strict=True)
        ]
        if len(job.loads) > 1 and _lacks_blocks(job, replies):
            _give_back(client, replies)
            return LoadResult(outcome, reason=reason)
        until_s = max(start_s + job.deadline_s, time.monotonic() + COPY_S)
        moved = self._copy(client, job, replies, moves, until_s)
        if not moved and time.monotonic() > until_s:
            _give_back(client, replies)
            return LoadResult(Outcome.LATE, reason="the copies were late")
        valid = True
        for reply in replies:
            if reply.lease:
                # The node has the rest of the deadline, at least `RELEASE_S`, to confirm the lease:
                # computing the pages, which are copied already, would cost more than the wait.
                left_s = job.deadline_s - (time.monotonic() - start_s)
                released = client.call(Release(reply.lease), Released, max(RELEASE_S, left_s))
                # If the lease expired during the copy, the slots may have been overwritten.
                valid = valid and released.valid
        pages = sum(len(move.pages) for each in moves for move in each)
        if pages < job.wanted or not (moved and valid):
            outcome = outcome if outcome != Outcome.OK else Outcome.GONE
        if not (moved and valid and pages):
            return LoadResult(outcome, reason=reason)
        sources = Counter[str]()
        for reply in replies:
            sources.update(reply.sources)
        nbytes = sum(
            len(reply.places) * load.device.pages.raw_bytes
            for load, reply in zip(job.loads, replies, strict=True)
        )
        seconds = time.monotonic() - start_s
        return LoadResult(outcome, pages, dict(sources), nbytes, seconds, reason)

    def _fetch(self, client: StoreClient, job: LoadJob) -> list[Fetched]:
        """Fetch the blocks of every group, beside each other."""
        within_s = job.deadline_s + GRACE_S
        requests = [Fetch(load.keys, job.deadline_s, job.plan, load.group) for load in job.loads]
        if len(requests) == 1:
            return [client.call(requests[0], Fetched, within_s)]
        waiting = [client.send(request) for request in requests]
        replies: list[Fetched] = []
        try:
            while waiting:
                reply = client.wait(waiting[0], within_s)
                waiting.pop(0)
                if not isinstance(reply, Fetched):
                    raise ProtocolError(f"Fetch was answered with {type(reply).__name__}")
                replies.append(reply)
        except BaseException:
            for request_id in waiting:
                client.forget(request_id)
            _give_back(client, replies)
            raise
        return replies

    def _copy(
        self,
        client: StoreClient,
        job: LoadJob,
        replies: Sequence[Fetched],
        moves: Sequence[Sequence[Move]],
        until_s: float,
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
                return all(
                    load.device.scatter(arena, each, job.after, locks, proceed).result()
                    for load, each in zip(job.loads, moves, strict=True)
                )
        except Exception:  # on any error of the device, release the slots now
            _give_back(client, replies)
            raise


def moves_of(load: GroupLoad, places: Sequence[int]) -> list[Move]:
    """Return the copies for the leading blocks of a load, which are at `places`."""
    moves: list[Move] = []
    at, first = 0, load.first
    per_block = load.device.pages.pages_per_block
    for place in places:
        pages = load.pages[at : at + per_block - first]
        if NO_PAGE in pages:
            moves += _moves_of_some(place + HEADER_BYTES, pages, first)
        else:
            moves.append(Move(place + HEADER_BYTES, pages, first))
        at += len(pages)
        first = 0
    return moves


def _moves_of_some(payload: int, pages: Sequence[int], first: int) -> Iterator[Move]:
    """Yield a copy for each run of pages of one block that are not left out."""
    for left_out, run in groupby(pages, lambda page: page == NO_PAGE):
        named = list(run)
        if not left_out:
            yield Move(payload, named, first)
        first += len(named)


def _lacks_blocks(job: LoadJob, replies: Sequence[Fetched]) -> bool:
    """Return whether a group did not get all of its blocks."""
    return any(
        len(reply.places) < len(load.keys) // KEY_BYTES
        for load, reply in zip(job.loads, replies, strict=True)
    )


def _outcome_of(replies: Sequence[Fetched]) -> str:
    """Return the first outcome that is not OK; OK if all are."""
    return next((reply.outcome for reply in replies if reply.outcome != Outcome.OK), Outcome.OK)


def _give_back(client: StoreClient, replies: Sequence[Fetched]) -> None:
    """End the leases of blocks that are not copied."""
    for reply in replies:
        if reply.lease:
            client.forget(client.send(Release(reply.lease)))
