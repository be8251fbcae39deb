"""A tier that injects faults into another: every known kind of fault of a medium."""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.tiers.base import LocalTier, TierGet, TierPut

_SECTOR = 4096


class InjectedFault(enum.StrEnum):
    """Kinds of faults of one record, injected into its read or its write by the end of the name."""

    GONE_READ = "gone_read"
    GONE_WRITE = "gone_write"
    FULL_WRITE = "full_write"
    SHORT_READ = "short_read"
    FLIP_READ = "flip_read"
    FLIP_WRITE = "flip_write"
    TRUNCATED_WRITE = "truncated_write"
    ZEROED_SECTOR_READ = "zeroed_sector_read"
    STALE_READ = "stale_read"
    MISDIRECTED_READ = "misdirected_read"
    MISDIRECTED_WRITE = "misdirected_write"
    DELAY_READ = "delay_read"
    DELAY_WRITE = "delay_write"


EVERY_FAULT: Mapping[InjectedFault, float] = dict.fromkeys(InjectedFault, 0.01)
"""A plan in which each fault has a probability of 1 % per record."""


class FaultyTier:
    """A tier `inner` with random faults: `plan` gives each fault's probability per record.

    `seed` makes the faults repeatable; `injected` counts those that changed something. Damage is
    silent: the outcome is still OK, as it is on a bad medium.
    """

    def __init__(
        self,
        inner: LocalTier,
        seed: int,
        plan: Mapping[InjectedFault, float],
        delay_s: float = 0.001,
    ) -> None:
        self.name = inner.name
        self.inner = inner
        self.injected: Counter[InjectedFault] = Counter()
        self._plan = dict(plan)
        self._random = random.Random(seed)  # noqa: S311 - repeatable faults
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._seen: list[bytes] = []
        # What has no fault of its own.
        self.reserve, self.free = inner.reserve, inner.free
        self.survivors, self.usage, self.close = inner.survivors, inner.usage, inner.close

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        outcomes = [Outcome.GONE] * len(batch)
        passed: list[tuple[int, TierPut]] = []
        for i, put in enumerate(batch):
            fault = self._draw("_write")
            if fault is InjectedFault.GONE_WRITE or fault is InjectedFault.FULL_WRITE:
                outcomes[i] = Outcome.GONE if fault is InjectedFault.GONE_WRITE else Outcome.FULL
                self._count(fault)
                self.inner.free([put.place])
                continue
            record = put.record
            if fault is not None:
                record = aligned_buffer(len(put.record))
                record[:] = put.record
                self._strike(fault, record, HEADER_BYTES)  # a damaged header would not be written
            passed.append((i, TierPut(put.place, record)))
        done = self.inner.write([put for _, put in passed])
        for (i, put), outcome in zip(passed, done, strict=True):
            outcomes[i] = outcome
            # The inner tier stamped the copy; the caller's record must get the same stamp.
            if put.record is not batch[i].record:
                batch[i].record[:16] = put.record[:16]
        return outcomes

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        outcomes = self.inner.read(batch)
        for i, get in enumerate(batch):
            if outcomes[i] is not Outcome.OK:
                continue
            fault = self._draw("_read")
            record = get.into
            with self._lock:  # keep a few records, to return them later as stale or misdirected
                if len(self._seen) < 8:  # noqa: PLR2004 - a few
                    self._seen.append(bytes(record))
                elif self._random.random() < 0.1:  # noqa: PLR2004 - now and then
                    self._seen[self._random.randrange(8)] = bytes(record)
            if fault is InjectedFault.GONE_READ:
                outcomes[i] = Outcome.GONE
                self._count(fault)
            elif fault is not None:
                self._strike(fault, record)
        return outcomes

    def _strike(self, fault: InjectedFault, record: memoryview, start: int = 0) -> None:
        """Delay a read or write, or damage its record from byte `start` on; count what changed."""
        if fault in {InjectedFault.DELAY_READ, InjectedFault.DELAY_WRITE}:
            time.sleep(self._delay_s)
            self._count(fault)
            return
        at, bit, before = start + self._number(len(record) - start), self._number(8), bytes(record)
        match fault:
            case InjectedFault.SHORT_READ:
                record[at:] = b"\xa5" * (len(record) - at)
            case InjectedFault.TRUNCATED_WRITE:
                record[at:] = bytes(len(record) - at)
            case InjectedFault.FLIP_READ | InjectedFault.FLIP_WRITE:
                record[at] ^= 1 << bit
            case InjectedFault.ZEROED_SECTOR_READ:
                sector = at // _SECTOR * _SECTOR
                record[sector : sector + _SECTOR] = bytes(_SECTOR)
            case _:  # stale or misdirected: bytes of another block
                record[start:] = self._other(len(record))[start:]
        if record != before:
            self._count(fault)

    def _draw(self, kind: str) -> InjectedFault | None:
        with self._lock:
            for fault, chance in self._plan.items():
                if fault.endswith(kind) and self._random.random() < chance:
                    return fault
        return None

    def _count(self, fault: InjectedFault) -> None:
        with self._lock:
            self.injected[fault] += 1

    def _number(self, below: int) -> int:
        with self._lock:
            return self._random.randrange(below)

    def _other(self, nbytes: int) -> bytes:
        with self._lock:
            fitting = [record for record in self._seen if len(record) == nbytes]
            return self._random.choice(fitting) if fitting else bytes(nbytes)
