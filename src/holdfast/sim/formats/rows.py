"""Requests on their way from a file into a trace: what every loader fills, line by line."""

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


TOKENS_MAX = 2**31
"""No prompt is longer; more is a fault of the file."""

REQUEST_BLOCKS_MAX = 1 << 22
"""Most blocks of one request: 67 M tokens at 16 a block; more is a fault of the file."""
BLOCKS_MAX = 1 << 29
"""Most block accesses of a trace, twelve times those of the longest one shipped.

A few bytes of a file can stand for any number of blocks, and each takes memory.
"""

Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
TIME_MAX = 1e15
"""No time stamp is further from 0, in whatever unit; more is a fault of the file."""

Time = Annotated[float, Meta(ge=-TIME_MAX, le=TIME_MAX)]
Id = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Reading(NamedTuple):
    """How to read a trace, where its file leaves something open."""

    block_tokens: int | None = None
    """Tokens in a block; None: what the format or the file says, or 64 where there are no ids."""
    window_s: float = 8 * 3600.0
    """Sessions without a common clock start at random within this many seconds."""
    seed: int = 1
    """The seed of those random starts."""


class Rows:
    """Requests in the order of a file, each with its line number."""

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
        """Add a request with `tokens` in and out; its ids follow by `chain`, if it has any."""
        self.lines.append(line)
        self.time_s.append(time_s)
        self.input_tokens.append(tokens[0])
        self.output_tokens.append(tokens[1])
        self.session.append(session)
        self.think_s.append(think_s)

    def chain(self, ids: Sequence[int]) -> None:
        """Add the ids of the request added last, head first."""
        self.counts.append(len(ids))
        self.ids.extend(ids)

    def session_of(self, name: Hashable | None) -> int:
        """A number for this session; -1 for no session."""
        return UNKNOWN if name is None else self._sessions.setdefault(name, len(self._sessions))

    def refuse_none(self) -> None:
        """Refuse a file without a request."""
        if not self.lines:
            raise self.source.fault(0, "no requests in it; is it the right file?")

    def refuse_too_many(self, counts: Longs) -> None:
        """Refuse requests, in the order of the file, that have so many blocks; before listing them.

        Raises TraceError with the line, the number of blocks and the limit.
        """
        until = np.cumsum(counts)
        over = np.flatnonzero((counts > REQUEST_BLOCKS_MAX) | (until > BLOCKS_MAX))
        if not len(over):
            return
        at = int(over[0])
        if counts[at] > REQUEST_BLOCKS_MAX:
            what = f"{counts[at]:,} blocks; a request has {REQUEST_BLOCKS_MAX:,} at most"
            remedy = "correct or remove the line, or take larger blocks (--block-tokens)"
        else:
            what = f"{until[at]:,} blocks up to here; a trace has {BLOCKS_MAX:,} at most"
            remedy = "split the file, or take larger blocks (--block-tokens)"
        raise self.source.fault(self.lines[at], f"{what}; {remedy}")

    def requests(self) -> Requests:
        """The columns without the ids, in the order of the file; warns where that isn't by time."""
        self.refuse_none()
        time_s = np.array(self.time_s)
        back = np.flatnonzero(np.diff(time_s) < 0)
        if len(back):
            _log.warning(
                "%s: arrives before the request above, as %d others do; sorted by time",
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
        """The trace of these requests and ids."""
        counts, ids = self.blocks()
        self.refuse_too_many(counts)
        return arrange(self.source.name, block_tokens, self.requests(), counts, ids)

    def blocks(self) -> tuple[Longs, Longs]:
        """The number of ids of each request, and the ids."""
        return np.array(self.counts, np.int64), np.array(self.ids, np.int64)
