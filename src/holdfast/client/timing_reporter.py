"""Send timing reports to nodes from a background thread, `REPORT_DELAY_S` after their step.

Sending takes the GIL and wakes the node's process; right after a step the engine needs the GIL and
the core to emit its tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

import msgspec

from holdfast.errors import NodeGoneError
from holdfast.wire.local.messages import Observed
from holdfast.wire.local.reconnecting_client import ReconnectingClient

REPORT_DELAY_S = 0.02
"""Delay before a report is sent, so that it does not compete with the step's own output."""

_log = logging.getLogger(__name__)


class TimingReporter:
    """Sends each report over all `connections`, without waiting for replies."""

    def __init__(
        self, connections: Sequence[ReconnectingClient], delay_s: float = REPORT_DELAY_S
    ) -> None:
        self._connections = connections
        self._delay_s = delay_s
        self._failure = ""
        self._reports: queue.SimpleQueue[Observed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-report", daemon=True)
        self._thread.start()

    def put(self, report: Observed) -> None:
        """Queue a report; returns at once."""
        self._reports.put(report)

    def close(self) -> None:
        """Send the queued reports and stop."""
        self._reports.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            reports = [self._reports.get()]
            time.sleep(self._delay_s)
            # Reports queued during the delay are sent too: steps may be shorter than the delay.
            reports += [self._reports.get() for _ in range(self._reports.qsize())]
            for report in reports:
                if report is None:
                    return
                message = report
                for connection in self._connections:
                    if self._send(connection, message):
                        # A prompt is counted once, however many ranks are connected to one node.
                        message = msgspec.structs.replace(report, prompts=[])

    def _send(self, connection: ReconnectingClient, report: Observed) -> bool:
        """Send a report; return False if it was not sent."""
        try:
            client = connection.client()
            if client is not None:
                client.forget(client.send(report))
                return True
        except NodeGoneError:
            pass
        except Exception as error:  # noqa: BLE001  # if this thread ended, the queue would grow without limit
            if self._failure != repr(error):  # there is a report every few steps
                self._failure = repr(error)
                _log.exception("a timing report cannot be sent")
        return False
