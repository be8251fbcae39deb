"""Bring the arenas' memory in ahead of use, in a thread of its own."""

from __future__ import annotations

import logging
import threading

from holdfast.store.states import States

_LOOK_AGAIN_S = 0.1
_log = logging.getLogger("holdfast.store")


class Prefault:
    """A thread that has every arena of a store bring its memory in, a chunk at a time."""

    def __init__(self, states: States) -> None:
        self._states = states
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
            try:
                brought = [host.prefault() for host in self._states.all_hosts()]
            except OSError:
                _log.exception("memory can not be brought in; it comes page by page")
                brought = []
            pause_s = 0.0 if any(brought) else _LOOK_AGAIN_S
