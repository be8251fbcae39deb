"""One thread that does the same thing round after round, and tells its trouble once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

_JOIN_S = 10.0


class Rounds:
    """Calls `one_round` until closed, `pause_s` apart.

    A round that raises is trouble: told in one log line for as long as it stays the same, and
    followed by a pause that doubles up to `pause_max_s`. `interrupt` must make a round that is
    waiting for the network return soon.
    """

    def __init__(
        self,
        name: str,
        one_round: Callable[[], None],
        pause_s: float,
        pause_max_s: float,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.trouble = ""
        self.closing = threading.Event()
        self._awake = threading.Event()
        self._one_round = one_round
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._interrupt = interrupt
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the round that is under way."""
        self.closing.set()
        self._awake.set()
        if self._interrupt is not None:
            self._interrupt()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def wake(self) -> None:
        """Let the next round begin now instead of after its pause."""
        self._awake.set()

    def settle(self, trouble: str) -> None:
        """Note how things stand; a round may call it in the middle to say that all is well."""
        if trouble == self.trouble or self.closing.is_set():
            return
        self.trouble = trouble
        if trouble:
            _log.warning("%s: %s", self.name, trouble)
        else:
            _log.info("%s: well again", self.name)

    def _run(self) -> None:
        pause_s = self._pause_s
        while not self.closing.is_set():
            self._awake.clear()
            if self.closing.is_set():  # just now, and the clear may have hidden it
                return
            try:
                self._one_round()
            except Exception as error:  # noqa: BLE001  # a thread that ended would not be missed
                self.settle(str(error) or repr(error))
                self._awake.wait(pause_s)
                pause_s = min(2 * pause_s, self._pause_max_s)
            else:
                self.settle("")
                pause_s = self._pause_s
                self._awake.wait(pause_s)
