"""Loads and saves that an engine's scheduler hands to its workers: plain data, fit for a pickle.

Tuples named `keys`, `parents` and `segments` have an entry for each rank.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.devices.base import NO_PAGE


class GroupTask(NamedTuple):
    """Blocks of one KV group to load into pages.

    `keys`: 16 bytes a block. `pages`: in the order of tokens; the first one is page `first` of the
    first block, and the last block may be partial. Pages that are `NO_PAGE` are left out.
    """

    keys: tuple[bytes, ...]
    pages: list[int]
    first: int = 0
    group: int = 0


class LoadTask(NamedTuple):
    """Blocks to load for a waiting request: of each KV group those that it needs.

    `tokens`: how many they save from computing. `plan`: number of the store's plan; a load that
    exceeds its `deadline_s` is computed instead.
    """

    request: str
    groups: tuple[GroupTask, ...]
    tokens: int
    plan: int = 0
    deadline_s: float = 0.0

    @property
    def pages(self) -> int:
        """The number of pages, of all groups."""
        return sum(len(group.pages) - group.pages.count(NO_PAGE) for group in self.groups)


class SaveTask(NamedTuple):
    """Consecutive blocks of one KV group that are full at the end of this step.

    `depth`: index of the first block in its chain, whose parent is in `parents` and whose segment
    is in `segments`. `retention`: name of a retention class.
    """

    request: str
    keys: tuple[bytes, ...]
    parents: tuple[bytes, ...]
    segments: tuple[bytes, ...]
    depth: int
    pages: list[int]
    retention: str = "session"
    group: int = 0
