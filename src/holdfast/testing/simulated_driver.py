"""A GPU's driver without a GPU: work runs in an order that a seed chooses, of those that are right.

An operation can run when it is the first of its stream and the events that the stream waits for
have ended. One copy runs at a time for each direction, first come, first served. Work runs only
while the program asks for it: in `query` and `synchronise`, and by `run`. Addresses are those of
this process, so "GPU memory" is memory of the host that only this driver should touch.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.devices.driver import Copies, DriverError, PageConversion, PageCopy

ENGINE = 0
"""The stream on which the engine queues its work."""

POISON = 0xA5
"""The content of new GPU memory."""


class _Event:
    """How often an event was recorded, and its last record whose work has ended."""

    def __init__(self) -> None:
        self.recorded = 0
        self.ended = 0


class _Operation(NamedTuple):
    """One piece of work: `parts` does a part at each step. `engine`: the copy engine it needs."""

    parts: Iterator[None]
    engine: str = ""
    event: _Event | None = None
    record: int = 0
    waits: bool = False


class SimulatedDriver:
    """A driver whose streams run in an order that `seed` chooses.

    `calls` counts the calls by name. `fail` makes a later call raise. `faults` has what no program
    may do: a copy of memory of the host that was not locked when the copy ran. A test must find
    it empty.
    """

    def __init__(self, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []
        self.locked: dict[int, int] = {}
        """Bytes of locked memory by its address."""
        self._random = random.Random(seed)  # noqa: S311  # a test repeats it
        self._streams: list[deque[_Operation]] = []
        self._speeds: list[float] = []
        """How often the work of each stream is chosen; some streams are far behind others."""
        self._add_stream()
        self._engines: dict[str, deque[int]] = {"to GPU": deque(), "from GPU": deque()}
        self._memory: list[np.ndarray] = []
        self._gpu: list[tuple[int, int]] = []
        self._failing: tuple[str, int, bool] | None = None
        self._failed = ""
        self._mutex = threading.RLock()

    # What a test does

    def fail(self, call: str, after: int = 0, *, lasting: bool = False) -> None:
        """Let a call raise DriverError, after some that succeed; `lasting`: and all later calls.

        After a lasting error nothing that is queued runs any more, as after an error of a GPU.
        """
        self._failing, self._failed = (call, after, lasting), ""

    def mend(self) -> None:
        """Let calls succeed again."""
        self._failing, self._failed = None, ""

    def compute(self, work: Callable[[], None]) -> None:
        """Queue work of the engine on its stream."""
        with self._mutex:
            self._queue(ENGINE, _Operation(_once(work)))

    def run(self, steps: int | None = None) -> bool:
        """Run some parts of what is queued, or all; return whether anything is left."""
        with self._mutex:
            while (steps is None or steps > 0) and self._step():
                steps = None if steps is None else steps - 1
            return any(self._streams)

    # Driver

    def create_stream(self, *, urgent: bool) -> int:
        del urgent  # an order is as right as another
        with self._call("create_stream"):
            return self._add_stream()

    def engine_stream(self) -> int:
        with self._call("engine_stream"):
            return ENGINE

    def create_event(self) -> _Event:
        with self._call("create_event"):
            return _Event()

    def allocate(self, nbytes: int) -> int:
        with self._call("allocate"):
            address = self._new(nbytes)
            self._gpu.append((address, nbytes))
            return address

    def allocate_locked(self, nbytes: int) -> memoryview:
        with self._call("allocate_locked"):
            self.locked[self._new(nbytes)] = nbytes
            return memoryview(self._memory[-1].data)[:nbytes]

    def write(self, address: int, content: bytes) -> None:
        with self._call("write"):
            self._bytes(address, len(content))[:] = np.frombuffer(content, np.uint8)

    def copy(self, copies: Copies, stream: int, *, source_complete: bool) -> None:
        del source_complete  # the memory is read in the stream's order, which is right for both
        with self._call("copy"):
            self._queue_copies(copies, stream, locked=True)

    def bounce(self, copies: Copies, stream: int) -> None:
        with self._call("bounce"):
            self._check_whole(copies)
            ended = _Event()
            self._queue_copies(copies, stream, locked=False)
            self._record(ended, stream)
            self._run_until(ended)

    def launch(self, work: PageCopy | PageConversion, stream: int) -> None:
        with self._call("launch"):
            if isinstance(work, PageCopy):
                self._queue(stream, _Operation(self._copied(work)))
            else:
                self._queue(stream, _Operation(self._converted(work)))

    def pause(self, stream: int) -> None:
        with self._call("pause"):
            self._queue(stream, _Operation(_once(lambda: None)))

    def record(self, event: _Event, stream: int) -> None:
        with self._call("record"):
            self._record(event, stream)

    def wait(self, stream: int, event: _Event) -> None:
        with self._call("wait"):
            waiting = _Operation(_once(lambda: None), "", event, event.recorded, waits=True)
            self._queue(stream, waiting)

    def query(self, event: _Event) -> bool:
        with self._call("query"):
            self.run(self._random.randrange(4))
            return event.ended == event.recorded

    def synchronise(self, event: _Event) -> None:
        with self._call("synchronise"):
            self._run_until(event)

    def register(self, address: int, nbytes: int) -> None:
        with self._call("register"):
            for start, length in self.locked.items():
                if address < start + length and start < address + nbytes:
                    raise DriverError("register: a part of the memory is already locked")
            self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._call("unregister"):
            self.run(self._random.randrange(50))
            if self.locked.pop(address, None) is None:
                raise DriverError("unregister: no locked memory begins at this address")

    def close(self) -> None:
        with self._mutex:
            if not self._failed:
                self.run()
            for stream in self._streams:
                stream.clear()
            self._memory.clear()

    # How

    def _call(self, name: str) -> threading.RLock:
        """Count a call, or raise if it is to fail; return the mutex to hold during it."""
        self.calls[name] += 1
        if self._failed:
            raise DriverError(f"{name}: {self._failed}")
        if self._failing is not None and self._failing[0] == name:
            _, after, lasting = self._failing
            self._failing = (name, after - 1, lasting) if after else None
            if not after:
                self._failed = "an earlier error of the GPU" if lasting else ""
                raise DriverError(f"{name}: the test lets this call fail")
        return self._mutex

    def _add_stream(self) -> int:
        self._streams.append(deque())
        self._speeds.append(0.25 ** self._random.randrange(5))
        return len(self._streams) - 1

    def _new(self, nbytes: int) -> int:
        raw = np.full(nbytes + 256, POISON, np.uint8)
        self._memory.append(raw[-raw.ctypes.data % 256 :])
        return int(self._memory[-1].ctypes.data)

    def _bytes(self, address: int, nbytes: int) -> np.ndarray:
        found: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        memory: np.ndarray = np.frombuffer(found, np.uint8)
        return memory

    def _queue(self, stream: int, operation: _Operation) -> None:
        self._streams[stream].append(operation)

    def _record(self, event: _Event, stream: int) -> None:
        event.recorded += 1
        self._queue(stream, _Operation(_once(lambda: None), "", event, event.recorded))

    def _queue_copies(self, copies: Copies, stream: int, *, locked: bool) -> None:
        engine = "from GPU" if self._is_gpu(copies.source[0]) else "to GPU"
        host = copies.to if engine == "from GPU" else copies.source
        if locked:
            self._check_locked(host, copies.nbytes, "is queued")
        order = list(zip(copies.to, copies.source, copies.nbytes, strict=True))
        self._random.shuffle(order)

        def parts() -> Iterator[None]:
            for to, source, nbytes in order:
                if locked:
                    self._check_locked(host, copies.nbytes, "runs")
                half = nbytes // 2
                ctypes.memmove(to, source, half)
                yield
                ctypes.memmove(to + half, source + half, nbytes - half)
                yield

        self._queue(stream, _Operation(parts(), engine))

    def _is_gpu(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self._gpu)

    def _check_locked(self, host: Sequence[int], nbytes: Sequence[int], when: str) -> None:
        """Note memory that is not locked from its first byte to its last."""
        for address, length in zip(host, nbytes, strict=True):
            at = address
            while at < address + length:
                ends = [a + n for a, n in self.locked.items() if a <= at < a + n]
                if not ends:
                    self.faults.append(f"a copy {when} whose memory is not locked")
                    return
                at = ends[0]

    def _check_whole(self, copies: Copies) -> None:
        """Raise DriverError for memory that is partly locked, as the calls of CUDA do."""
        host = copies.source if self._is_gpu(copies.to[0]) else copies.to
        for address, nbytes in zip(host, copies.nbytes, strict=True):
            for start, length in self.locked.items():
                inside = min(address + nbytes, start + length) - max(address, start)
                if 0 < inside < nbytes:
                    raise DriverError("bounce: a part of the memory is locked, another is not")

    def _copied(self, work: PageCopy) -> Iterator[None]:
        """Copy one page of one layer at each step, in any order."""
        table = work.table
        layers = work.layers or table.layers
        bases = self._bytes(table.bases, 8 * table.layers).view(np.int64)
        rows = self._bytes(work.rows, 8 * work.entries).view(np.int32).reshape(-1, 2)
        jobs = [(item, layer) for item in range(work.entries) for layer in range(layers)]
        self._random.shuffle(jobs)
        for item, layer in jobs:
            page, slot = (int(number) for number in rows[item])
            block, in_block = divmod(slot, work.pages_per_block)
            paged = int(bases[work.first_layer + layer]) + page * table.stride_bytes
            in_stage = (layer * work.pages_per_block + in_block) * table.page_bytes
            staged = work.stage + block * work.block_bytes + in_stage
            to, source = (paged, staged) if work.to_pages else (staged, paged)
            ctypes.memmove(to, source, table.page_bytes)
            yield

    def _converted(self, work: PageConversion) -> Iterator[None]:
        """Copy one head of one page of one layer at each step, in any order."""
        table = work.table
        layers = work.layers or table.layers
        bases = self._bytes(table.bases, 8 * table.layers).view(np.int64)
        rows = self._bytes(work.rows, 8 * work.entries).view(np.int32).reshape(-1, 2)
        jobs = list(itertools.product(range(work.entries), range(layers), range(work.heads)))
        self._random.shuffle(jobs)
        for item, layer, head in jobs:
            page, slot = (int(number) for number in rows[item])
            block, in_block = divmod(slot, work.pages_per_block)
            paged = int(bases[work.first_layer + layer]) + page * table.stride_bytes
            paged += head * work.head_stride_bytes
            row = (head * work.pages_per_block + in_block) * work.tokens
            staged = work.stage + block * work.block_bytes + layer * work.matrix_bytes
            staged += row * work.head_bytes
            for token in range(work.tokens):
                one = paged + token * work.token_stride_bytes
                other = staged + token * work.head_bytes
                to, source = (one, other) if work.to_pages else (other, one)
                ctypes.memmove(to, source, work.head_bytes)
            yield

    def _run_until(self, event: _Event) -> None:
        last = event.recorded
        while event.ended < last:
            if not self._step():
                raise AssertionError("nothing that is queued can run: the program waits for ever")

    def _step(self) -> bool:
        """Run one part of one operation that can run; return False if there is none."""
        ready: list[int] = []
        for number, stream in enumerate(self._streams):
            while stream and stream[0].waits and _has_ended(stream[0]):
                stream.popleft()
            if not stream or stream[0].waits:
                continue
            if (engine := stream[0].engine) and number not in self._engines[engine]:
                self._engines[engine].append(number)
            elif not engine:
                ready.append(number)
        ready += [waiting[0] for waiting in self._engines.values() if waiting]
        if not ready:
            return False
        (number,) = self._random.choices(ready, [self._speeds[each] for each in ready])
        operation = self._streams[number][0]
        if next(operation.parts, operation) is operation:  # it has no more parts
            self._streams[number].popleft()
            if operation.engine:
                self._engines[operation.engine].popleft()
            if operation.event is not None:
                operation.event.ended = max(operation.event.ended, operation.record)
        return True


def _has_ended(wait: _Operation) -> bool:
    return wait.event is None or wait.event.ended >= wait.record


def _once(work: Callable[[], None]) -> Iterator[None]:
    work()
    yield
