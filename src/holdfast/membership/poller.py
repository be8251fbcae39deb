"""A background thread that does one thing periodically, and logs each error once."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence

from holdfast.errors import HoldfastError
from holdfast.membership.members import Member

_log = logging.getLogger(__name__)

_JOIN_S = 10.0


class Poller(abc.ABC):
    """Calls `_one_round` every `pause_s` until closed.

    If a round raises, its error becomes the trouble, which is logged when it changes, and the pause
    doubles up to `pause_max_s`. `interrupt` must make a round that waits for the network return
    soon.
    """

    def __init__(
        self,
        name: str,
        pause_s: float,
        pause_max_s: float,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.closing = threading.Event()
        self._telling = threading.RLock()
        """Held to set `closing`, and while a list is passed on; its receiver may call `close`."""
        self._awake = threading.Event()
        self._trouble = ""
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._interrupt = interrupt
        thread_name = f"holdfast-poll: {name}"
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def start(self) -> None:
        """Start the thread. Called once."""
        self._thread.start()

    def close(self) -> None:
        """Stop; wait for a list that is being passed on, then up to `_JOIN_S` for the round."""
        with self._telling:
            self.closing.set()
        self._awake.set()
        if self._interrupt is not None:
            self._interrupt()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def wake(self) -> None:
        """Begin the next round now instead of after its pause."""
        self._awake.set()

    def trouble(self) -> str:
        """Return the current error; empty if there is none."""
        return self._trouble

    def report(self, trouble: str) -> None:
        """Set the trouble and log a change. A round may report success ("") before it ends."""
        if trouble == self._trouble or self.closing.is_set():
            return
        self._trouble = trouble
        if trouble:
            _log.warning("%s: %s", self.name, trouble)
        else:
            _log.info("%s: recovered", self.name)

    @abc.abstractmethod
    def _one_round(self) -> None:
        """Do the work once; an error that it raises is the trouble."""

    def _run(self) -> None:
        pause_s = self._pause_s
        while not self.closing.is_set():
            self._awake.clear()
            if self.closing.is_set():  # set just now, and `clear` may have dropped its wake-up
                return
            try:
                self._one_round()
            except Exception as error:  # noqa: BLE001  # otherwise the thread ends unnoticed
                is_expected = isinstance(error, HoldfastError | OSError) and str(error)
                trouble = str(error) if is_expected else repr(error)
                if not is_expected and trouble != self._trouble:
                    _log.error("%s: a round failed; it is repeated", self.name, exc_info=error)
                self.report(trouble)
                self._awake.wait(pause_s)
                pause_s = min(2 * pause_s, self._pause_max_s)
            else:
                self.report("")
                pause_s = self._pause_s
                self._awake.wait(pause_s)


class PolledSource(Poller):
    """Base class of a `MembershipSource`: a round reads the list, and tells it if it may differ."""

    _on_members: Callable[[Sequence[Member]], None]

    def watch(self, on_members: Callable[[Sequence[Member]], None]) -> None:
        self._on_members = on_members
        self.start()

    def _tell(self, members: Sequence[Member]) -> None:
        """Pass the list on, unless the source is closed, which a round may outlast."""
        with self._telling:
            if not self.closing.is_set():
                self._on_members(members)
