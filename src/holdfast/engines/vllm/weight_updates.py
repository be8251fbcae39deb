"""Updates of an engine's weights in place, noticed in its workers before they begin.

vLLM tells a connector of resets, not of updates. Its workers carry updates out by methods of their
own, which are wrapped here. So what was saved before an update is not loaded after it, and what the
new weights compute is not saved under earlier names, even if the connector was not reset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

UPDATES = (
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
    "reset_weights",
)
"""Methods of vLLM's `Worker` that change weights; a version may lack some of them.

`reset_weights` sets them to zero, for a check that the next update replaces all of them.
"""


class WorkerUpdates:
    """Counts the steps of updates in this process since the first call of `watch`."""

    def __init__(self) -> None:
        self.begun = 0
        self._watched: set[str] = set()

    def watch(self, worker: type[Any]) -> None:
        """Count the calls that change weights, of all workers of this class.

        May be called again, always with the same class. A call counts before it begins: no step of
        the engine runs beside it.
        """
        for name in UPDATES:
            if name not in self._watched and hasattr(worker, name):
                self._watched.add(name)
                setattr(worker, name, self._counting(getattr(worker, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **options: Any) -> Any:
            self.begun += 1
            return method(*args, **options)

        return counted


_updates = WorkerUpdates()


def watch() -> WorkerUpdates:
    """Count the updates of this process's workers from now on; return the counter."""
    from vllm.v1.worker.gpu_worker import Worker  # the base class of those on CPUs and XPUs, too

    _updates.watch(Worker)
    return _updates
