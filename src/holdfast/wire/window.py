"""What a node lays open to targets over NIXL: lanes of memory of its own, and never its arena.

A record goes through a lane: copied in before a put, copied out after a get and verified only
then, so that nobody can change it between check and use. A lane whose answer did not come in time
may still be written to: it is never used again, and the window with it ends at the next occasion.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.limits import MIB
from holdfast.wire.nixl import Agent, Span, installed, span_of
from holdfast.wire.stream import Deadline

LANES = 4
LANE_BYTES = 72 * MIB
"""Room for 32 records of 2 MiB. Memory is taken only as lanes are used, and what does not fit in
one goes over TCP."""

DETOUR_S = 60.0
"""After a call over NIXL that failed, records go over TCP for so long; so they do where a
connection was made while there was no window."""

_ATTEND_S = 50e-6

_log = logging.getLogger(__name__)


class Lane:
    """Part of a window, lent to one call."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def spans(self, sizes: Sequence[int]) -> list[Span]:
        """Return where so many bytes each go, one behind the other."""
        at, found = span_of(self.memory).address, []
        for size in sizes:
            found.append(Span(at, size))
            at += size
        return found

    def fill(self, parts: Sequence[memoryview | bytes | bytearray]) -> None:
        """Copy buffers in."""
        at = 0
        for part in parts:
            _copy(self.memory[at : at + len(part)], part)
            at += len(part)

    def empty(self, into: Sequence[memoryview]) -> None:
        """Copy out into buffers."""
        at = 0
        for part in into:
            _copy(part, self.memory[at : at + len(part)])
            at += len(part)


class Window:
    """An agent and its lanes. Any thread."""

    def __init__(self, lanes: int = LANES, lane_bytes: int = LANE_BYTES) -> None:
        self._agent = Agent("node")  # first here, so that it goes before the memory does
        self._memory = mmap.mmap(-1, lanes * lane_bytes)
        whole = memoryview(self._memory)
        self._agent.register(whole)
        self._lock = threading.Lock()
        self._free = [
            Lane(whole[at : at + lane_bytes]) for at in range(0, lanes * lane_bytes, lane_bytes)
        ]
        self._lane_bytes = lane_bytes
        self.metadata = self._agent.metadata()
        self.spoiled = False
        """A lane was lost: connections with this window end, a new one takes its place."""

    def lend(self, nbytes: int) -> Lane | None:
        """Return a lane for so many bytes; None if they do not fit, or none is free."""
        with self._lock:
            fits = 0 < nbytes <= self._lane_bytes and not self.spoiled
            return self._free.pop() if fits and self._free else None

    def give_back(self, lane: Lane) -> None:
        """Take a lane back whose call was answered."""
        with self._lock:
            self._free.append(lane)

    def attend(self, arrives: Callable[[float], bool], deadline: Deadline) -> None:
        """Do our part of what targets move through the lanes, until their answer arrives.

        Raises TimeoutError at the deadline.
        """
        while not arrives(min(_ATTEND_S, deadline.seconds())):
            self._agent.progress()

    def spoil(self) -> None:
        """Give up the lane of a call that was not answered, and all others with it."""
        with self._lock:
            self.spoiled = True


class Road:
    """Makes a window in the background, and another where one was spoiled; one for all targets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window: Window | None = None
        self._making: threading.Thread | None = None
        self._usable = installed()

    def window(self) -> Window | None:
        """Return the window, None while there is none; never waits."""
        with self._lock:
            window = self._window
            if window is not None and not window.spoiled:
                return window
            if self._usable and self._making is None:
                self._making = threading.Thread(
                    target=self._make, name="holdfast-nixl", daemon=True
                )
                self._making.start()
        return None

    def wait(self, timeout_s: float) -> Window | None:
        """Return the window, waiting for it to be made; for start-up and tests."""
        window = self.window()
        making = self._making
        if window is None and making is not None:
            making.join(timeout_s)
            window = self.window()
        return window

    def _make(self) -> None:
        try:
            made = Window()
        except Exception as error:  # noqa: BLE001  # a library of others, and TCP does as well
            _log.warning("NIXL is installed but of no use, records go over TCP: %s", error)
            made = None
        with self._lock:
            self._usable = made is not None
            self._window, self._making = made, None


def _copy(to: memoryview, part: memoryview | bytes | bytearray) -> None:
    """Copy bytes with the interpreter free for others."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(part, np.uint8))


class Detour:
    """Whether records to one target go over TCP for now, although there is a road."""

    def __init__(self, road: Road | None) -> None:
        self._road = road
        self._until = 0.0

    def begin(self) -> None:
        """Leave the road for a while: a call over it failed."""
        self._until = time.monotonic() + DETOUR_S

    def window(self) -> Window | None:
        """Return what to lay open to a target; None on a detour, or where there is nothing yet."""
        on_detour = self._road is None or time.monotonic() < self._until
        return None if on_detour or self._road is None else self._road.window()

    def is_over(self, made_s: float) -> bool:
        """Whether to connect anew instead of over TCP, which was begun at `made_s`."""
        return time.monotonic() >= made_s + DETOUR_S and self.window() is not None
