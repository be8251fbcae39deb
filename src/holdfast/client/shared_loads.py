"""Loads under way that serve other requests, too: those wait, and find the blocks in the engine.

Requests that share a saved prefix and arrive together would each load it. The engine's own cache
gives the blocks of a load to other requests only after the load has ended. So the first request
loads, and requests for the same blocks wait until its load has landed, has failed, or takes too
long; then each is decided anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.blocks.key import Chain
from holdfast.client.counts import ClientCounts
from holdfast.client.tracked_request import TrackedRequest

LEAST_SHARE = 0.5
"""Share of a request's load that another load must bring, if the request is to wait for it.

A wait for less takes longer than it saves: the request's own load runs beside the other one.
"""


class _RunningLoad(NamedTuple):
    """Leading tokens that a request loads, and the chain that names them."""

    chain: Chain
    tokens: range


@dataclass
class _Wait:
    """A request that waits since `since_s` for `load`, with `local_tokens` in the engine's cache.

    `is_vain`: the load landed, so the request waits no more unless it has more tokens now.
    """

    since_s: float
    local_tokens: int
    load: str = ""
    is_vain: bool = False


class SharedLoads:
    """The loads of an engine that are under way, and the requests that wait for them.

    `whole`: a load serves another request only if all its tokens are a prefix of that request, as
    with windows and recurrent state. `limit_s`: longest wait of a request whose plan has no
    deadline. One thread calls the methods.
    """

    def __init__(self, limit_s: float, counts: ClientCounts, *, whole: bool) -> None:
        self._limit_s = limit_s
        self._counts = counts
        self._whole = whole
        self._loads: dict[str, _RunningLoad] = {}
        self._waits: dict[str, _Wait] = {}

    def begun(self, tracked: TrackedRequest, tokens: range) -> None:
        """Note that a request begins to load these tokens; it waits for no other load."""
        self.left(tracked.request.request_id)
        self._loads[tracked.request.request_id] = _RunningLoad(tracked.chains[0], tokens)

    def ended(self, request_id: str, *, landed: bool) -> None:
        """Note the end of a load, or of its request; `landed`: the engine's cache has its blocks.

        After a load that did not land, one of the requests that waited for it loads next.
        """
        if self._loads.pop(request_id, None) is not None and landed:
            for wait in self._waits.values():
                wait.is_vain |= wait.load == request_id

    def must_wait(self, tracked: TrackedRequest, tokens: range, now_s: float) -> bool:
        """Return whether a request waits for another load before it loads these tokens itself.

        A request that gets no further waits at most for the deadline of its own plan, in all.
        """
        load = self._load_for(tracked, tokens)
        if load is None:
            return False
        name = tracked.request.request_id
        wait = self._waits.get(name)
        if wait is None or tokens.start > wait.local_tokens:
            wait = self._waits[name] = _Wait(now_s, tokens.start)
            self._counts.add("awaited_loads")
        if wait.is_vain or now_s - wait.since_s >= (tracked.deadline_s or self._limit_s):
            return False
        wait.load = load
        return True

    def left(self, request_id: str) -> None:
        """Note that a request was admitted, or ended."""
        self._waits.pop(request_id, None)

    def clear(self) -> None:
        """Forget all loads: no request waits for them any more."""
        self._loads.clear()
        self._waits.clear()

    def _load_for(self, tracked: TrackedRequest, tokens: range) -> str | None:
        """Return the request whose load brings enough of these tokens; None if none does."""
        chain = tracked.chains[0]
        least = tokens.start + math.ceil(LEAST_SHARE * len(tokens))
        for request_id, load in self._loads.items():
            if load.tokens.start <= tokens.start and least <= load.tokens.stop:
                shared = load.tokens.stop if self._whole else least
                block = (shared - 1) // chain.block_tokens
                # A key names the whole prefix up to its block.
                key = load.chain.keys[block : block + 1]
                if key and key == chain.keys[block : block + 1]:
                    return request_id
        return None
