"""What a byte of each world saves: recompute seconds, against what is usual in this store."""

from __future__ import annotations

import math

from holdfast.index.residency import Residency
from holdfast.store.judgement import Judgement


class Worth:
    """Asked by a policy that weighs; learns from what engines told of their prefill.

    A token of a large model with a small KV cache saves many times as much a byte as one of a small
    model with a large one. A world whose engines told nothing is worth what is usual.
    """

    def __init__(self, index: Residency, judgement: Judgement) -> None:
        self._index = index
        self._judgement = judgement
        self._known_at = -1
        self._worths: dict[int, float] = {}

    def __call__(self, row: int) -> float:
        """Return what a byte of a row saves; 1 is usual."""
        return self._worths.get(self._index.world_number(row), 1.0)

    def learn(self) -> None:
        """Take in what engines told since; cheap where they told nothing."""
        known_at = hash((self._judgement.changes, self._index.worlds_named))
        if known_at == self._known_at:
            return
        self._known_at = known_at
        saved: dict[int, float] = {}
        for number, world in enumerate(list(self._index.worlds)):
            token_s = self._judgement.token_s(world.fingerprint.hex(), world.domain.hex())
            each = (token_s or 0.0) * world.block_tokens / world.record_bytes
            if 0.0 < each < math.inf:  # peers name worlds, too: one of no tokens saves nothing
                saved[number] = each
        usual = math.exp(sum(map(math.log, saved.values())) / max(len(saved), 1))
        self._worths = {number: each / usual for number, each in saved.items()}
