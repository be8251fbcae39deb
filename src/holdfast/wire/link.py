"""A client that comes back: connects in the background, and again after the node was gone."""

from __future__ import annotations

import logging
import threading

from holdfast.errors import HoldfastError, StrangerError
from holdfast.wire.client import Client
from holdfast.wire.messages import Hello

_FIRST_RETRY_S = 0.02

_log = logging.getLogger(__name__)


class Link:
    """Keeps one client of the node at `address` alive; never makes its user wait.

    `incarnations` counts the sessions so far: when it moved, every lease and ticket of before is
    void. `failure` is why there is no client, in the words of the last attempt. Attempts follow
    each other ever more slowly, up to `retry_s`.
    """

    def __init__(self, address: str, hello: Hello, timeout_s: float, retry_s: float = 1.0) -> None:
        self.address = address
        self.incarnations = 0
        self.failure = "not connected yet"
        self._hello = hello
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._client: Client | None = None
        self._told = set[bool]()
        self._ended = threading.Event()
        self._tried = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="holdfast-link", daemon=True)
        self._thread.start()

    def client(self) -> Client | None:
        """Return the live client, or None while there is none."""
        client = self._client
        return None if client is None or client.closed else client

    def wait(self, timeout_s: float) -> Client | None:
        """Return the live client, waiting up to `timeout_s` for one; for start-up only."""
        with self._tried:
            self._tried.wait_for(lambda: self.client() or self._ended.is_set(), timeout_s)
        return self.client()

    def close(self) -> None:
        """End the session and stop connecting."""
        self._ended.set()
        client = self._client
        if client is not None:
            client.close()
        with self._tried:
            self._tried.notify_all()

    def _keep(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._ended.is_set():
            try:
                self._hold(Client(self.address, self._hello, self._timeout_s))
                pause_s = _FIRST_RETRY_S
            except (HoldfastError, OSError) as error:  # out of descriptors, say, for now
                self._note(str(error), strange=isinstance(error, StrangerError))
                pause_s = min(2 * pause_s, self._retry_s)
            self._ended.wait(pause_s)

    def _hold(self, client: Client) -> None:
        """Lend the client until its connection is over."""
        with self._tried:
            self._client = client
            self.incarnations += 1
            self.failure = ""
            self._told.clear()
            self._tried.notify_all()
        if self._ended.is_set():
            client.close()
        try:
            client.wait_gone()
        finally:
            client.close()
            self._client = None  # the arena of a node that is gone would fill memory for nothing
        if not self._ended.is_set():
            self._note(f"node {self.address}: the connection is over")

    def _note(self, failure: str, *, strange: bool = False) -> None:
        """Log that the node is gone, once; while it is, attempts fail for this reason and that.

        That a stranger is in its place is another thing, and logged once as well.
        """
        self.failure = failure
        if strange not in self._told:
            self._told.add(strange)
            _log.warning("%s; trying again, requests are recomputed meanwhile", failure)
