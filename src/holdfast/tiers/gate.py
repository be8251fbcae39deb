"""A gate in front of a medium: shutting it rejects new work and waits for work in progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class MediumGate:
    """Counts work in progress, so that a close can wait for it. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self.is_shut = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Count the `with` block as work in progress; yield False, and count nothing, if shut."""
        with self._condition:
            admitted = not self.is_shut
            self._inside += admitted
        try:
            yield admitted
        finally:
            if admitted:
                with self._condition:
                    self._inside -= 1
                    self._condition.notify_all()

    def shut(self) -> bool:
        """Reject new work and wait for work in progress; return False if it was shut before."""
        with self._condition:
            first, self.is_shut = not self.is_shut, True
            self._condition.wait_for(lambda: not self._inside)
            return first
