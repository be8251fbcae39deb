"""Tells nodes what was timed: from a thread, a moment behind the tokens that it was timed on.

A node that is woken takes a core, and who sends holds the interpreter: at the end of a step vLLM's
other threads need both to get its tokens out.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from holdfast.errors import NodeGoneError
from holdfast.wire.messages import Observed

BEHIND_S = 0.02
"""By then an answer is out, and an engine that has nothing else to do has come to rest."""

_log = logging.getLogger("vllm.holdfast")


class Teller:
    """Sends reports over `links`, one after the other; nobody waits for an answer."""

    def __init__(self, links: Sequence[Any], behind_s: float = BEHIND_S) -> None:
        self._links = links
        self._behind_s = behind_s
        self._reports: queue.SimpleQueue[Observed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-tell", daemon=True)
        self._thread.start()

    def tell(self, report: Observed) -> None:
        """Have a report sent soon; returns at once."""
        self._reports.put(report)

    def close(self) -> None:
        """Send what is left and stop."""
        self._reports.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            reports = [self._reports.get()]
            time.sleep(self._behind_s)
            # What came meanwhile goes along: an engine may time more steps than there are rests.
            reports += [self._reports.get() for _ in range(self._reports.qsize())]
            for report in reports:
                if report is None:
                    return
                for link in self._links:
                    self._send(link, report)

    def _send(self, link: Any, report: Observed) -> None:
        try:
            client = link.client()
            if client is not None:
                client.forget(client.send(report))
        except NodeGoneError:
            pass
        except Exception:  # noqa: BLE001  # without this thread reports would pile up
            _log.exception("what was timed can not be told")
