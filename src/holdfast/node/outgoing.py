"""What a target sends, by domain: memory that is kept for it in parts, the line by turns.

Records are kept in memory while they are sent, so a peer that does not read keeps them there: each
domain has a part of the memory that may be kept, by its share, beside others. Pieces of what is
sent take turns, a few connections at a time; a connection whose peer takes nothing gives its turn
up until it does. So who floods with many connections, or reads from none, holds up itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from holdfast.policy.fair_queue import FairQueue
from holdfast.policy.turns import Turn, Turns
from holdfast.wire.stream import Buffer, Progress, Stream, pieces

PIECE_BYTES = 2 << 20
LARGE_PIECE_BYTES = 64 << 20
"""What is sent in one turn: beside others, and of a message that found the line empty."""

SMALL_BYTES = 256 << 10
"""A message so small needs no place in the line while nobody waits there, and few such are sent."""

LEAST_BYTES = 128 << 10
"""What anything sent counts as at least: about what a message costs the processors in itself."""

TURN_S = 0.05
"""How long a turn may take; a peer that takes less than its piece meanwhile waits for another."""

SPARE = 2
_LINE_S = 30.0


class Kept:
    """How many bytes each domain has in memory to be sent: `most` in all, beside others its part.

    One message of each domain always may be kept.
    """

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._lock = threading.Lock()
        self._queue: FairQueue[tuple[Turn, threading.Event]] = FairQueue()
        self._shares: dict[bytes, float] = {}
        self._kept: dict[bytes, int] = {}

    def total(self) -> int:
        """Return the bytes of all domains."""
        with self._lock:
            return sum(self._kept.values())

    def take(self, turn: Turn, within_s: float) -> bool:
        """Wait for room for what a turn costs, and count it until `give`. False: none in time."""
        with self._lock:
            if not self._queue and self._fits(turn):
                self._count(turn)
                return True
            let_on = threading.Event()
            self._queue.advance(self._now())
            self._queue.put(turn.domain, turn.cost, (turn, let_on), turn.terms)
            self._let_on()
        if let_on.wait(within_s):
            return True
        with self._lock:
            if let_on.is_set():
                return True
            self._queue.withdraw(turn.domain, lambda entry: entry[1] is let_on)
            self._let_on()
        return False

    def give(self, turn: Turn) -> None:
        """Give back what was taken."""
        with self._lock:
            left = self._kept.pop(turn.domain, 0) - int(turn.cost)
            if left:
                self._kept[turn.domain] = left
            else:
                self._shares.pop(turn.domain, None)
            self._let_on()

    def _let_on(self) -> None:
        if not self._queue:
            return
        self._queue.advance(self._now())
        while (taken := self._queue.take(self._next_fits)) is not None:
            turn, let_on = taken[1]
            self._count(turn)
            let_on.set()

    def _count(self, turn: Turn) -> None:
        self._kept[turn.domain] = self._kept.get(turn.domain, 0) + int(turn.cost)
        self._shares[turn.domain] = turn.share

    def _next_fits(self, domain: Hashable) -> bool:
        return self._fits(self._queue.head(domain)[0])

    def _fits(self, turn: Turn) -> bool:
        """Whether so much more may be kept for a domain."""
        own = self._kept.get(turn.domain, 0)
        if not own:
            return True
        others = sum(self._shares.values()) - self._shares[turn.domain]
        part = self._most * turn.share / (turn.share + others)
        return own + turn.cost <= part and sum(self._kept.values()) + turn.cost <= self._most


class Line:
    """The way out: pieces of a few connections at once, the domains by turns."""

    def __init__(self, at_once: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self._at_once = at_once or max(2, (os.cpu_count() or 2) // 2)
        self._turns: Turns[threading.Event] = Turns(self._at_once, SPARE)
        self._slipping = 0
        """Small messages under way beside the line."""
        self._now = now
        self._lock = threading.Lock()

    def send(self, stream: Stream, parts: Sequence[Buffer], turn: Turn, pace: Progress) -> None:
        """Send parts in order, piece by piece, each in a turn of its own.

        A piece is counted as its bytes, but not as less than `LEAST_BYTES`.
        Raises OSError as the stream does, TimeoutError too where the turn does not come.
        """
        nbytes = sum(map(len, parts))
        if nbytes <= SMALL_BYTES:
            with self._lock:  # many of them fill the line too: beside other domains they wait
                slips = not self._turns.waited_for and (
                    self._slipping < self._at_once
                    or not self._turns.shared(turn.domain, self._now())
                )
                self._slipping += slips
            if slips:
                try:
                    stream.send(parts, pace)
                finally:
                    with self._lock:  # only now: the peer waits for its bytes, not for the books
                        self._slipping -= 1
                        self._turns.slip(_costing(turn, nbytes), self._now())
                return
        with contextlib.closing(_Going(self, stream, turn, pace)) as going:
            for piece in pieces([memoryview(part) for part in parts], self._piece_bytes()):
                going.begin(sum(map(len, piece)))
                stream.send(piece, going)
                going.end()

    def enter(self, turn: Turn) -> None:
        """Wait for a turn; whoever got one must leave. TimeoutError where none comes."""
        with self._lock:
            if self._turns.begin(turn, self._now()):
                return
            let_on = threading.Event()
            self._turns.put(turn, let_on, self._now())
            self._let_on()
        if let_on.wait(_LINE_S):
            return
        with self._lock:
            if not let_on.is_set():
                self._turns.withdraw(turn, let_on)
                raise TimeoutError(f"no turn to send within {_LINE_S:g} s")

    def leave(self, turn: Turn, undone: float = 0.0) -> None:
        """End a turn, in which so much of what it was to cost was not done."""
        with self._lock:
            self._turns.done(turn, undone)
            self._let_on()

    def _piece_bytes(self) -> int:
        with self._lock:
            return LARGE_PIECE_BYTES if self._turns.empty else PIECE_BYTES

    def _let_on(self) -> None:
        while len(self._turns) and (taken := self._turns.take(self._now())) is not None:
            taken[1].set()


class _Going:
    """The pace of one message: piece by piece, each in a turn that a slow peer loses.

    The time in line does not count against the peer.
    """

    def __init__(self, line: Line, stream: Stream, turn: Turn, pace: Progress) -> None:
        self._line = line
        self._stream = stream
        self._turn = turn
        self._pace = pace
        self._left = self._untold = 0
        self._until: float | None = None
        self._slow = False

    def begin(self, nbytes: int) -> None:
        """Say that a piece of so many bytes is next."""
        self._left = nbytes

    def end(self) -> None:
        """Say that all of the piece is on its way."""
        self._untold, self._left, self._slow = self._left, 0, False
        self.close()

    def seconds(self, moved: int) -> float:
        """Return how long the next call may block; wait before it, for the peer and for a turn."""
        left_s = self._pace.seconds(moved + self._untold)
        self._left -= moved
        self._untold = 0
        now = time.monotonic()
        if self._until is not None and now >= self._until:
            self.close()
            self._slow = True
        if self._until is None:
            while self._slow and not self._stream.drains(min(left_s, TURN_S)):
                left_s = self._pace.seconds(0)
            self._enter()
            now = time.monotonic()
        return min(left_s, max(0.0, (self._until or now) - now))

    def close(self) -> None:
        """Leave the line."""
        if self._until is not None:
            self._until = None
            self._line.leave(self._turn, float(self._left))

    def _enter(self) -> None:
        self._turn = _costing(self._turn, self._left)
        begun = time.monotonic()
        self._line.enter(self._turn)
        entered = time.monotonic()
        self._pace.rest(entered - begun)
        self._until = entered + TURN_S


def _costing(turn: Turn, nbytes: int) -> Turn:
    return turn._replace(cost=float(max(nbytes, LEAST_BYTES)))
