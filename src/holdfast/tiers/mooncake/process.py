"""Start, call and kill the process of Mooncake's client."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from holdfast.buffers import prefer_huge_pages
from holdfast.errors import NodeGoneError
from holdfast.tiers.mooncake.client import READY, ClientRequest, ClientSettings, RecordSpan
from holdfast.tiers.reachability import LocalTimeoutError
from holdfast.wire.remote.stream import Deadline

SETUP_MAX_S = 15.0
"""A client that has not connected after this time is killed; it gives up after about 4 s itself."""

STARTING_S = 5.0
"""A client younger than this may still be starting: a wait for it is no failure of the store."""

HUNG_S = 1.0
"""A request in progress for longer than this has hung."""

FAIR_WAIT_S = 0.2
"""A shorter wait for an answer is no failure of the store: the lane was free too late."""

_POLL_S = 0.02
"""Interval at which a caller in the queue for a lane looks for late answers."""


class ClientLane:
    """A connection to the process for one request at a time, with its own part of the memory.

    `memory` is all of the shared memory; the lane's part begins at `offset`.
    """

    def __init__(self, connection: Connection, memory: memoryview, offset: int) -> None:
        self.offset = offset
        """Offset of its part in the shared memory, in bytes."""
        self._memory = memory
        self._connection = connection
        self._asked_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since the last request was sent."""
        return time.monotonic() - self._asked_s

    def discard_late_answer(self) -> bool:
        """Receive and discard a late answer; return False if it has not arrived."""
        if not self._connection.poll(0):
            return False
        self._connection.recv_bytes()
        return True

    def ask(self, request: ClientRequest, deadline: Deadline) -> list[int]:
        """Return one code for each key; raise OSError or EOFError if there is no answer.

        After TimeoutError the process may still use the lane's memory; after LocalTimeoutError it
        does not.
        """
        if deadline.over:
            raise LocalTimeoutError("no time was left to send the request")
        self._asked_s = time.monotonic()
        self._connection.send_bytes(msgspec.msgpack.encode(request))
        if not self._connection.poll(deadline.seconds()):
            raise TimeoutError("no answer by the deadline")
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=list[int])

    def view(self, span: RecordSpan) -> memoryview:
        """Return the memory of a span in this lane's part."""
        return self._memory[span.offset : span.offset + span.nbytes]


class ClientProcess:
    """One process, its shared memory and its lanes. Thread-safe."""

    def __init__(self, settings: ClientSettings, lanes: int, lane_bytes: int) -> None:
        self._free: queue.LifoQueue[ClientLane] = queue.LifoQueue()  # recently used memory first
        self._lanes: list[ClientLane] = []
        self._late: list[ClientLane] = []
        """Lanes whose caller has timed out; free again once their answer has arrived."""
        self._late_lock = threading.Lock()
        fd = os.memfd_create("holdfast-mooncake")
        try:
            os.ftruncate(fd, lanes * lane_bytes)
            memory = mmap.mmap(fd, lanes * lane_bytes)
            prefer_huge_pages(memory)
            self._control, remote_control = Pipe()
            remote_ends = [remote_control]
            for number in range(lanes):
                local_end, remote_end = Pipe()
                offset = number * lane_bytes
                self._lanes.append(ClientLane(local_end, memoryview(memory), offset))
                remote_ends.append(remote_end)
            fds = [fd, *(connection.fileno() for connection in remote_ends)]
            command = [sys.executable, "-m", "holdfast.tiers.mooncake.client"]
            command += [msgspec.json.encode(settings).decode(), *map(str, fds)]
            self._popen = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it logs every call; errors arrive on `control`
                start_new_session=True,
            )
            for connection in remote_ends:
                connection.close()
        finally:
            os.close(fd)
        self._started_s = time.monotonic()
        self._ready = False
        self._ready_lock = threading.Lock()

    def acquire(self, deadline: Deadline) -> ClientLane:
        """Wait until the client is ready and a lane is free; `release` or `set_late` must follow.

        Raises TimeoutError, LocalTimeoutError if the store is not at fault, or NodeGoneError with
        the client's error text.
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

    def release(self, lane: ClientLane) -> None:
        """Return a lane after its answer."""
        self._free.put(lane)

    def set_late(self, lane: ClientLane) -> bool:
        """Keep a lane until its late answer arrives; return False if the request has hung."""
        if lane.waited_s >= HUNG_S:
            return False
        with self._late_lock:
            self._late.append(lane)
        return True

    @property
    def must_be_replaced(self) -> bool:
        """Whether the process has ended, hangs, or did not become ready in time."""
        if self._popen.poll() is not None:
            return True
        if not self._ready:
            return time.monotonic() - self._started_s > SETUP_MAX_S
        self._release_answered()
        with self._late_lock:
            return any(lane.waited_s >= HUNG_S for lane in self._late)

    def kill(self) -> None:
        """Kill the process; a caller that waits for an answer gets an error.

        Connections and memory are freed with the last call that uses them.
        """
        self._popen.kill()
        self._popen.wait()

    def _release_answered(self) -> None:
        """Free lanes whose late answers have arrived."""
        with self._late_lock:
            answered = []
            with contextlib.suppress(EOFError, OSError):  # it has ended; the next call fails
                answered += [lane for lane in self._late if lane.discard_late_answer()]
            self._late = [lane for lane in self._late if lane not in answered]
        for lane in answered:
            self._free.put(lane)

    def _not_ready(self) -> TimeoutError:
        starting = time.monotonic() - self._started_s < STARTING_S
        kind = LocalTimeoutError if starting else TimeoutError
        return kind("Mooncake's client is not ready yet")

    def _await_ready(self, deadline: Deadline) -> None:
        if not self._control.poll(max(0.0, deadline.at - time.monotonic())):
            raise self._not_ready()
        try:
            message = self._control.recv_bytes()
        except (EOFError, OSError) as error:
            raise NodeGoneError("Mooncake's client has ended without an error message") from error
        if message != READY:
            raise NodeGoneError(message.decode(errors="replace"))
        self._ready = True
        for lane in self._lanes:
            self._free.put(lane)
