"""Blocks whose copy on a shared tier failed here, and that are not requested for a while.

A shared tier keeps such a copy if other hosts can read it, and would answer that it holds the
block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome

FAILED_MAX = 65_536
FAILED_S = 60.0
"""Time for which a shared tier is not asked for a block that failed, in seconds."""


class FailedRemote:
    """Failed blocks by tier number, with outcome; at most `FAILED_MAX`. Under the store's lock."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, Namespace, bytes], tuple[float, Outcome]] = (
            OrderedDict()
        )

    def add(
        self, tier: int, namespace: Namespace, key: bytes, outcome: Outcome, now_s: float
    ) -> None:
        """Record a block that was CORRUPT or UNREADABLE."""
        self._blocks.pop((tier, namespace, key), None)
        self._blocks[tier, namespace, key] = now_s + FAILED_S, outcome
        if len(self._blocks) > FAILED_MAX:
            self._blocks.popitem(last=False)

    def why(self, tier: int, namespace: Namespace, key: bytes, now_s: float) -> Outcome:
        """Return the outcome recorded for a block; OK if there is none, or if it is too old."""
        if not self._blocks:
            return Outcome.OK
        until_s, outcome = self._blocks.get((tier, namespace, key), (now_s, Outcome.OK))
        return outcome if now_s < until_s else Outcome.OK

    def readable(self, tier: int, namespace: Namespace, keys: Sequence[bytes], now_s: float) -> int:
        """Return how many leading blocks may be requested."""
        if not self._blocks:
            return len(keys)
        for number, key in enumerate(keys):
            if self.why(tier, namespace, key, now_s) is not Outcome.OK:
                return number
        return len(keys)

    def written(self, tier: int, namespace: Namespace, key: bytes) -> None:
        """Forget a block of which a good copy was written."""
        if self._blocks:
            self._blocks.pop((tier, namespace, key), None)
