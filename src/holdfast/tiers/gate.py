"""A gate before a medium: work enters until it shuts, and shutting waits for what is inside."""

from __future__ import annotations

import threading


class Gate:
    """Counts what is under way. Any thread may call."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> bool:
        """Go in, unless it is shut; `leave` must follow."""
        with self._condition:
            self._inside += not self._shut
            return not self._shut

    def leave(self) -> None:
        """Come out."""
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()

    def shut(self) -> bool:
        """Let nothing in any more and wait until all have left; False if it was shut before."""
        with self._condition:
            first, self._shut = not self._shut, True
            self._condition.wait_for(lambda: not self._inside)
            return first

    @property
    def is_shut(self) -> bool:
        """Whether nothing may enter."""
        return self._shut
