"""A client that connects in the background, and reconnects when the connection is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from holdfast.errors import HoldfastError, RefusedError, UntrustedPeerError
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import Hello
from holdfast.wire.local.refusal_backoff import RefusalBackoff

NodeAddress: TypeAlias = str | Callable[[float], str]
"""The address of a node, or a function that returns the present one.

The function is called on the connecting thread before each attempt, with the seconds for which no
node has answered; HoldfastError and OSError that it raises make an attempt that failed.
"""

_FIRST_RETRY_S = 0.02
"""Delay before the second attempt to connect."""

_log = logging.getLogger(__name__)


class ReconnectingClient:
    """Keeps one client of a node connected; only `wait` blocks. `address`: of the last attempt.

    Leases and reservations of an earlier client are invalid. `failure`: why the last attempt
    failed; `refused`: the node refused the session then. The delay between attempts doubles up to
    `retry_s`, until a connection lasts that long. After refusals it doubles up to a minute, until
    the node is started again; see `RefusalBackoff`.
    """

    def __init__(
        self, address: NodeAddress, hello: Hello, timeout_s: float, retry_s: float = 1.0
    ) -> None:
        self.address = address if isinstance(address, str) else ""
        self._present = address
        self.failure = "not connected yet"
        self.refused = False
        self._hello = hello
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._backoff = RefusalBackoff(self.address, retry_s)
        self._client: Client | None = None
        self._away_since_s: float | None = None
        self._logged = set[bool]()
        self._ended = threading.Event()
        self._tried = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="holdfast-connect", daemon=True)
        self._thread.start()

    def client(self) -> Client | None:
        """Return the connected client; None if there is none."""
        client = self._client
        return None if client is None or client.closed else client

    def wait(self, timeout_s: float) -> Client | None:
        """Wait up to `timeout_s` for a connected client and return it; for start-up only."""
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
                self._find()
                self._backoff.connecting()
                client = Client(self.address, self._hello, self._timeout_s)
                self._backoff.accepted()
                self._away_since_s = None
                since_s = time.monotonic()
                with self._tried:
                    self._client = client
                    self.failure, self.refused = "", False
                    self._logged.clear()
                    self._tried.notify_all()
                if self._ended.is_set():
                    client.close()
                try:
                    client.wait_gone()
                finally:
                    client.close()
                    self._client = None
                    del client  # unmaps the lost node's arena
                self._away_since_s = time.monotonic()
                if not self._ended.is_set():
                    self._note_failure(f"node {self.address}: the connection ended")
                if time.monotonic() - since_s >= self._retry_s:
                    pause_s = _FIRST_RETRY_S
            except RefusedError as error:
                self.refused = True
                self._away_since_s = None
                self._note_failure(str(error))
                self._backoff.refused()
                pause_s = self._retry_s
            except (HoldfastError, OSError) as error:  # OSError: e.g. no free descriptor
                self.refused = False
                self._away_since_s = self._away_since_s or time.monotonic()
                self._note_failure(str(error), untrusted=isinstance(error, UntrustedPeerError))
            while not self._ended.wait(pause_s) and not self._backoff.due():
                pass
            pause_s = min(2 * pause_s, self._retry_s)

    def _find(self) -> None:
        """Let the next attempt go to the node's present address."""
        if isinstance(self._present, str):
            return
        since_s = self._away_since_s
        address = self._present(0.0 if since_s is None else time.monotonic() - since_s)
        if address != self.address:
            self.address = address
            self._backoff = RefusalBackoff(address, self._retry_s)

    def _note_failure(self, failure: str, *, untrusted: bool = False) -> None:
        """Log once per outage that the node is gone, and once that its socket is not trusted."""
        self.failure = failure
        if untrusted not in self._logged:
            self._logged.add(untrusted)
            _log.warning("%s; reconnecting, requests are recomputed meanwhile", failure)
