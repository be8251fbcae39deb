"""Columns that a loader fills line by line, and turns into a trace."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Hashable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from holdfast.errors import TraceError
from holdfast.sim.formats.arrivals import TIME_MAX, Arrivals, arrivals
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import UNKNOWN, Longs, Requests, Trace, arrange, dense, offsets

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

ID_MAX = 2**64 - 1
"""Maximum id: hashes of 64 bits are signed in some files, and unsigned in others."""

_SIGNED_MAX = 2**63 - 1

FOLLOW_UPS_SHARE_MIN = 0.05
"""Share of the later requests of sessions that begin with known blocks; fewer is remarked on."""

_MIXED_SIGNS = "ids below 0 and ids above 2^63 - 1 in one file: signed and unsigned are mixed"

Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Time = Annotated[float, Meta(ge=-TIME_MAX, le=TIME_MAX)]


class Reading(NamedTuple):
    """Options for what a trace file does not say."""

    block_tokens: int | None = None
    """Tokens per block; None: by the format or the file, or `BLOCK_TOKENS`."""
    window_s: float = 8 * 3600.0
    """Time window for the random starts of sessions that have no common clock."""
    time_unit: str | None = None
    """Unit of the times, a key of `arrivals.UNITS_S`; None: that of the format."""


DEFAULT = Reading()


class Rows:
    """Requests in the order of a file, each with its line number, as columns.

    `unit` is the unit of the format's times. `remarks` is what the trace's reader must know.
    """

    def __init__(self, source: Source, reading: Reading = DEFAULT, unit: str = "s") -> None:
        self.source = source
        self.unit = unit
        self.remarks: list[str] = []
        self._time_unit = reading.time_unit
        self._without_times = False
        self.lines = array("q")
        self.times = array("d")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.session = array("i")
        self.think_s = array("d")
        self.counts = array("q")
        self.ids = array("q")
        """Ids as signed numbers: an unsigned hash above 2^63 - 1 is stored minus 2^64."""
        self._unsigned = False
        self._model = array("i")
        self._models: dict[str, int] = {}
        self._sessions: dict[Hashable, int] = {}

    def add(
        self,
        line: int,
        time: float | None,
        tokens: tuple[int, int],
        session: int = UNKNOWN,
        think_s: float = math.nan,
    ) -> None:
        """Add a request with `tokens` of (prompt, answer); `chain` then adds its ids, if any.

        `time` is in the unit of the format; all requests have one, or none.
        """
        self.lines.append(line)
        if len(self.lines) == 1:
            self._without_times = time is None
        if (time is None) is not self._without_times:
            raise self._line_error("some lines have a time and some have none")
        self.times.append(len(self.times) if time is None else time)
        self.input_tokens.append(tokens[0])
        self.output_tokens.append(tokens[1])
        self.session.append(session)
        self.think_s.append(think_s)

    def chain(self, ids: Sequence[int], model: str | None = None) -> None:
        """Add the ids of the last added request, head first; models share no blocks.

        Raises TraceError for an id of more than 64 bits.
        """
        self.counts.append(len(ids))
        self._model.append(self._models.setdefault(model or "", len(self._models)))
        before = len(self.ids)
        try:
            self.ids.extend(ids)
        except OverflowError:
            del self.ids[before:]
            for block in ids:
                if not -_SIGNED_MAX - 1 <= block <= ID_MAX:
                    raise self._line_error(
                        f"id {block} has more than 64 bits: give -2^63 to 2^64 - 1"
                    ) from None
                self.ids.append(block if block <= _SIGNED_MAX else block - ID_MAX - 1)
            if not self._unsigned and min(self.ids[:before], default=0) < 0:
                raise self._line_error(_MIXED_SIGNS) from None
            self._unsigned = True
        if self._unsigned and min(ids, default=0) < 0:
            raise self._line_error(_MIXED_SIGNS)

    def _line_error(self, what: str) -> TraceError:
        return self.source.error(self.lines[-1], f"{what}; correct or remove the line")

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

    def check_whole_prompts(self, heads: Sequence[int] | None = None) -> None:
        """Raise TraceError if no request of any session begins with blocks of an earlier one.

        Such a file lists only the blocks that are new, and reuse is not in it. A small share of
        requests that do is remarked on. `heads` are the first blocks of the requests, if their ids
        are not in `ids`; in this case only a longer prompt than the earlier ones is refused.
        """
        sessions: dict[int, tuple[set[int], int]] = {}
        followed = shared = 0
        first = None
        starts = offsets(np.array(self.counts, np.int64)).tolist()
        for at in np.argsort(np.array(self.times), kind="stable").tolist():
            if self.session[at] == UNKNOWN or not self.counts[at]:
                continue
            head = self.ids[starts[at]] if heads is None else heads[at]
            tokens = self.input_tokens[at]
            known, longest = sessions.get(self.session[at], (set(), 0))
            if known:
                followed += 1
                shared += head in known
                if first is None and (heads is None or tokens > longest):
                    first = at
            known.add(head)
            sessions[self.session[at]] = known, max(longest, tokens)
        if first is None or shared >= FOLLOW_UPS_SHARE_MIN * followed:
            return
        what = (
            f"{shared:,} of the {followed:,} later requests of its sessions begin with a block of "
            "an earlier request of their session"
        )
        if shared:
            self.remarks.append(f"only {what}: if it lists new blocks only, hits are higher")
            return
        raise self.source.error(
            self.lines[first],
            f"the session's earlier request has none of these blocks, and {what}: the file lists "
            "new blocks only (delta form), so reuse is not in it; list the blocks of the whole "
            "prompt, or, if the requests are independent, remove their session",
        )

    def arrivals(self) -> Arrivals:
        """Return the arrival times, in the order of the file. Raises TraceError if there are none.

        Warns if times go back.
        """
        self.check_not_empty()
        if self._without_times:
            return Arrivals(np.array(self.times), "it has no times")
        found = arrivals(np.array(self.times), self.unit, self._time_unit)
        back = np.flatnonzero(np.diff(found.time_s) < 0)
        if len(back):
            _log.warning(
                "%s: arrives before the request above, as do %d more; sorting by time",
                self.source.place(self.lines[int(back[0]) + 1]),
                len(back) - 1,
            )
        return found

    def requests(self, found: Arrivals) -> Requests:
        """Return the columns without ids, in the order of the file."""
        think_s = np.array(self.think_s)
        return Requests(
            found.time_s,
            np.array(self.input_tokens, np.int64),
            np.array(self.output_tokens, np.int64),
            np.array(self.session, np.int32),
            np.full(len(think_s), math.nan) if found.remark else think_s,
        )

    def trace(self, block_tokens: int, other_block_tokens: tuple[int, ...] = ()) -> Trace:
        """Return the trace of these requests and ids."""
        counts, ids = self.blocks()
        self.check_block_counts(counts)
        found = self.arrivals()
        trace = arrange(self.source.name, block_tokens, self.requests(found), counts, ids)
        return self.told(trace._replace(other_block_tokens=other_block_tokens), found)

    def told(self, trace: Trace, found: Arrivals) -> Trace:
        """Return a trace of these requests with what its times and the remarks say."""
        remarks = [found.remark] if found.remark else []
        return trace._replace(untimed=found.untimed, remarks=(*remarks, *self.remarks))

    def blocks(self) -> tuple[Longs, Longs]:
        """Return the number of ids of each request, and all ids; models share none."""
        counts, ids = np.array(self.counts, np.int64), np.array(self.ids, np.int64)
        if len(self._models) > 1 and len(ids):
            ids = dense(ids).astype(np.int64)
            ids += np.repeat(np.array(self._model, np.int64), counts) * (int(ids.max()) + 1)
            self.remarks.append(
                f"its requests name {len(self._models)} models, which share no blocks"
            )
        return counts, ids
