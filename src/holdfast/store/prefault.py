"""Bring the arenas' memory in ahead of use, in a thread of its own, while nobody computes.

Memory that is touched for the first time is cleared: 64 MiB of it keep a core busy for tens of
milliseconds, which an engine that computes on every core waits for. An engine asks for slots at
the beginning of a step that it computes, and commits them at its end, so between the two memory is
brought in only where hardly any is ready.
"""

from __future__ import annotations

import logging
import threading

from holdfast.store.states import States
from holdfast.tiers.host import AHEAD_CHUNKS

_LOOK_AGAIN_S = 0.1
SCARCE_CHUNKS = 4
"""Free chunks with memory that there are to be whatever goes on: an engine on GPUs saves so much
between two looks at most."""

_log = logging.getLogger("holdfast.store")


class Prefault:
    """A thread that has every arena of a store bring its memory in, a chunk at a time."""

    def __init__(self, states: States) -> None:
        self._states = states
        self._seen = self._look()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-prefault", daemon=True)

    def start(self) -> None:
        """Start with what the first saves and fetches will need."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the chunk under way."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            most = AHEAD_CHUNKS if self._at_rest() else SCARCE_CHUNKS
            try:
                brought = [host.prefault(most) for host in self._states.all_hosts()]
            except OSError:
                _log.exception("memory can not be brought in; it comes page by page")
                brought = []
            pause_s = 0.0 if any(brought) else _LOOK_AGAIN_S

    def _at_rest(self) -> bool:
        """Say whether nobody saves, and nobody saved or read since it was asked before."""
        before, self._seen = self._seen, self._look()
        _, saving = self._seen
        return self._seen == before and not saving

    def _look(self) -> tuple[int, bool]:
        """Return what changes whenever somebody saves or reads, and whether somebody saves."""
        return self._states.numbers, bool(self._states.tickets)
