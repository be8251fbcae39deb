"""The prefill queue of an engine: what it computes, and loads, before a request gets its turn.

Computing a prompt waits for this prefill, and fetching it does not: the node's planner weighs the
two (`plan.planner`). The queue is counted when the node is asked, and once more when the engine
decides about the request: it is short by then, or the engine would not have come to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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


def queue_ahead(
    prefills: Iterable[tuple[int, int]], loads: Iterable[Mapping[str, int]]
) -> EngineQueue:
    """Return the queue made of the requests ahead.

    `prefills`: for each, the prompt's tokens, and those of them that need no computing. `loads`:
    blocks by tier, for each load that begins with this step.
    """
    tokens, pairs = 0, 0.0
    for prompt, start in prefills:
        new = prompt - start
        if new > 1:  # not a request that decodes
            tokens += new
            pairs += new * (start + new / 2)
    to_load = Counter[str]()
    for sources in loads:
        to_load.update(sources)
    return EngineQueue(tokens, pairs, dict(to_load))
