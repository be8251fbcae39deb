"""The recent requests of a node, and what stores of other capacities would have hit of them.

The hits are those of an exact LRU store, by the code of `holdfast sim` (`plan.curve`). The engines'
own caches are not counted: a block that an engine has counts like any other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.plan.curve import curve
from holdfast.plan.reuse import Ints, Longs
from holdfast.status import CurveStatus, TierCurve

ACCESSES_MAX = 1 << 20
"""Maximum block accesses that are remembered, 16 bytes each."""

REQUESTS_MAX = 1 << 15
"""Maximum requests that are remembered."""

MULTIPLES = 0.5, 1.0, 2.0, 10.0
"""Multiples of a tier's present capacity at which hits are computed."""

_WORDS = KEY_BYTES // 8


class RecentRequest(NamedTuple):
    """One request: its arrival in seconds, prompt tokens, sizes of a block, and packed keys."""

    at_s: float
    tokens: int
    block_tokens: int
    slot_bytes: int
    keys: bytes

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def ids(self) -> Longs:
        """Return the first eight bytes of each key: enough to tell a million keys apart."""
        return np.frombuffer(self.keys, np.int64)[::_WORDS]


class RequestBlocks(NamedTuple):
    """Requests as `plan.curve` takes them; see `BlockAccesses`."""

    block_tokens: int
    input_tokens: Longs
    starts: Longs
    ids: Ints

    @property
    def requests(self) -> int:
        return len(self.input_tokens)

    @property
    def unique(self) -> int:
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @property
    def blocks(self) -> int:
        return len(self.ids)


class RecentRequests:
    """The last requests of a node, at most `accesses_max` block accesses of them; thread-safe."""

    def __init__(self, accesses_max: int = ACCESSES_MAX) -> None:
        self._lock = threading.Lock()
        self._accesses_max = accesses_max
        self._accesses = 0
        self._requests = deque[RecentRequest]()

    def note(self, namespace: Namespace, keys: bytes, tokens: int, at_s: float) -> None:
        """Remember a request by the packed keys of its full blocks; forget the oldest ones.

        Keeps `keys` without a copy: a lookup waits for this.
        """
        kept = keys[: self._accesses_max * KEY_BYTES]
        sizes = namespace.block_tokens, namespace.slot_bytes
        with self._lock:
            request = RecentRequest(at_s, tokens, *sizes, kept)
            self._requests.append(request)
            self._accesses += request.blocks
            while self._accesses > self._accesses_max or len(self._requests) > REQUESTS_MAX:
                self._accesses -= self._requests.popleft().blocks

    def curve(self, capacities: Mapping[str, int]) -> CurveStatus:
        """Return the hits at `MULTIPLES` of each tier's capacity in bytes.

        Requests with another block size than that of most block accesses are left out.
        """
        with self._lock:
            recent = list(self._requests)
        by_size: dict[int, int] = {}
        for one in recent:
            by_size[one.block_tokens] = by_size.get(one.block_tokens, 0) + one.blocks
        if not by_size:
            return CurveStatus()
        size = max(by_size, key=lambda block_tokens: by_size[block_tokens])
        kept = [one for one in recent if one.block_tokens == size]
        counts = np.array([one.blocks for one in kept], np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        ids = np.unique(np.concatenate([one.ids() for one in kept]), return_inverse=True)[1]
        tokens = np.array([one.tokens for one in kept], np.int64)
        blocks = RequestBlocks(size, tokens, starts, ids.astype(np.int32))
        found = curve(blocks)
        slot_bytes = np.array([one.slot_bytes for one in kept], np.int64)
        block_bytes = float(counts @ slot_bytes) / max(1, blocks.blocks)
        tiers = [
            TierCurve(
                tier,
                capacity,
                {
                    f"{multiple:g}": found.token_hit(int(multiple * capacity / block_bytes))
                    for multiple in MULTIPLES
                },
            )
            for tier, capacity in capacities.items()
            if capacity and block_bytes
        ]
        return CurveStatus(
            requests=len(kept),
            span_s=kept[-1].at_s - kept[0].at_s,
            tokens=int(tokens.sum()),
            accesses=blocks.blocks,
            unique_blocks=blocks.unique,
            block_tokens=size,
            block_bytes=block_bytes,
            unlimited=found.token_hit(blocks.unique),
            left_out=len(recent) - len(kept),
            tiers=tiers,
        )
