"""Sealed records that failed verification by a reader with the key, and their replacement.

Damage to a sealed payload cannot be proved without the key, so such a record is not deleted. It is
marked unverified: the next record of the same block replaces it if it is sealed with the same data
key or with one of a later epoch. A host with another key ring does not report a record, because it
cannot open it, and a record that it writes replaces none.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from holdfast.blocks.envelope import SEAL_NONE, Header, header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.coded import check_reported
from holdfast.errors import Outcome
from holdfast.tiers.base import TierGet

UNVERIFIED_MAX = 4_096
"""Most records marked unverified at a time."""

CHECKED_AT_ONCE = 8
"""Records read again at a time; their buffers are in memory together."""


def may_replace(new: Header, old: Header) -> bool:
    """Return whether a record may replace an unverified one: same data key, or a later epoch's."""
    if SEAL_NONE in (new.seal, old.seal):
        return False
    return (new.epoch, new.key_id) == (old.epoch, old.key_id) or new.epoch > old.epoch


class UnverifiedRecords:
    """Headers of unverified records by block, at most `UNVERIFIED_MAX`. Thread-safe.

    The record that was marked first is dropped first; marking it again does not renew its mark. A
    header is None if only the remote side knows it, or if this build cannot parse it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: OrderedDict[tuple[Namespace, bytes], Header | None] = OrderedDict()

    def add(self, namespace: Namespace, key: bytes, header: Header | None = None) -> None:
        """Mark the held record of a block as unverified."""
        with self._lock:
            self._headers[namespace, key] = header
            if len(self._headers) > UNVERIFIED_MAX:
                self._headers.popitem(last=False)

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether the record of a block is unverified."""
        return bool(self._headers) and (namespace, key) in self._headers

    def is_replaced_by(self, namespace: Namespace, header: Header) -> bool:
        """Return whether a record with this header replaces the unverified one of its block."""
        old = self._headers.get((namespace, header.key)) if self._headers else None
        return old is not None and may_replace(header, old)

    def __len__(self) -> int:
        return len(self._headers)

    def unmark(self, namespace: Namespace, key: bytes) -> None:
        """Remove the mark of a block: its record was replaced."""
        with self._lock:
            self._headers.pop((namespace, key), None)


def check_again(
    read: Callable[[Sequence[TierGet]], list[Outcome]],
    batch: Sequence[TierGet],
    unverified: UnverifiedRecords,
) -> list[TierGet]:
    """Read reported records again; return those with proven damage, mark sealed ones unverified.

    For tiers whose remote side cannot check records.
    """
    damaged: list[TierGet] = []
    for at in range(0, len(batch), CHECKED_AT_ONCE):
        again = [
            get._replace(into=aligned_buffer(len(get.into)))
            for get in batch[at : at + CHECKED_AT_ONCE]
        ]
        for get, outcome in zip(again, read(again), strict=True):
            if outcome is not Outcome.OK:
                continue
            found = check_reported(get.into, get.key, get.namespace)
            if found is Outcome.CORRUPT:
                damaged.append(get)
            elif found is Outcome.UNREADABLE:
                unverified.add(get.namespace, get.key, header_of_record(get.into))
    return damaged
