"""Lookups of blocks for vLLM's scheduler: questions of one step are sent together, answered later.

The scheduler asks about one block at a time and must not wait. It owns all state here; one thread
asks the node, and hands its answers over through a queue.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast.errors import Outcome
from holdfast.workers import workers

_log = logging.getLogger("vllm.holdfast")


class _Answer(NamedTuple):
    names: Sequence[bytes]
    held: Sequence[bool]


class BlockLookups:
    """Whether blocks are held, for as long as a request asks about them.

    `exists` returns the outcome for each name, and may wait. Called from the scheduler's thread.
    """

    def __init__(self, exists: Callable[[Sequence[bytes]], Sequence[Outcome]]) -> None:
        self._exists = exists
        self._held: dict[bytes, bool | None] = {}
        """By name: what was answered; None while there is no answer."""
        self._requests: dict[bytes, set[str]] = {}
        """By name: the requests that ask about it."""
        self._names: dict[str, set[bytes]] = {}
        """By request: the names that it asks about."""
        self._new: list[bytes] = []
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._thread = workers(1, "holdfast-tier-lookup")

    def look_up(self, name: bytes, request: str) -> bool | None:
        """Return whether a block is held; None if it is not known yet: ask again later."""
        if name not in self._held:
            self._held[name] = None
            self._new.append(name)
        elif self._held[name] is None:
            self._take_answers()
        self._requests.setdefault(name, set()).add(request)
        self._names.setdefault(request, set()).add(name)
        return self._held[name]

    def send(self) -> None:
        """Send the new questions; call it at the end of each step."""
        self._take_answers()
        if self._new:
            self._thread.submit(self._ask, self._new)
            self._new = []

    def note_missing(self, names: Iterable[bytes]) -> None:
        """Record that blocks could not be read, so that nobody asks for them again and again."""
        for name in names:
            if name in self._held:
                self._held[name] = False

    def forget(self, request: str) -> None:
        """Record that a request has ended; the next one that needs its blocks asks anew."""
        for name in self._names.pop(request, ()):
            asking = self._requests[name]
            asking.discard(request)
            if not asking:
                del self._requests[name], self._held[name]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self, names: Sequence[bytes]) -> None:
        held = [False] * len(names)
        try:
            held = [outcome is Outcome.OK for outcome in self._exists(names)]
        except Exception:  # noqa: BLE001  # no request fails for it
            _log.exception("looking up %d blocks failed; they are recomputed", len(names))
        finally:
            self._answers.put(_Answer(names, held))

    def _take_answers(self) -> None:
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return
            for name, held in zip(answer.names, answer.held, strict=True):
                # A request may have ended meanwhile, or a load of the block may have failed.
                if self._held.get(name, False) is None:
                    self._held[name] = held
