"""A shared folder as the medium of a segment tier: objects as files, all calls in a child process.

Bytes cross in memory that is shared with the child, and are copied between it and the caller's
buffers. The child cannot get the caller's buffers themselves: a read that the server answers after
the deadline ends in the memory that it was begun with, and nothing can take that back.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, Outcome, printable
from holdfast.finding import Finding
from holdfast.limits import MIB
from holdfast.tiers.child_process import (
    ChildLane,
    ChildLimits,
    ChildProgram,
    LaneProcess,
    SupervisedChild,
)
from holdfast.tiers.files.findings import probe_findings, refusal
from holdfast.tiers.files.requests import (
    ANSWERS,
    DeleteNames,
    ExamineFolder,
    FolderAnswer,
    FolderRequest,
    FolderSettings,
    ListNames,
    MoreNames,
    ProbeFolder,
    Publish,
    ReadPiece,
    WritePiece,
)
from holdfast.tiers.segments.medium import MediumAnswer, MediumProbe, MediumRequests
from holdfast.wire.remote.buffer_pool import copy_parts
from holdfast.wire.remote.stream import Deadline

LANES = 8
"""Concurrent calls on one shared folder."""

PUT_LANES = 4
"""Lanes that writes may use at a time; the others are left to reads and listings."""

PIECE_BYTES = 2 * MIB
"""Bytes of one request: the child reads or writes one piece while another one is copied."""

PIECES = 4
"""Pieces of a lane's memory."""

LIMITS = ChildLimits(setup_s=15.0, starting_s=5.0, hung_s=10.0)
"""Time limits of the child."""

DELETED_AT_ONCE = 256
"""Names in one request to delete."""

_NO_MORE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM}
)
"""Errors of a write that say nothing about reads: no room, or no permission to write."""

_NO_ROOM = ("ENOSPC", "EDQUOT")


class FilesMedium:
    """See `holdfast.tiers.segments.medium.SegmentMedium`. Opens even if the folder is away.

    `filesystem`: type that the file system of the folder must have; empty if any will do.
    """

    def __init__(self, path: str, filesystem: str = "") -> None:
        self.path = path
        self._filesystem = filesystem
        self._child = SupervisedChild(f"the process for {path}", self._start)
        self._put_lanes = threading.BoundedSemaphore(PUT_LANES)
        self._closed = False

    def put(self, name: str, parts: Sequence[memoryview], deadline: Deadline) -> MediumAnswer:
        """Write a temporary file, flush it, give it its name, and flush its folder."""
        source = _ConsecutiveBuffers(parts)

        def work(lane: ChildLane) -> FolderAnswer:
            def prepare(start: int, nbytes: int, at: int) -> FolderRequest:
                slices = source.slices(start, nbytes)
                copy_parts(slices, _beside(slices, lane.view(at, nbytes)))
                return WritePiece(name, start, nbytes, at)

            answer = _transfer(lane, source.nbytes, prepare, deadline)
            return answer if answer.code < 0 else _ask(lane, Publish(name), deadline)

        if not self._put_lanes.acquire(timeout=max(0.0, deadline.at - time.monotonic())):
            return MediumAnswer(Outcome.LATE, why="other writes were in progress")
        try:
            return self._call(work, deadline, _NO_MORE)
        finally:
            self._put_lanes.release()

    def read(
        self, name: str, start: int, into: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        """Read pieces into the shared memory, and copy each while the next one is read."""
        target = _ConsecutiveBuffers(into)

        def work(lane: ChildLane) -> FolderAnswer:
            def prepare(offset: int, nbytes: int, at: int) -> FolderRequest:
                ahead = target.nbytes - offset - nbytes
                return ReadPiece(name, start + offset, nbytes, at, ahead)

            def take(offset: int, nbytes: int, at: int) -> None:
                slices = target.slices(offset, nbytes)
                copy_parts(_beside(slices, lane.view(at, nbytes)), slices)

            return _transfer(lane, target.nbytes, prepare, deadline, take)

        return self._call(work, deadline)

    def list(self, prefix: str, deadline: Deadline) -> MediumAnswer:
        """List the files below a folder; the names come through the shared memory."""
        text = bytearray()

        def work(lane: ChildLane) -> FolderAnswer:
            at, size = lane.offset, PIECES * PIECE_BYTES
            answer = _ask(lane, ListNames(prefix, at, size), deadline)
            while answer.code > len(text):
                text.extend(lane.view(at, min(size, answer.code - len(text))))
                if answer.code > len(text):
                    answer = _ask(lane, MoreNames(len(text), at, size), deadline)
            return answer

        answer = self._call(work, deadline)
        if answer.outcome is not Outcome.OK:
            return answer
        return MediumAnswer(Outcome.OK, names=text.decode().splitlines())

    def delete(self, names: Sequence[str], deadline: Deadline) -> MediumAnswer:
        """Delete files, `DELETED_AT_ONCE` in one request."""
        answer = MediumAnswer(Outcome.LATE if deadline.over else Outcome.OK)
        if self._closed:
            return MediumAnswer(Outcome.GONE, why="the tier is closed")
        for at in range(0, len(names), DELETED_AT_ONCE):
            request = DeleteNames(list(names[at : at + DELETED_AT_ONCE]))
            answer = self._call(partial(_ask, request=request, deadline=deadline), deadline)
            if answer.outcome is not Outcome.OK:
                break
        return answer

    def probe(self, deadline: Deadline) -> MediumProbe:
        """Try what the rules of a shared folder need, and what they do without."""
        return self._probe(ProbeFolder(), deadline)

    def examine(self, deadline: Deadline) -> MediumProbe:
        """Try the same, and leave the folder as it was, or absent."""
        return self._probe(ExamineFolder(), deadline)

    def _probe(self, request: ProbeFolder | ExamineFolder, deadline: Deadline) -> MediumProbe:
        reports = []

        def work(lane: ChildLane) -> FolderAnswer:
            answer = _ask(lane, request, deadline)
            reports.append(answer.report)
            return answer

        answer = self._call(work, deadline, _NO_MORE)
        report = next(filter(None, reports), None)
        if report is not None:
            findings = probe_findings(report)
            return MediumProbe(Outcome.OK, refusal(self.path, report), findings=findings)
        if answer.outcome is not Outcome.FULL:
            return MediumProbe(answer.outcome, why=answer.why)
        if answer.why.startswith(_NO_ROOM):  # deletions end this
            return MediumProbe(Outcome.OK, findings=[Finding("space", "there is none", answer.why)])
        return MediumProbe(Outcome.OK, read_only=f"it cannot be written: {answer.why}")

    def requests(self) -> MediumRequests:
        """Return none: calls of a file system are not paid."""
        return MediumRequests()

    def describe(self) -> dict[str, Any]:
        """Return the folder and the number of the process that makes the calls."""
        return {"address": self.path, "process": self._child.pid}

    def close(self) -> None:
        """Kill the child; calls in progress end within about a second, even if it does not."""
        self._closed = True
        self._child.close()

    def _start(self, deadline: Deadline) -> LaneProcess:
        """Start a child; it has a name of its own, so that its temporary files have, too."""
        del deadline
        settings = FolderSettings(self.path, self._filesystem, secrets.token_hex(8))
        program = ChildProgram(
            module="holdfast.tiers.files.child",
            label=f"the process for {self.path}",
            memory_name="holdfast-files",
            lanes=LANES,
            lane_bytes=PIECES * PIECE_BYTES,
            limits=LIMITS,
        )
        return LaneProcess(program, msgspec.json.encode(settings).decode())

    def _call(
        self,
        work: Callable[[ChildLane], FolderAnswer],
        deadline: Deadline,
        full: frozenset[int] = frozenset(),
    ) -> MediumAnswer:
        """Call `work` with a lane; `full` are the errors that mean FULL."""
        if self._closed:
            return MediumAnswer(Outcome.GONE, why="the tier is closed")
        if deadline.over:
            return MediumAnswer(Outcome.LATE, why="no time was left")
        try:
            answer = self._child.call(work, deadline)
        except TimeoutError as error:
            return MediumAnswer(Outcome.LATE, why=printable(error))
        except (OSError, EOFError, HoldfastError) as error:
            return MediumAnswer(Outcome.GONE, why=printable(error) or type(error).__name__)
        if answer.code >= 0:
            return MediumAnswer(Outcome.OK, answer.code)
        if answer.code == -errno.ENOENT and not full:
            return MediumAnswer(Outcome.MISS, why=printable(answer.why))
        outcome = Outcome.FULL if -answer.code in full else Outcome.GONE
        return MediumAnswer(outcome, why=printable(answer.why))


class _ConsecutiveBuffers:
    """Buffers that are one range of bytes together."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [memoryview(buffer).cast("B") for buffer in buffers]
        self._ends = list(accumulate(len(buffer) for buffer in self._buffers))
        self.nbytes = self._ends[-1] if self._ends else 0

    def slices(self, start: int, nbytes: int) -> list[memoryview]:
        """Return the parts of the buffers that are `nbytes` of the range from byte `start`."""
        end = start + nbytes
        parts = []
        for buffer, buffer_end in zip(self._buffers, self._ends, strict=True):
            begin = buffer_end - len(buffer)
            if begin < end and start < buffer_end:
                parts.append(buffer[max(0, start - begin) : end - begin])
        return parts


def _beside(slices: Sequence[memoryview], memory: memoryview) -> list[memoryview]:
    """Return consecutive parts of `memory`, as long as the slices."""
    ends = list(accumulate(len(part) for part in slices))
    return [memory[end - len(part) : end] for part, end in zip(slices, ends, strict=True)]


def _transfer(
    lane: ChildLane,
    nbytes: int,
    prepare: Callable[[int, int, int], FolderRequest],
    deadline: Deadline,
    take: Callable[[int, int, int], None] = lambda _start, _nbytes, _at: None,
) -> FolderAnswer:
    """Move a range in pieces, several under way at a time; return the bytes moved, or an error.

    `prepare` returns the request for a piece, and `take` gets what was moved of one: its start in
    the range, its bytes, and its offset in the shared memory. The first short piece is the last.
    """
    starts = list(range(0, nbytes, PIECE_BYTES)) or [0]
    sent = moved = 0
    failed: FolderAnswer | None = None
    ended = False
    for taken, start in enumerate(starts):
        while not ended and sent < min(taken + PIECES, len(starts)):
            at = lane.offset + sent % PIECES * PIECE_BYTES
            size = min(PIECE_BYTES, nbytes - starts[sent])
            request = prepare(starts[sent], size, at)
            lane.send(msgspec.msgpack.encode(request), deadline)
            sent += 1
        if taken == sent:
            break
        answer = ANSWERS.decode(lane.receive(deadline))
        if answer.code < 0 or failed:
            failed, ended = failed or answer, True
        elif moved == start:  # nothing was short so far
            take(start, answer.code, lane.offset + taken % PIECES * PIECE_BYTES)
            moved += answer.code
            ended = ended or answer.code < min(PIECE_BYTES, nbytes - start)
    return failed or FolderAnswer(moved)


def _ask(lane: ChildLane, request: FolderRequest, deadline: Deadline) -> FolderAnswer:
    return ANSWERS.decode(lane.ask(msgspec.msgpack.encode(request), deadline))
