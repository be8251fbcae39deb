"""The prefill queue of an engine: what it computes, and loads, before a request gets its turn.

Computing a prompt waits for this prefill, and fetching it does not: the node's planner weighs the
two (`plan.planner`). The queue is counted when the node is asked, and once more when the engine
decides about the request: it is short by then, or the engine would not have come to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

MOVED_TOKENS = 256
"""Change of a queue, in tokens, from which on a plan is asked for again."""


class EngineQueue(NamedTuple):
    """Prefill tokens ahead of a request, their token pairs, and blocks to be loaded, by tier.

    `pairs` is the sum of `new * (context + new/2)`. `to_load`: blocks of loads that were decided in
    this step, and that no worker has asked the node for yet.
    """

    tokens: int = 0
    pairs: float = 0.0
    to_load: Mapping[str, int] = MappingProxyType({})

    def has_moved(self, since: EngineQueue) -> bool:
        """Return whether a plan that was made for the queue `since` may be wrong by now."""
        return abs(self.tokens - since.tokens) >= MOVED_TOKENS or dict(self.to_load) != dict(
            since.to_load
        )

    def before_step(self, step_tokens: int) -> EngineQueue:
        """Return what is computed before the step in which the request's turn comes.

        `step_tokens`: prefill tokens of one step; 0: not known. The last step of this queue
        computes the request, too, if it has room for it.
        """
        tokens = self.tokens // step_tokens * step_tokens if step_tokens > 0 else self.tokens
        return self._replace(tokens=tokens, pairs=self.pairs * tokens / max(1, self.tokens))


def queue_ahead(
    prefills: Iterable[tuple[int, int]], loads: Iterable[Mapping[str, int]]
) -> EngineQueue:
    """Return the queue made of the requests ahead.

    `prefills`: for each, the prompt's tokens, and those of them that need no computing. `loads`:
    blocks by tier, for each load that begins with this step.
    """
    queue, to_load = EngineQueue(), Counter[str]()
    for prompt, start in prefills:
        queue = _behind(queue, prompt, start)
    for sources in loads:
        to_load.update(sources)
    return queue._replace(to_load=dict(to_load))


def queues_ahead(
    prefills: Iterable[tuple[str, tuple[int, int]]], wanted: Collection[str]
) -> dict[str, EngineQueue]:
    """Return the queue ahead of each wanted request, without loads.

    `prefills`: all requests by name, in order of arrival; the numbers as for `queue_ahead`.
    """
    queue, found = EngineQueue(), dict[str, EngineQueue]()
    for name, (prompt, start) in prefills:
        if name in wanted:
            found[name] = queue
        queue = _behind(queue, prompt, start)
    return found


def _behind(queue: EngineQueue, prompt: int, start: int) -> EngineQueue:
    """Return the queue behind one more request."""
    new = prompt - start
    if new <= 1:  # a request that decodes
        return queue
    return EngineQueue(queue.tokens + new, queue.pairs + new * (start + new / 2))
