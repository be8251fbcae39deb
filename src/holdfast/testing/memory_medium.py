"""A medium of segment tiers in memory, for tests, with faults that a test switches on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import Outcome
from holdfast.tiers.segments.medium import MediumAnswer, MediumProbe, MediumRequests
from holdfast.wire.remote.stream import Deadline


class MemoryObjects:
    """The objects that several media of one test share, by name; `calls` counts requests by verb.

    A test may change `objects` at any time. `fault`, if set, is called with verb and name before
    each request, and the outcome that it returns is the answer, unless it is OK.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Outcome] | None = None
        self.lock = threading.Lock()

    def count(self, verb: str) -> int:
        """Return the number of requests with this verb so far."""
        return sum(verb == called for called, _ in self.calls)


class MemoryMedium:
    """See `holdfast.tiers.segments.medium.SegmentMedium`."""

    def __init__(self, shared: MemoryObjects) -> None:
        self._shared = shared
        self._closed = False

    def put(self, name: str, parts: Sequence[memoryview], deadline: Deadline) -> MediumAnswer:
        if failed := self._begin("put", name, deadline):
            return failed
        whole = b"".join(parts)
        with self._shared.lock:
            self._shared.objects[name] = whole
        return MediumAnswer(Outcome.OK)

    def read(
        self, name: str, start: int, into: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        if failed := self._begin("read", name, deadline):
            return failed
        found = self._shared.objects.get(name)
        if found is None:
            return MediumAnswer(Outcome.MISS)
        at = start
        for part in into:
            piece = found[at : at + len(part)]
            part[: len(piece)] = piece
            at += len(piece)
        return MediumAnswer(Outcome.OK, max(0, at - start))

    def list(self, prefix: str, deadline: Deadline) -> MediumAnswer:
        if failed := self._begin("list", prefix, deadline):
            return failed
        start = f"{prefix}/" if prefix else ""
        with self._shared.lock:
            names = sorted(name for name in self._shared.objects if name.startswith(start))
        return MediumAnswer(Outcome.OK, names=names)

    def delete(self, names: Sequence[str], deadline: Deadline) -> MediumAnswer:
        if failed := self._begin("delete", ",".join(names), deadline):
            return failed
        with self._shared.lock:
            for name in names:
                self._shared.objects.pop(name, None)
        return MediumAnswer(Outcome.OK)

    def probe(self, deadline: Deadline) -> MediumProbe:
        failed = self._begin("probe", "", deadline)
        return MediumProbe(failed.outcome, why=failed.why) if failed else MediumProbe(Outcome.OK)

    def requests(self) -> MediumRequests:
        return MediumRequests()

    def describe(self) -> dict[str, Any]:
        return {"medium": "memory"}

    def close(self) -> None:
        self._closed = True

    def _begin(self, verb: str, name: str, deadline: Deadline) -> MediumAnswer | None:
        """Count a request; return the answer if it fails."""
        if self._closed:
            return MediumAnswer(Outcome.GONE, why="closed")
        if deadline.over:
            return MediumAnswer(Outcome.LATE, why="the deadline has passed")
        with self._shared.lock:
            self._shared.calls.append((verb, name))
            fault = self._shared.fault
        outcome = fault(verb, name) if fault is not None else Outcome.OK
        return None if outcome is Outcome.OK else MediumAnswer(outcome, why=f"{verb} failed")
