"""Where blocks are in their chains: the number in the segment, and the parent, by key.

A read names blocks by key alone. Their lanes, and the names of the parity records that may protect
them, follow from the chains that were looked up or written in this process before. A block that is
not known here is found all the same, by asking all members that may hold it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

KNOWN_MAX = 1 << 18
"""Most blocks known; the oldest quarter is forgotten when there are more."""


class ChainLinks:
    """Positions and parents of blocks, at most `KNOWN_MAX`. Thread-safe.

    `segment_blocks`: number of blocks of a segment.
    """

    def __init__(self, segment_blocks: int, known_max: int = KNOWN_MAX) -> None:
        self._segment_blocks = segment_blocks
        self._known_max = known_max
        self._lock = threading.Lock()
        self._depths: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes] = {}

    def note(self, keys: Sequence[bytes], depth: int) -> None:
        """Note consecutive blocks of a chain; the first is block `depth` of it."""
        with self._lock:
            self._depths.update(zip(keys, range(depth, depth + len(keys)), strict=True))
            self._parents.update(zip(keys[1:], keys[:-1], strict=True))
            if len(self._depths) > self._known_max:
                for known in (self._depths, self._parents):
                    for key in list(known)[: self._known_max // 4]:
                        del known[key]

    def note_block(self, key: bytes, parent: bytes, depth: int) -> None:
        """Note one block by its header."""
        self.note([parent, key] if depth else [key], max(0, depth - 1))

    def block(self, key: bytes) -> int | None:
        """Return a block's number in its segment; None if it is not known."""
        with self._lock:
            depth = self._depths.get(key)
        return None if depth is None else depth % self._segment_blocks

    def run_to(self, key: bytes, count: int) -> list[bytes]:
        """Return a block and up to `count` - 1 before it in its segment, nearest first."""
        with self._lock:
            depth, run = self._depths.get(key), [key]
            if depth is None:
                return run
            for _ in range(min(count - 1, depth % self._segment_blocks)):
                parent = self._parents.get(run[-1])
                if parent is None:
                    break
                run.append(parent)
            return run
