"""The Mooncake tier: whole records under `prefix:key` in a Mooncake Store that already runs.

Records pass through memory that is shared with the process of Mooncake's client: one copy on each
way, so that a call that ends late leaves nothing of the caller's in anybody's hands.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec
import numpy as np

from holdfast.blocks.envelope import read_header
from holdfast.blocks.world import World
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigError, FormatError, HoldfastError, Outcome
from holdfast.limits import MIB
from holdfast.tiers.base import Get, Place, Put, Reserved, Survivor, Usage
from holdfast.tiers.gate import Gate
from holdfast.tiers.mooncake import messages as m
from holdfast.tiers.mooncake.process import FAIR_S, ClientProcess, Lane, NotYetError
from holdfast.tiers.patience import Patience
from holdfast.tiers.pool.breaker import Ending
from holdfast.wire.address import tcp_endpoint
from holdfast.wire.dial import dial
from holdfast.wire.stream import Deadline
from holdfast.workers import workers

LANES = 4
"""Calls at once."""

PIECE_BYTES = 16 * MIB
"""A batch is cut into pieces of about this: one is copied while another travels."""

KEYS_AT_ONCE = 1_000
"""Keys in one request: it must fit into a local connection's buffer."""

NO_ROOM, WRONG_LENGTH, NOT_FOUND = -200, -600, -704
EXPECTED = (NO_ROOM, WRONG_LENGTH, NOT_FOUND)
"""Mooncake's codes that say nothing against it."""

_STORED = {0: Outcome.OK, NO_ROOM: Outcome.FULL}


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the master is, and how records travel; times in seconds.

    `protocol`: tcp or rdma, over `devices`. `host`: how other clients reach this machine; empty is
    the address that the master is reached from. `lane_bytes`: the largest record, and how much
    one of the four calls at once moves at a time.
    """

    master: str
    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    prefix: str = "holdfast"
    lane_bytes: int = 64 * MIB
    deadline_s: float = 2.0
    ask_s: float = 0.25


class _Item(NamedTuple):
    """One record of a batch: its number there, its name, and the caller's memory."""

    number: int
    key: str
    memory: memoryview


class MooncakeTier:
    """See `holdfast.tiers.base.Shared`. Opens although no master answers: one may come.

    Raises ConfigError if Mooncake's client is not installed.
    """

    def __init__(
        self, options: MooncakeOptions, clock: Clock | None = None, name: str = "mooncake"
    ) -> None:
        if find_spec("mooncake") is None:
            raise ConfigError(
                "Mooncake's client is not installed: pip install 'holdfast[mooncake]', or, on a "
                "machine with CUDA, mooncake-transfer-engine"
            )
        self.name = name
        self.options = options
        self._patience = Patience(f"mooncake master {options.master}", clock or SystemClock())
        self._gate = Gate()
        self._threads = workers(LANES, f"holdfast-{name}")
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        """Held while the client is looked at or started, which may take a caller's whole time."""
        self._process: ClientProcess | None = None
        self._usage = [0, 0, 0]

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Nothing is reserved: the store finds room when records come."""
        return Reserved([Place(0)] * len(sizes), [])

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Copy records to shared memory and have them stored; FULL where there is no room."""
        outcomes = [Outcome.GONE] * len(batch)
        items = []
        for number, put in enumerate(batch):
            try:
                items.append(_Item(number, self._name(read_header(put.record)[0].key), put.record))
            except FormatError:
                outcomes[number] = Outcome.CORRUPT
        deadline = Deadline.within(self.options.deadline_s)
        pieces = self._pieces(items, outcomes, Outcome.FULL)
        self._abreast(pieces, lambda piece: self._write(piece, outcomes, deadline))
        return outcomes

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Have records brought to shared memory and copy them to their buffers."""
        outcomes = [Outcome.GONE] * len(batch)
        items = [_Item(n, self._name(get.key), get.into) for n, get in enumerate(batch)]
        deadline = Deadline.within(self.options.deadline_s)
        pieces = self._pieces(items, outcomes, Outcome.MISS)
        self._abreast(pieces, lambda piece: self._read(piece, outcomes, deadline))
        return outcomes

    def free(self, places: Sequence[Place]) -> None:
        """Nothing to forget: others may want them."""

    def survivors(self) -> Iterator[Survivor]:
        """Yield nothing: whoever needs a block asks for it."""
        return iter(())

    def held(
        self, world: World, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Ask for some at a time, up to the first hole."""
        del world  # a key is of one world only
        deadline = Deadline.within(min(self.options.ask_s, within_s))
        found = 0
        while start + found < len(keys) and self._gate.enter():
            some = keys[start + found : start + found + KEYS_AT_ONCE]
            codes: list[int] = []

            def ask(
                lane: Lane, some: Sequence[bytes] = some, codes: list[int] = codes
            ) -> list[int]:
                codes += lane.ask(m.Exist([self._name(key) for key in some]), deadline)
                return codes

            try:
                if self._call(ask, deadline) is not Outcome.OK:
                    self._count(2, 1)
            finally:
                self._gate.leave()
            run = next((at for at, code in enumerate(codes) if code != 1), len(codes))
            found += run
            if run < len(some):
                break
        return found

    def condemn(self, batch: Sequence[Get]) -> None:
        """Have records removed, even if somebody reads them."""
        deadline = Deadline.within(self.options.ask_s)
        names = [self._name(get.key) for get in batch[:KEYS_AT_ONCE]]
        if names and self._gate.enter():
            try:
                self._call(lambda lane: lane.ask(m.Remove(names), deadline), deadline)
            finally:
                self._gate.leave()

    def reachable(self) -> bool:
        """Return whether the master is worth a call; `holdfast.tiers.base.Reachable`."""
        return self._patience.lets_through()

    def describe(self) -> dict[str, Any]:
        """Return the master, and what is thought of it."""
        phase, trouble = self._patience.health()
        master = self.options.master
        member = {"id": "master", "address": master, "state": trouble or "active", "share": 1.0}
        return {"tier": self.name, "members": [{**member, "phase": str(phase), "tiers": []}]}

    def usage(self) -> Usage:
        """Return what was moved; what the store holds is its own to say."""
        return Usage(0, 0, 0, *self._usage)

    def close(self) -> None:
        """Wait for calls under way, which their deadlines end, and end the process."""
        self._gate.shut()
        self._threads.shutdown(wait=True)
        with self._starting:
            process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _name(self, key: bytes) -> str:
        return f"{self.options.prefix}:{key.hex()}"

    def _pieces(
        self, items: Sequence[_Item], outcomes: list[Outcome], too_large: Outcome
    ) -> Iterator[list[_Item]]:
        """Cut a batch into pieces that fit into a lane, and may go abreast."""
        piece: list[_Item] = []
        room = piece_bytes = min(PIECE_BYTES, self.options.lane_bytes)
        for item in items:
            if len(item.memory) > self.options.lane_bytes:
                outcomes[item.number] = too_large
                self._patience.refused(
                    f"a record has {len(item.memory)} bytes, a lane {self.options.lane_bytes}; "
                    "raise the tier's lane"
                )
                continue
            if piece and (len(item.memory) > room or len(piece) == KEYS_AT_ONCE):
                yield piece
                piece, room = [], piece_bytes
            piece.append(item)
            room -= len(item.memory)
        if piece:
            yield piece

    def _abreast(
        self, pieces: Iterable[Sequence[_Item]], act: Callable[[Sequence[_Item]], None]
    ) -> None:
        """Act on all pieces, the last in this thread; return when all have ended."""
        *others, last = [*pieces] or [[]]
        if last and self._gate.enter():
            started = [self._threads.submit(act, piece) for piece in others]
            try:
                act(last)
                for done in started:
                    done.result()
            finally:
                wait(started)  # whatever became of one: no other uses the caller's memory then
                self._gate.leave()

    def _write(self, piece: Sequence[_Item], outcomes: list[Outcome], deadline: Deadline) -> None:
        def work(lane: Lane) -> list[int]:
            shares = _shares(piece, lane)
            for item, share in zip(piece, shares, strict=True):
                _copy(lane.part(share), item.memory)
            codes = lane.ask(m.Put([item.key for item in piece], shares), deadline)
            for item, code in zip(piece, codes, strict=True):
                outcomes[item.number] = _STORED.get(code, Outcome.GONE)
                self._count(1, len(item.memory) * (code == 0))
            return codes

        self._finish(self._call(work, deadline), piece, outcomes)

    def _read(self, piece: Sequence[_Item], outcomes: list[Outcome], deadline: Deadline) -> None:
        def work(lane: Lane) -> list[int]:
            shares = _shares(piece, lane)
            codes = lane.ask(m.Get([item.key for item in piece], shares), deadline)
            for item, share, code in zip(piece, shares, codes, strict=True):
                if code == share.nbytes:
                    _copy(item.memory, lane.part(share))
                    self._count(0, share.nbytes)
                    outcomes[item.number] = Outcome.OK
                elif code >= 0 or code in EXPECTED:
                    outcomes[item.number] = Outcome.MISS
            return codes

        self._finish(self._call(work, deadline), piece, outcomes)

    def _call(self, work: Callable[[Lane], list[int]], deadline: Deadline) -> Outcome:
        """Let `work` use a lane; OK when it has, whatever the codes, LATE past the deadline."""
        if deadline.over:
            return Outcome.LATE
        ticket = self._patience.begin()
        if ticket is None:
            return Outcome.GONE
        try:
            codes = self._work(work, deadline)
        except NotYetError:  # our own queue: it says nothing about the store
            self._patience.end(ticket, Ending.GIVEN_UP)
            return Outcome.LATE
        except TimeoutError as error:
            self._patience.end(ticket, Ending.BADLY, f"late: {error}")
            return Outcome.LATE
        except (OSError, EOFError, HoldfastError, msgspec.MsgspecError) as error:
            self._patience.end(ticket, Ending.BADLY, str(error) or type(error).__name__)
            return Outcome.GONE
        except BaseException:
            self._patience.end(ticket, Ending.GIVEN_UP)
            raise
        bad = next((code for code in codes if code < 0 and code not in EXPECTED), 0)
        ending = Ending.BADLY if bad else Ending.WELL
        self._patience.end(ticket, ending, f"its client says {bad}" if bad else "")
        self._count(2, bool(bad))
        return Outcome.OK

    def _work(self, work: Callable[[Lane], list[int]], deadline: Deadline) -> list[int]:
        process = self._running(deadline)
        lane = process.take(deadline)
        try:
            codes = work(lane)
        except NotYetError:
            process.give(lane)
            raise
        except TimeoutError as error:
            if not process.owe(lane):
                process.kill()  # it hangs, and the lane's memory is its own
            elif lane.waited_s < FAIR_S:
                raise NotYetError(str(error)) from error
            raise
        except BaseException:
            process.kill()  # it may still be at work on the lane's memory
            raise
        process.give(lane)
        return codes

    def _running(self, deadline: Deadline) -> ClientProcess:
        """Return the process; start it if there is none, or none that is of any use."""
        if not self._starting.acquire(timeout=max(0.0, deadline.at - time.monotonic())):
            raise NotYetError("Mooncake's client is being started")
        try:
            process = self._process
            if process is not None and not process.hopeless:
                return process
            if process is not None:
                process.kill()
                self._process = None
            endpoint = tcp_endpoint(self.options.master)
            with dial(endpoint, deadline) as reached:
                host = self.options.host or reached.getsockname()[0]
            settings = m.Settings(
                "{}:{}".format(*endpoint), host, self.options.protocol, self.options.devices
            )
            self._process = ClientProcess(settings, LANES, self.options.lane_bytes)
            return self._process
        finally:
            self._starting.release()

    def _finish(self, ended: Outcome, piece: Sequence[_Item], outcomes: list[Outcome]) -> None:
        if ended is not Outcome.OK:
            self._count(2, 1)
            for item in piece:
                outcomes[item.number] = ended

    def _count(self, which: int, number: int) -> None:
        with self._lock:
            self._usage[which] += number


def _shares(piece: Sequence[_Item], lane: Lane) -> list[m.Share]:
    """Lay the records of a piece side by side in a lane's memory."""
    shares, offset = [], lane.offset
    for item in piece:
        shares.append(m.Share(offset, len(item.memory)))
        offset += len(item.memory)
    return shares


def _copy(into: memoryview, source: memoryview) -> None:
    """Copy bytes, without the interpreter."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
