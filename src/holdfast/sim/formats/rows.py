"""Columns that a loader fills line by line, and turns into a trace."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Hashable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from holdfast.sim.formats.source import Source
from holdfast.sim.trace import UNKNOWN, Longs, Requests, Trace, arrange

_log = logging.getLogger(__name__)


BLOCK_TOKENS = 64
"""Tokens per block of a trace without ids."""

TOKENS_MAX = 2**31
"""Maximum tokens of a prompt; a larger number is an error in the file."""

REQUEST_BLOCKS_MAX = 1 << 22
"""Maximum blocks of a request: 67 M tokens at 16 per block; more is an error in the file."""

BLOCKS_MAX = 1 << 29
"""Maximum block accesses of a trace: twelve times those of the longest shipped trace.

A few bytes of a file can describe any number of blocks, and each block takes memory.
"""

TIME_MAX = 1e15
"""Maximum absolute value of a time stamp in any unit; more is an error in the file."""

Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Time = Annotated[float, Meta(ge=-TIME_MAX, le=TIME_MAX)]
Id = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Reading(NamedTuple):
    """Options for what a trace file does not say."""

    block_tokens: int | None = None
    """Tokens per block; None: by the format or the file, or `BLOCK_TOKENS`."""
    window_s: float = 8 * 3600.0
    """Time window for the random starts of sessions that have no common clock."""


class Rows:
    """Requests in the order of a file, each with its line number, as columns."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.lines = array("q")
        self.time_s = array("d")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.session = array("i")
        self.think_s = array("d")
        self.counts = array("q")
        self.ids = array("q")
        self._sessions: dict[Hashable, int] = {}

    def add(
        self,
        line: int,
        time_s: float,
        tokens: tuple[int, int],
        session: int = UNKNOWN,
        think_s: float = math.nan,
    ) -> None:
        """Add a request with `tokens` of (prompt, answer); `chain` then adds its ids, if any."""
        self.lines.append(line)
        self.time_s.append(time_s)
        self.input_tokens.append(tokens[0])
        self.output_tokens.append(tokens[1])
        self.session.append(session)
        self.think_s.append(think_s)

    def chain(self, ids: Sequence[int]) -> None:
        """Add the ids of the last added request, head first."""
        self.counts.append(len(ids))
        self.ids.extend(ids)

    def session_of(self, name: Hashable | None) -> int:
        """Return the number of a session, the same for the same name; -1 for None."""
        return UNKNOWN if name is None else self._sessions.setdefault(name, len(self._sessions))

    def check_not_empty(self) -> None:
        """Raise TraceError if there is no request."""
        if not self.lines:
            raise self.source.error(0, "no requests in it; is it the right file?")

    def check_block_counts(self, counts: Longs) -> None:
        """Raise TraceError if a request or the trace exceeds its maximum number of blocks.

        `counts` are the blocks of each request, in the order of the file. Call this before the
        blocks are created.
        """
        until = np.cumsum(counts)
        over = np.flatnonzero((counts > REQUEST_BLOCKS_MAX) | (until > BLOCKS_MAX))
        if not len(over):
            return
        at = int(over[0])
        if counts[at] > REQUEST_BLOCKS_MAX:
            what = f"{counts[at]:,} blocks; a request has at most {REQUEST_BLOCKS_MAX:,}"
            remedy = "correct or remove the line, or use larger blocks (--block-tokens)"
        else:
            what = f"{until[at]:,} blocks up to here; a trace has at most {BLOCKS_MAX:,}"
            remedy = "split the file, or use larger blocks (--block-tokens)"
        raise self.source.error(self.lines[at], f"{what}; {remedy}")

    def requests(self) -> Requests:
        """Return the columns without ids, in the order of the file; warn if times go back."""
        self.check_not_empty()
        time_s = np.array(self.time_s)
        back = np.flatnonzero(np.diff(time_s) < 0)
        if len(back):
            _log.warning(
                "%s: arrives before the request above, as do %d more; sorting by time",
                self.source.place(self.lines[int(back[0]) + 1]),
                len(back) - 1,
            )
        return Requests(
            time_s,
            np.array(self.input_tokens, np.int64),
            np.array(self.output_tokens, np.int64),
            np.array(self.session, np.int32),
            np.array(self.think_s),
        )

    def trace(self, block_tokens: int) -> Trace:
        """Return the trace of these requests and ids."""
        counts, ids = self.blocks()
        self.check_block_counts(counts)
        return arrange(self.source.name, block_tokens, self.requests(), counts, ids)

    def blocks(self) -> tuple[Longs, Longs]:
        """Return the number of ids of each request, and all ids."""
        return np.array(self.counts, np.int64), np.array(self.ids, np.int64)
