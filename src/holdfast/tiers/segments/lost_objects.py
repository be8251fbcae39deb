"""Notice that objects have left a medium, although no node deleted them; pure.

A bucket that is emptied, or deleted and made anew, loses its index objects too. A listing without
them shows it; without a listing of the segments, lookups go on promising what only the memory of
this process still names.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from holdfast.tiers.segments.format import IndexName, SegmentName


class LostObjects:
    """Compares what a medium lists with what it must have. One thread at a time calls it.

    Two listings in a row must lack an object, because some file systems show a new name late.
    """

    def __init__(self) -> None:
        self._missing_before: set[str] = set()
        self._known_before: set[SegmentName] = set()
        self._searched: set[str] = set()
        """What is missing, and whose segments were looked for since."""

    def suspects(
        self,
        own: AbstractSet[IndexName],
        listed: AbstractSet[IndexName],
        segments: Sequence[SegmentName],
    ) -> list[SegmentName]:
        """Return the segments to look for, because index objects are missing; usually none.

        `own`: index objects that this writer published before the listing and has not replaced.
        `listed`: all that the medium lists. `segments`: those that this process knows.
        """
        writers = {name.writer for name in listed}
        missing = {name.path for name in own - listed}
        missing |= {name.writer for name in segments} - writers
        self._searched &= missing
        is_certain = bool((missing & self._missing_before) - self._searched)
        found = [name for name in segments if name in self._known_before] if is_certain else []
        self._missing_before = missing
        self._known_before = set(segments) if missing else set()
        return found

    def note_search(self) -> None:
        """Note that the segments were looked for: those that are left are on the medium."""
        self._searched |= self._missing_before
