"""The process with Mooncake's client as the tier sees it: started, asked, and killed when late."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import msgspec

from holdfast.buffers import prefer_huge_pages
from holdfast.errors import NodeGoneError
from holdfast.tiers.mooncake.messages import READY, Request, Settings, Share
from holdfast.wire.stream import Deadline

SETUP_S = 15.0
"""By then the client has connected, or is killed; it gives up by itself after about 4 s."""


START_S = 5.0
"""A client so young may still be starting: whoever waits for it blames nobody."""

ANSWER_S = 1.0
"""A request that is under way for so long has hung; a younger one's caller was short of time."""

FAIR_S = 0.2
"""Whoever waited less than this for an answer got its lane too late to blame the store for it."""

_LOOK_S = 0.02


class NotYetError(TimeoutError):
    """The time ran out on this side: in the queue for a lane, or before the client was ready."""


class Lane:
    """One request at a time, and the part of the shared memory that is its own."""

    def __init__(self, connection: Connection, memory: memoryview, offset: int) -> None:
        self.offset = offset
        """Where its part begins in the whole."""
        self._memory = memory
        self._connection = connection
        self._asked_s = 0.0

    @property
    def waited_s(self) -> float:
        """How long ago it was asked."""
        return time.monotonic() - self._asked_s

    def settle(self) -> bool:
        """Take an answer off that came too late; False where it is not here yet."""
        if not self._connection.poll(0):
            return False
        self._connection.recv_bytes()
        return True

    def ask(self, request: Request, deadline: Deadline) -> list[int]:
        """Return one code for each key; raise OSError or EOFError where there is no answer.

        After TimeoutError the process may still use the lane's memory, but not after NotYetError.
        """
        if deadline.over:
            raise NotYetError("no time was left to ask")
        self._asked_s = time.monotonic()
        self._connection.send_bytes(msgspec.msgpack.encode(request))
        if not self._connection.poll(deadline.seconds()):
            raise TimeoutError("no answer by the deadline")
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=list[int])

    def part(self, share: Share) -> memoryview:
        """Return the memory of a share that lies in this lane."""
        at = share.offset - self.offset
        return self._memory[at : at + share.nbytes]


class ClientProcess:
    """One process, its shared memory and its lanes. Any thread may call."""

    def __init__(self, settings: Settings, lanes: int, lane_bytes: int) -> None:
        fd = os.memfd_create("holdfast-mooncake")
        os.ftruncate(fd, lanes * lane_bytes)
        self._memory = mmap.mmap(fd, lanes * lane_bytes)
        prefer_huge_pages(self._memory)
        self._control, far_control = _pair()
        self._lanes: queue.LifoQueue[Lane] = queue.LifoQueue()  # warm memory first
        self._all: list[Lane] = []
        self._owing: list[Lane] = []
        """Lanes whose answer nobody waits for any more; of use again once it is here."""
        self._owing_lock = threading.Lock()
        far = [far_control]
        for number in range(lanes):
            near, far_lane = _pair()
            offset = number * lane_bytes
            view = memoryview(self._memory)[offset : offset + lane_bytes]
            self._all.append(Lane(near, view, offset))
            far.append(far_lane)
        fds = [fd, *(one.fileno() for one in far)]
        command = [sys.executable, "-m", "holdfast.tiers.mooncake.client"]
        command += [msgspec.json.encode(settings).decode(), *map(str, fds)]
        self._popen = subprocess.Popen(
            command,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a line for nearly everything; troubles come by `control`
            start_new_session=True,
        )
        for one in far:
            one.close()
        os.close(fd)
        self._begun_s = time.monotonic()
        self._ready = False
        self._readying = threading.Lock()

    def take(self, deadline: Deadline) -> Lane:
        """Wait until the client is ready and a lane is free; `give` must follow.

        Raises TimeoutError, which is NotYetError where nobody is to blame, or NodeGoneError with
        what the client said instead.
        """
        if not self._readying.acquire(timeout=max(0.0, deadline.at - time.monotonic())):
            raise self._not_ready()
        try:
            if not self._ready:
                self._await_ready(deadline)
        finally:
            self._readying.release()
        while not deadline.over:
            self._collect()
            with contextlib.suppress(queue.Empty):  # one may be owed from this moment on
                left_s = max(0.0, deadline.at - time.monotonic())
                return self._lanes.get(timeout=min(left_s, _LOOK_S))
        raise NotYetError("all lanes are busy")

    def give(self, lane: Lane) -> None:
        """Return a lane after an answer."""
        self._lanes.put(lane)

    def owe(self, lane: Lane) -> bool:
        """Keep a lane until its late answer is here; False where it has waited long enough."""
        if lane.waited_s >= ANSWER_S:
            return False
        with self._owing_lock:
            self._owing.append(lane)
        return True

    @property
    def hopeless(self) -> bool:
        """Whether it has ended or hangs, or has not become ready in time."""
        if self._popen.poll() is not None:
            return True
        if not self._ready:
            return time.monotonic() - self._begun_s > SETUP_S
        self._collect()
        with self._owing_lock:
            return any(lane.waited_s >= ANSWER_S for lane in self._owing)

    def kill(self) -> None:
        """End it at once; who waits for an answer hears that it has ended.

        Connections and memory go with the last call that uses them.
        """
        self._popen.kill()
        self._popen.wait()

    def _collect(self) -> None:
        """Take lanes back whose late answers are here."""
        with self._owing_lock:
            settled = []
            with contextlib.suppress(EOFError, OSError):  # it has ended, as its next caller sees
                settled += [lane for lane in self._owing if lane.settle()]
            self._owing = [lane for lane in self._owing if lane not in settled]
        for lane in settled:
            self._lanes.put(lane)

    def _not_ready(self) -> TimeoutError:
        young = time.monotonic() - self._begun_s < START_S
        return (NotYetError if young else TimeoutError)("Mooncake's client is not ready yet")

    def _await_ready(self, deadline: Deadline) -> None:
        if not self._control.poll(max(0.0, deadline.at - time.monotonic())):
            raise self._not_ready()
        try:
            said = self._control.recv_bytes()
        except (EOFError, OSError) as error:
            raise NodeGoneError("Mooncake's client has ended without a word") from error
        if said != READY:
            raise NodeGoneError(said.decode(errors="replace"))
        self._ready = True
        for lane in self._all:
            self._lanes.put(lane)


def _pair() -> tuple[Connection, Connection]:
    """Return two ends of a local connection."""
    near, far = socket.socketpair()
    return Connection(near.detach()), Connection(far.detach())
