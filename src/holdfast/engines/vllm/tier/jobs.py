"""Transfer jobs between vLLM's host memory and a node: threads carry them out in parts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from holdfast.devices.host import run_anywhere
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.named_blocks import BlockMemory, NamedSession, PrefixPosition
from holdfast.workers import workers

PART_BYTES = 8 * MIB
"""Bytes of one part of a job: while one thread copies a part, the node verifies the next."""

LOAD_THREADS = 2
SAVE_THREADS = 1

_log = logging.getLogger("vllm.holdfast")


class PrefixRun(NamedTuple):
    """Blocks of a job that follow each other in a prefix, behind `after`, and their memory."""

    names: Sequence[bytes]
    memory: Sequence[BlockMemory]
    after: PrefixPosition = PrefixPosition()


class EndedJob(NamedTuple):
    """A job that has ended: the names of the blocks that were transferred, and those that failed.

    `seconds`: since the job was submitted.
    """

    number: int
    transferred: Sequence[bytes]
    failed: Sequence[bytes]
    seconds: float


class _Job:
    def __init__(self, number: int, parts: int) -> None:
        self.number = number
        self.began_s = time.monotonic()
        self.parts_left = parts
        self.transferred: list[bytes] = []
        self.failed: list[bytes] = []

    def ended(self) -> EndedJob:
        seconds = time.monotonic() - self.began_s
        return EndedJob(self.number, self.transferred, self.failed, seconds)


class TransferJobs:
    """The jobs of one tier. `load_s`: deadline of a load in seconds.

    A job is submitted and its end polled by the scheduler's thread. The memory of a job's blocks
    stays valid until the job has ended.
    """

    def __init__(self, session: NamedSession, load_s: float) -> None:
        self._session = session
        self._load_s = load_s
        self._part_blocks = max(1, PART_BYTES // session.raw_bytes)
        self._loading = workers(LOAD_THREADS, "holdfast-tier-load", run_anywhere)
        self._saving = workers(SAVE_THREADS, "holdfast-tier-save", run_anywhere)
        self._changed = threading.Condition()
        self._open = 0
        self._ended: SimpleQueue[EndedJob] = SimpleQueue()

    def load(self, number: int, run: PrefixRun) -> None:
        """Begin to copy blocks from the node to their memory."""
        until_s = time.monotonic() + self._load_s

        def get(part: PrefixRun) -> list[Outcome]:
            left_s = max(0.0, until_s - time.monotonic())
            return self._session.get(part.names, part.memory, left_s)

        self._submit(number, self._loading, get, [run])

    def save(self, number: int, runs: Sequence[PrefixRun]) -> None:
        """Begin to copy blocks from their memory to the node."""

        def put(part: PrefixRun) -> list[Outcome]:
            return self._session.put(part.names, part.memory, part.after)

        self._submit(number, self._saving, put, runs)

    def fail(self, number: int, names: Sequence[bytes]) -> None:
        """End a job at once without a transfer."""
        self._ended.put(EndedJob(number, [], names, 0.0))

    def ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call."""
        found: list[EndedJob] = []
        while True:
            try:
                found.append(self._ended.get_nowait())
            except Empty:
                return found

    def drain(self) -> None:
        """Wait until every submitted job has ended; `ended` returns them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def close(self) -> None:
        """Cancel the transfers that have not begun, and wait for the others.

        After it no memory is written to, and every job has ended; cancelled blocks have failed.
        """
        pools = (self._loading, self._saving)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.shutdown()

    def _submit(
        self,
        number: int,
        pool: ThreadPoolExecutor,
        transfer: Callable[[PrefixRun], list[Outcome]],
        runs: Sequence[PrefixRun],
    ) -> None:
        parts = [part for run in runs for part in self._parts(run)]
        job = _Job(number, len(parts))
        if not parts:
            self._ended.put(job.ended())
            return
        with self._changed:
            self._open += 1
        for part in parts:
            cancelled = partial(self._end_part, job, part, [Outcome.GONE] * len(part.names))
            try:
                future = pool.submit(self._carry_out, job, transfer, part)
            except RuntimeError:  # closed, or the interpreter exits
                cancelled()
            else:
                future.add_done_callback(partial(_call_if_cancelled, cancelled))

    def _parts(self, run: PrefixRun) -> list[PrefixRun]:
        size, found = self._part_blocks, list[PrefixRun]()
        for first in range(0, len(run.names), size):
            names = run.names[first : first + size]
            after = run.after
            if first:
                after = PrefixPosition(run.names[first - 1], run.after.depth + first)
            found.append(PrefixRun(names, run.memory[first : first + size], after))
        return found

    def _carry_out(
        self, job: _Job, transfer: Callable[[PrefixRun], list[Outcome]], part: PrefixRun
    ) -> None:
        outcomes = [Outcome.GONE] * len(part.names)
        try:
            outcomes = transfer(part)
        except Exception:  # noqa: BLE001  # no request fails for it
            _log.exception("a transfer of %d blocks failed; they are recomputed", len(part.names))
        finally:
            self._end_part(job, part, outcomes)

    def _end_part(self, job: _Job, part: PrefixRun, outcomes: Sequence[Outcome]) -> None:
        with self._changed:
            for name, outcome in zip(part.names, outcomes, strict=True):
                (job.transferred if outcome is Outcome.OK else job.failed).append(name)
            job.parts_left -= 1
            if not job.parts_left:
                self._ended.put(job.ended())
                self._open -= 1
                self._changed.notify_all()


def _call_if_cancelled(call: Callable[[], None], future: Future[None]) -> None:
    if future.cancelled():
        call()
