"""A gate in front of a medium: shutting it rejects new work and waits for work in progress."""

from __future__ import annotations

import threading


class MediumGate:
    """Counts work in progress, so that a close can wait for it. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> bool:
        """Begin work and return True, or return False if the gate is shut; `leave` follows True."""
        with self._condition:
            self._inside += not self._shut
            return not self._shut

    def leave(self) -> None:
        """End work."""
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()

    def shut(self) -> bool:
        """Reject new work and wait for work in progress; return False if it was shut before."""
        with self._condition:
            first, self._shut = not self._shut, True
            self._condition.wait_for(lambda: not self._inside)
            return first

    @property
    def is_shut(self) -> bool:
        """Whether the gate is shut."""
        return self._shut
