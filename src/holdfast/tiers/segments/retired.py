"""The segments that writers have retired, remembered until their age class ends; pure.

Index objects are found in any order, so one that lists a segment may be found after the one that
retires it. A segment whose age class is over is not added in any case, so its path is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.tiers.segments.format import parse_segment_name

_ADDED_MIN = 1_024
"""Paths that are added at least before those of ended age classes are looked for."""


class RetiredSegments:
    """Paths of segments. One thread at a time calls it."""

    def __init__(self) -> None:
        self._expires_s: dict[str, float] = {}
        """By path: when its age class ends, in seconds since 1970."""
        self._prune_at = _ADDED_MIN

    def __contains__(self, path: str) -> bool:
        return path in self._expires_s

    def __len__(self) -> int:
        return len(self._expires_s)

    def add(self, paths: Iterable[str], wall_s: float) -> None:
        """Add segments; `wall_s` is the time now. Other paths are ignored."""
        for path in paths:
            if (name := parse_segment_name(path)) is not None:
                self._expires_s[path] = name.expires_s()
        if len(self._expires_s) < self._prune_at:
            return
        self._expires_s = {path: at_s for path, at_s in self._expires_s.items() if at_s > wall_s}
        self._prune_at = 2 * len(self._expires_s) + _ADDED_MIN
