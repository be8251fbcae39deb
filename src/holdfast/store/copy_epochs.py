"""The epoch of the data key that each copy below the host is sealed with, by row and tier.

A copy whose key was destroyed cannot be opened. The record's header names the epoch, but reading
every header of a tier takes minutes, so the epoch is kept here: 4 bytes for each row and tier.
"""

from __future__ import annotations

from array import array

UNKNOWN = 0
"""The copy is not sealed, or another node sealed it: epochs count from 1."""


class CopyEpochs:
    """Epochs of the copies on `tiers` lower tiers, the first below the host being 1.

    Not thread-safe: the store calls it under its lock. The entry of a row holds until another copy
    is noted there, so ask only about copies that the index has.
    """

    def __init__(self, tiers: int) -> None:
        self._epochs = [array("I") for _ in range(tiers)]

    def note(self, row: int, tier: int, epoch: int) -> None:
        """Record the epoch of a copy that was just published."""
        epochs = self._epochs[tier - 1]
        if row >= len(epochs):
            if epoch == UNKNOWN:
                return
            epochs.extend([UNKNOWN] * (row + 1 - len(epochs)))
        epochs[row] = epoch

    def of(self, row: int, tier: int) -> int:
        """Return the epoch of the copy that the index has of a row on a tier."""
        epochs = self._epochs[tier - 1]
        return epochs[row] if row < len(epochs) else UNKNOWN
