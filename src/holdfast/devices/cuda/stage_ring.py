"""The slots of a ring of stages: each save takes some that are neighbours (state only)."""

from __future__ import annotations

from collections import deque


class StageRing:
    """Slots 0 to `slots` - 1, taken in turn; those of a save can be taken again in order of age."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._taken: deque[list[int]] = deque()
        """First slot of each save, the one after its last, and whether it was released."""

    def take(self, count: int) -> int | None:
        """Return the first of `count` neighbouring slots; None if they are in use."""
        start = self._start_for(count)
        if start is not None:
            self._taken.append([start, start + count, False])
        return start

    def release(self, start: int) -> None:
        """Give back the slots that were taken from `start` on."""
        for each in self._taken:
            if each[0] == start:
                each[2] = True
        while self._taken and self._taken[0][2]:
            self._taken.popleft()

    @property
    def used(self) -> int:
        """Slots that were taken and not released."""
        return sum(end - start for start, end, released in self._taken if not released)

    def _start_for(self, count: int) -> int | None:
        if not self._taken:
            return 0 if count <= self.slots else None
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest <= oldest:  # the newest slots are before the oldest
            return newest if newest + count <= oldest else None
        if newest + count <= self.slots:
            return newest
        return 0 if count <= oldest else None
