"""A child process for calls that may hang: lanes to it, shared memory, and its replacement.

A thread that is blocked in a hung system call or library cannot be ended, and a process with such a
thread cannot exit. So a tier makes such calls in a child process: the tier has the deadlines, never
waits long for the child, and can end without it. Records cross in memory that both processes map:
a call that ends late accesses that memory only, never a buffer of the tier's caller.

The child's side is `tiers/child_serving.py`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

from holdfast.buffers import prefer_huge_pages
from holdfast.errors import NodeGoneError
from holdfast.tiers.child_serving import READY
from holdfast.tiers.reachability import LocalTimeoutError
from holdfast.wire.remote.stream import Deadline

T = TypeVar("T")

REAP_S = 1.0
"""Longest wait for the end of a killed process; the kernel may keep it until its call returns."""

_GIVEN_UP_S = 0.5
"""Interval at which a caller that waits for an answer looks whether the process was killed."""

_POLL_S = 0.02
"""Interval at which a caller in the queue for a lane looks for late answers."""


class ChildLimits(NamedTuple):
    """Time limits of a child process, in seconds.

    A child that is not ready after `setup_s` is replaced; while it is younger than `starting_s`, a
    wait for it is no failure of what it calls. A request in progress for `hung_s` has hung. A wait
    for an answer shorter than `fair_wait_s` is no failure: the lane was free too late.
    """

    setup_s: float
    starting_s: float
    hung_s: float
    fair_wait_s: float = 0.2


class ChildProgram(NamedTuple):
    """The program of a child process, which is run as `python -m MODULE SETTINGS FD ...`.

    `label` names it in errors, `memory_name` its shared memory in /proc. It has `lanes` lanes with
    `lane_bytes` of memory each.
    """

    module: str
    label: str
    memory_name: str
    lanes: int
    lane_bytes: int
    limits: ChildLimits


class ChildLane:
    """A connection to the child with its own part of the shared memory, for one caller at a time.

    The child answers the requests of a lane in order. `memory` is all of the shared memory; the
    lane's part begins at `offset`.
    """

    def __init__(self, connection: Connection, memory: memoryview, offset: int) -> None:
        self.offset = offset
        """Offset of its part in the shared memory, in bytes."""
        self.is_given_up = False
        """Whether the process was killed; a caller then waits for no answer of it."""
        self._memory = memory
        self._connection = connection
        self._asked_s = 0.0
        self.unanswered = 0
        """Requests that were sent and not answered yet."""

    @property
    def waited_s(self) -> float:
        """Seconds since the last request was sent."""
        return time.monotonic() - self._asked_s

    def discard_late_answers(self) -> bool:
        """Receive and discard late answers; return False if some have not arrived."""
        while self.unanswered:
            if not self._connection.poll(0):
                return False
            self._connection.recv_bytes()
            self.unanswered -= 1
        return True

    def send(self, request: bytes, deadline: Deadline) -> None:
        """Send a request; raise LocalTimeoutError past the deadline, OSError if the child ended."""
        if deadline.over:
            raise LocalTimeoutError("no time was left to send the request")
        self._asked_s = time.monotonic()
        self._connection.send_bytes(request)
        self.unanswered += 1

    def receive(self, deadline: Deadline) -> bytes:
        """Return the answer to the oldest request; raise OSError or EOFError if there is none.

        After TimeoutError the process may still use the lane's memory.
        """
        while not self._connection.poll(max(0.0, min(_GIVEN_UP_S, deadline.at - time.monotonic()))):
            if self.is_given_up:  # the kernel may keep its end of the connection open
                raise EOFError("the process was killed")
            if deadline.over:
                raise TimeoutError("no answer by the deadline")
        answer = self._connection.recv_bytes()
        self.unanswered -= 1
        return answer

    def ask(self, request: bytes, deadline: Deadline) -> bytes:
        """Send one request and return its answer; see `send` and `receive` for errors."""
        self.send(request, deadline)
        return self.receive(deadline)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return memory by its offset in all of the shared memory."""
        return self._memory[offset : offset + nbytes]


class LaneProcess:
    """One process, its shared memory and its lanes. Thread-safe."""

    def __init__(self, program: ChildProgram, settings: str) -> None:
        self._program = program
        self._free: queue.LifoQueue[ChildLane] = queue.LifoQueue()  # recently used memory first
        self._lanes: list[ChildLane] = []
        self._late: list[ChildLane] = []
        """Lanes whose caller has timed out; free again once their answers have arrived."""
        self._late_lock = threading.Lock()
        fd = os.memfd_create(program.memory_name)
        try:
            os.ftruncate(fd, program.lanes * program.lane_bytes)
            memory = mmap.mmap(fd, program.lanes * program.lane_bytes)
            prefer_huge_pages(memory)
            self._control, remote_control = Pipe()
            remote_ends = [remote_control]
            for number in range(program.lanes):
                local_end, remote_end = Pipe()
                offset = number * program.lane_bytes
                self._lanes.append(ChildLane(local_end, memoryview(memory), offset))
                remote_ends.append(remote_end)
            fds = [fd, *(connection.fileno() for connection in remote_ends)]
            self._popen = subprocess.Popen(
                [sys.executable, "-m", program.module, settings, *map(str, fds)],
                pass_fds=fds,
                # No terminal, log or pipe of this process stays open in a child that cannot end.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for connection in remote_ends:
                connection.close()
        finally:
            os.close(fd)
        self._started_s = time.monotonic()
        self._ready = False
        self._ready_lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._popen.pid

    @property
    def fair_wait_s(self) -> float:
        """See `ChildLimits`."""
        return self._program.limits.fair_wait_s

    def acquire(self, deadline: Deadline) -> ChildLane:
        """Wait until the process is ready and a lane is free; `release` or `set_late` must follow.

        Raises TimeoutError, LocalTimeoutError if nothing beyond this machine is at fault, or
        NodeGoneError with the process's error text.
        """
        if not self._ready_lock.acquire(timeout=max(0.0, deadline.at - time.monotonic())):
            raise self._not_ready()
        try:
            if not self._ready:
                self._await_ready(deadline)
        finally:
            self._ready_lock.release()
        while not deadline.over:
            self._release_answered()
            with contextlib.suppress(queue.Empty):  # a late answer may arrive during the wait
                left_s = max(0.0, deadline.at - time.monotonic())
                return self._free.get(timeout=min(left_s, _POLL_S))
        raise LocalTimeoutError("all lanes are busy")

    def release(self, lane: ChildLane) -> None:
        """Return a lane after its answers."""
        self._free.put(lane)

    def set_late(self, lane: ChildLane) -> bool:
        """Keep a lane until its late answers arrive; return False if a request has hung."""
        if lane.waited_s >= self._program.limits.hung_s:
            return False
        with self._late_lock:
            self._late.append(lane)
        return True

    @property
    def must_be_replaced(self) -> bool:
        """Whether the process has ended, hangs, or did not become ready in time."""
        if self.has_ended:
            return True
        if not self._ready:
            return time.monotonic() - self._started_s > self._program.limits.setup_s
        self._release_answered()
        with self._late_lock:
            return any(lane.waited_s >= self._program.limits.hung_s for lane in self._late)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; one that was killed may not have."""
        return self._popen.poll() is not None

    def kill(self) -> None:
        """Kill the process, and wait at most `REAP_S` for its end.

        A caller that waits for an answer gets an error when the process ends. Connections and
        memory are freed with the last call that uses them.
        """
        self._popen.kill()
        for lane in self._lanes:
            lane.is_given_up = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)

    def _release_answered(self) -> None:
        """Free lanes whose late answers have arrived."""
        with self._late_lock:
            answered = []
            with contextlib.suppress(EOFError, OSError):  # it has ended; the next call fails
                answered += [lane for lane in self._late if lane.discard_late_answers()]
            self._late = [lane for lane in self._late if lane not in answered]
        for lane in answered:
            self._free.put(lane)

    def _not_ready(self) -> TimeoutError:
        starting = time.monotonic() - self._started_s < self._program.limits.starting_s
        kind = LocalTimeoutError if starting else TimeoutError
        return kind(f"{self._program.label} is not ready yet")

    def _await_ready(self, deadline: Deadline) -> None:
        if not self._control.poll(max(0.0, deadline.at - time.monotonic())):
            raise self._not_ready()
        try:
            message = self._control.recv_bytes()
        except (EOFError, OSError) as error:
            raise NodeGoneError(
                f"{self._program.label} has ended without an error message"
            ) from error
        if message != READY:
            raise NodeGoneError(message.decode(errors="replace"))
        self._ready = True
        for lane in self._lanes:
            self._free.put(lane)


class SupervisedChild:
    """The child process of one tier: started at the first call, replaced if it ends or hangs.

    At most one killed process that has not ended is left behind: while there is one, a second one
    that hangs is not replaced. `start` returns a new process by the deadline of the call that needs
    it. Thread-safe.
    """

    def __init__(self, label: str, start: Callable[[Deadline], LaneProcess]) -> None:
        self._label = label
        self._start = start
        self._starting = threading.Lock()
        """Held while the process is checked or started, which may take until a call's deadline."""
        self._process: LaneProcess | None = None
        self._left_behind: LaneProcess | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The number of the present process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def call(self, work: Callable[[ChildLane], T], deadline: Deadline) -> T:
        """Return the result of `work` with a lane; an exception of it kills the process.

        TimeoutError does not, until a request has hung: the lane waits for its late answers. Raises
        LocalTimeoutError for a timeout that is no failure of what the child calls.
        """
        process = self._running(deadline)
        lane = process.acquire(deadline)
        try:
            result = work(lane)
        except TimeoutError as error:
            if not lane.unanswered:
                process.release(lane)
                raise
            if not process.set_late(lane):
                process.kill()  # it hangs, and may still use the lane's memory
            elif lane.waited_s < process.fair_wait_s:
                raise LocalTimeoutError(str(error)) from error
            raise
        except BaseException:
            process.kill()  # it may still use the lane's memory
            raise
        process.release(lane)
        return result

    def close(self) -> None:
        """Kill the process; wait at most `REAP_S` for its end. Later calls raise NodeGoneError."""
        with self._starting:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _running(self, deadline: Deadline) -> LaneProcess:
        """Return the process; start it if there is none, or replace it if it does not work."""
        if not self._starting.acquire(timeout=max(0.0, deadline.at - time.monotonic())):
            raise LocalTimeoutError(f"{self._label} is being started")
        try:
            if self._closed:
                raise NodeGoneError(f"{self._label} was ended")
            process = self._process
            if process is not None:
                if not process.must_be_replaced:
                    return process
                self._leave(process)
                self._process = None
            self._process = self._start(deadline)
            return self._process
        finally:
            self._starting.release()

    def _leave(self, process: LaneProcess) -> None:
        """Kill a process; raise TimeoutError if an earlier one has not ended either."""
        if self._left_behind is not None and not self._left_behind.has_ended:
            if not process.has_ended:
                raise TimeoutError(f"two processes of {self._label} hang, so no other is started")
            return
        process.kill()
        self._left_behind = None if process.has_ended else process
