"""The memory of an arena that a batch copies: which of it is locked, and the use of what is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from holdfast.buffers import SharedMapping
from holdfast.devices.base import LockedRanges
from holdfast.devices.driver import Copies


class ArenaCopy(NamedTuple):
    """One copy between the GPU and an arena: an address on the GPU, and an offset in the arena."""

    gpu: int
    offset: int
    nbytes: int


class ArenaUse:
    """Payloads of an arena that a batch copies; those that are locked stay so until `end`.

    `locked` says which payloads are.
    """

    def __init__(
        self,
        arena: SharedMapping,
        locks: LockedRanges | None,
        payloads: Sequence[int],
        raw_bytes: int,
    ) -> None:
        self._start = arena.address
        self._locks = locks
        ranges = [(payload, raw_bytes) for payload in payloads]
        self.locked = [False] * len(ranges)
        self._uses: list[Sequence[tuple[int, int]]] = []
        """The ranges of each call of `use` that was True."""
        if locks is not None and ranges:
            if locks.use(ranges):
                self.locked = [True] * len(ranges)
                self._uses = [ranges]
            else:
                self.locked = [locks.use([each]) for each in ranges]
                self._uses = [[each] for each in compress(ranges, self.locked)]
        marked = zip(ranges, self.locked, strict=True)
        self._bounced = [each for each, is_locked in marked if not is_locked]

    def to_gpu(self, copies: Sequence[ArenaCopy]) -> Copies:
        """Return copies to the GPU; none crosses a border of two locks.

        Also where memory is not locked: a driver refuses a copy of which a part only is locked.
        """
        cut = [part for copy in copies for part in self.cut(copy)]
        return _copies([each.gpu for each in cut], [self._start + each.offset for each in cut], cut)

    def from_gpu(self, copies: Sequence[ArenaCopy]) -> Copies:
        """Return copies from the GPU; none crosses a border of two locks."""
        cut = [part for copy in copies for part in self.cut(copy)]
        return _copies([self._start + each.offset for each in cut], [each.gpu for each in cut], cut)

    def want(self) -> None:
        """Ask for the memory that was not locked."""
        if self._locks is not None and self._bounced:
            self._locks.want(self._bounced)

    def end(self) -> None:
        """End the use of locked memory: its copies have ended. A second call does nothing."""
        uses, self._uses = self._uses, []
        if self._locks is not None:
            for ranges in uses:
                self._locks.done(ranges)

    @property
    def has_locks(self) -> bool:
        """Whether any memory of the arena may be locked, whether or not the payloads are."""
        return self._locks is not None

    def cut(self, copy: ArenaCopy) -> Iterator[ArenaCopy]:
        """Yield the parts of a copy; none crosses a border of two locks."""
        gpu, offset, nbytes = copy
        border = self._locks.chunk_bytes if self._locks is not None else 0
        while border and nbytes > (part := border - offset % border):
            yield ArenaCopy(gpu, offset, part)
            gpu, offset, nbytes = gpu + part, offset + part, nbytes - part
        yield ArenaCopy(gpu, offset, nbytes)


def _copies(to: list[int], source: list[int], cut: Sequence[ArenaCopy]) -> Copies:
    return Copies(to, source, [each.nbytes for each in cut])
