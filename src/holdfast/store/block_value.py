"""Block value: recompute seconds saved per byte, by namespace, relative to this store's mean."""

from __future__ import annotations

import math

from holdfast.index.residency import Residency
from holdfast.store.estimates import Estimates


class BlockValue:
    """Values blocks for an eviction policy, from the prefill speed that engines report.

    A token of a large model with a small KV cache saves many times more per byte than one of a
    small model with a large KV cache. A namespace whose engines report nothing has value 1.
    """

    def __init__(self, index: Residency, estimates: Estimates) -> None:
        self._index = index
        self._estimates = estimates
        self._known_at = -1
        self._values: dict[int, float] = {}

    def __call__(self, row: int) -> float:
        """Return the value of a row's bytes; the geometric mean of all namespaces is 1."""
        return self._values.get(self._index.namespace_number(row), 1.0)

    def learn(self) -> None:
        """Update the values from new reports; cheap if there are none."""
        known_at = hash((self._estimates.changes, self._index.namespaces_named))
        if known_at == self._known_at:
            return
        self._known_at = known_at
        saved: dict[int, float] = {}
        for number, namespace in enumerate(list(self._index.namespaces)):
            token_s = self._estimates.token_s(namespace.fingerprint.hex(), namespace.domain.hex())
            each = (token_s or 0.0) * namespace.block_tokens / namespace.slot_bytes
            if 0.0 < each < math.inf:  # peers name namespaces, too: one of no tokens saves nothing
                saved[number] = each
        usual = math.exp(sum(map(math.log, saved.values())) / max(len(saved), 1))
        self._values = {number: each / usual for number, each in saved.items()}
