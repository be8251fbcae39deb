"""The backend of named blocks whose store is in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.namespace import Namespace
from holdfast.devices.host import copier
from holdfast.errors import Outcome, StoreClosedError
from holdfast.named_blocks import (
    BlockMemory,
    FoundBlocks,
    KeyedRun,
    LoadedRun,
    check_named,
    memory_of,
    rows_of,
    saved_outcomes,
)
from holdfast.policy.retention import Retention
from holdfast.store import fetch, find, save
from holdfast.store.call_threads import CallHandle
from holdfast.store.core import StoreParts
from holdfast.store.fetch import FetchResult
from holdfast.store.save import ChainRun, SaveSlots

T = TypeVar("T")


class EmbeddedNamedSession:
    """See `holdfast.named_blocks.NamedBackend` and `NamedAccess`; it is both."""

    def __init__(self, store: StoreParts, fingerprint: Fingerprint, domain: str) -> None:
        check_named(fingerprint)
        self._store = store
        self._copy = copier()
        self.domain_key, domain_id = store.domain(domain)
        layout = fingerprint.representation
        self.namespace = Namespace(
            fingerprint.digest(), domain_id, layout.raw_bytes, layout.block_tokens
        )
        store.note_element_bytes(self.namespace, layout.element_bytes)

    def access(self) -> EmbeddedNamedSession:
        if self._store.gone:
            raise StoreClosedError(self._store.gone)
        return self

    def find(self, keys: Sequence[bytes], deadline_s: float) -> FoundBlocks:
        return self._run(partial(find.find, self._store, self.namespace, keys, deadline_s))

    def load(
        self, keys: Sequence[bytes], memory: Sequence[BlockMemory], deadline_s: float
    ) -> LoadedRun:
        store = self._store
        handle: CallHandle[FetchResult] = CallHandle(self._release)
        read = partial(fetch.fetch, store, self.namespace, keys, deadline_s)
        try:
            fetched = self._run(read, handle)
            arena = self._arena() + HEADER_BYTES
            whole = self._copy(
                (to, source, nbytes)
                for place, block in zip(fetched.places, memory, strict=False)
                for source, to, nbytes in rows_of(arena + place, block)
            )
            released = store.calls.run(lambda: all(map(self._release, handle.take())))
        except BaseException:
            store.calls.give_up(handle)
            raise
        if not (whole and released):
            return LoadedRun(0, Outcome.LATE)
        return LoadedRun(len(fetched.places), fetched.outcome)

    def save(
        self, run: KeyedRun, memory: Sequence[BlockMemory], retention: Retention, deadline_s: float
    ) -> list[Outcome]:
        del deadline_s  # memory is copied to memory
        store = self._store
        handle: CallHandle[SaveSlots] = CallHandle(lambda slots: save.abort(store, slots.ticket))
        chain_run = ChainRun(run.keys, run.parent, run.depth, alone=True)
        try:
            slots = self._run(partial(save.reserve, store, self.namespace, chain_run), handle)
            arena = self._arena() + HEADER_BYTES
            whole = self._copy(
                row
                for place, block in zip(slots.places, memory, strict=True)
                if place >= 0
                for row in rows_of(arena + place, block)
            )
            if not whole:
                store.calls.give_up(handle)
                return [Outcome.GONE] * len(run.keys)
            published = self._run(partial(self._commit, handle, retention))
        except BaseException:
            store.calls.give_up(handle)
            raise
        find_again = partial(self.find, run.keys, 0.0)
        return saved_outcomes(slots.places, slots.outcome, published, find_again)

    def close(self) -> None:
        """The store belongs to whoever opened it."""

    def _commit(self, handle: CallHandle[SaveSlots], retention: Retention) -> int:
        return sum(save.commit(self._store, each.ticket, retention) for each in handle.take())

    def _release(self, fetched: FetchResult) -> bool:
        return self._store.release(fetched.lease)

    def _arena(self) -> int:
        """Return the address of the arena."""
        return memory_of(self._store.arena(self.namespace.domain).view)[0][0]

    def _run(self, work: Callable[[], T], handle: CallHandle[T] | None = None) -> T:
        self.access()
        return self._store.calls.run(work, handle)
