"""The loading thread of a worker: fetch, one copy into the pages, release.

vLLM's loop takes the interpreter for itself while requests wait, so this thread asks for it as
rarely as it can: a few calls per load, however long the context is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.devices.base import Device, Memory, Move
from holdfast.devices.host import run_anywhere
from holdfast.engines.vllm.counters import Counts
from holdfast.engines.vllm.work import Load
from holdfast.errors import BlockError, NodeGoneError, Outcome, ProtocolError, RefusedError
from holdfast.wire.client import Client
from holdfast.wire.messages import Fetch, Fetched, Release, Released

GRACE_S = 0.25
"""How much later than its deadline a node's answer may be before the node counts as gone."""

RELEASE_S = 1.0

_log = logging.getLogger("vllm.holdfast")


class Job(NamedTuple):
    """A load and what this worker needs for it: its rank's keys, a deadline, where to start."""

    load: Load
    keys: bytes
    deadline_s: float
    after: Any


class Ended(NamedTuple):
    """A load that is over, and the pages of it that must not be used."""

    request: str
    failed: Sequence[int]


class Loader:
    """Carries out loads one after the other on a thread of its own."""

    def __init__(self, device: Device, lend: Any) -> None:
        self._device = device
        self._lend = lend
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._counts = Counts()
        self._under_way = 0
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-load", daemon=True)
        self._thread.start()

    def put(self, jobs: Iterable[Job]) -> None:
        """Queue loads."""
        for job in jobs:
            self._under_way += 1
            self._jobs.put(job)

    def rest(self, seconds: float) -> bool:
        """Leave the interpreter to loads until one ends, or for that long; False without any."""
        if self._under_way:
            self._news.wait(seconds)
        return bool(self._under_way)

    def take(self, counts: Counts) -> list[Ended]:
        """Return the loads that ended since the last call, and add up what they counted."""
        if not self._under_way:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
            found, self._counts = self._counts, Counts()
            self._news.clear()
        self._under_way -= len(ended)
        for name, number in found.data.items():
            counts.add(name, number)
        return ended

    def close(self) -> None:
        """Stop after the load under way."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        run_anywhere()
        while (job := self._jobs.get()) is not None:
            counts = Counts()
            outcome, landed = self._carry_out(job, counts)
            failed = job.load.pages[landed:]
            if failed:
                counts.add(f"{outcome}_loads")
                _log.info("%d of %d pages not loaded (%s): they are computed", len(failed),
                          len(job.load.pages), outcome)  # fmt: skip
            with self._lock:
                self._ended.append(Ended(job.load.request, failed))
                self._counts = self._counts.aggregate(counts)
                self._news.set()

    def _carry_out(self, job: Job, counts: Counts) -> tuple[str, int]:
        """Return what became of a load, and how many of its pages hold what they should."""
        client = self._lend.client()
        if client is None or client.arena is None:
            return Outcome.GONE, 0
        start_s = time.monotonic()
        try:
            fetched = client.call(
                Fetch(job.keys, job.deadline_s, job.load.plan), job.deadline_s + GRACE_S
            )
            if not isinstance(fetched, Fetched):
                raise ProtocolError(f"Fetch was answered with {type(fetched).__name__}")
            landed = self._copy(client, client.arena, job, fetched)
        except (NodeGoneError, ProtocolError, RefusedError) as error:
            _log.warning("load given up: %s", error)
            return Outcome.GONE, 0
        except BlockError as error:
            _log.error("load given up, the node named a wrong place: %s", error)
            return Outcome.CORRUPT, 0
        except Exception:  # noqa: BLE001  # a device out of memory, say: nobody waits for ever
            _log.exception("load given up")
            return Outcome.GONE, 0
        counts.add("loads")
        counts.add("load_ms", 1000 * (time.monotonic() - start_s))
        counts.add("load_bytes", landed and len(fetched.places) * self._device.pages.payload_bytes)
        counts.add("loaded_tokens", job.load.tokens * landed // max(1, len(job.load.pages)))
        return fetched.outcome if fetched.outcome != Outcome.OK else Outcome.GONE, landed

    def _copy(self, client: Client, arena: Memory, job: Job, fetched: Fetched) -> int:
        """Copy what landed into its pages; return how many pages count."""
        moves = moves_of(job.load, fetched.places, self._device.pages.pages_per_block)
        try:
            moved = self._device.scatter(arena, moves, job.after).wait()
        except Exception:  # whatever the device says: the slots are not kept until the lease ends
            if fetched.lease:
                client.forget(client.send(Release(fetched.lease)))
            raise
        if not fetched.lease:
            return 0
        released = client.call(Release(fetched.lease), RELEASE_S)
        # A lease that ended while we copied: somebody else may have written there meanwhile.
        valid = isinstance(released, Released) and released.valid
        return sum(len(move.pages) for move in moves) if moved and valid else 0


def moves_of(load: Load, places: Sequence[int], pages_per_block: int) -> list[Move]:
    """Return the copies for the leading blocks of a load that landed at `places`."""
    moves: list[Move] = []
    at, first = 0, load.first
    for place in places:
        pages = load.pages[at : at + pages_per_block - first]
        moves.append(Move(place + HEADER_BYTES, pages, first))
        at += len(pages)
        first = 0
    return moves
