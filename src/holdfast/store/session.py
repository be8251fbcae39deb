"""The backend of a session whose store is in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.key import Chain
from holdfast.blocks.layout import LayoutSlice, QuantisedLayout
from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import SliceCopy
from holdfast.codec.pack import payload
from holdfast.errors import Outcome, RefusedError, StoreClosedError
from holdfast.policy.retention import Retention
from holdfast.session import (
    RECOVERING,
    KeyPage,
    Landed,
    name_unanswered,
    nothing_held,
)
from holdfast.store import durable, fetch, hints, inspect, lookup, save
from holdfast.store.activity import PromptCounts
from holdfast.store.call_threads import CallHandle
from holdfast.store.core import StoreParts
from holdfast.store.fetch import FetchResult
from holdfast.store.lookup import LookupResult
from holdfast.store.save import SaveSlots

T = TypeVar("T")

_log = logging.getLogger("holdfast.store")

_Fetched: TypeAlias = tuple[LookupResult, FetchResult]


class EmbeddedSession:
    """See `holdfast.session.SessionBackend`; changes state on threads of the store only."""

    def __init__(
        self,
        store: StoreParts,
        fingerprint: Fingerprint,
        domain: str,
        layout_slice: LayoutSlice | None = None,
    ) -> None:
        self._store = store
        self.slice_copy = SliceCopy(fingerprint.representation.raw_bytes, layout_slice)
        self.domain_key, domain_id = store.domain(domain)
        self.segment_blocks = store.options.segment_blocks
        choice = store.quantise.choose(domain, fingerprint)
        if choice.why and isinstance(fingerprint.representation, QuantisedLayout):
            raise RefusedError(f"quantised blocks: {choice.why}; or name exact ones")
        if choice.why:
            _log.warning("%s", choice.why)
        fingerprint = choice.fingerprint
        layout = fingerprint.representation
        self.namespace = Namespace(
            fingerprint.digest(), domain_id, layout.raw_bytes, layout.block_tokens
        )
        store.quantise.enter(self.namespace, fingerprint)
        store.note_element_bytes(self.namespace, fingerprint.representation.element_bytes)

    def cover(self, keys: Sequence[bytes], deadline_s: float) -> int:
        return self._run(partial(self._ask, keys, deadline_s)).blocks

    def save(self, chain: Chain, rows: Sequence[memoryview], retention: Retention) -> int:
        store, namespace, slice_copy = self._store, self.namespace, self.slice_copy
        handle: CallHandle[SaveSlots] = CallHandle(
            lambda reserved: save.abort(store, reserved.ticket)
        )
        run = save.ChainRun(chain.keys, chain.fingerprint, 0)
        reserve = partial(save.reserve, store, namespace, run, slice_copy.part)
        try:
            reserved = self._run(reserve, handle)
            arena = store.arena(namespace.domain).view
            for place, row in zip(reserved.places, rows, strict=True):
                if place >= 0:
                    slice_copy.write(row, payload(arena[place:], namespace.raw_bytes))
            return self._run(partial(self._commit, handle, retention))
        except BaseException:
            self._store.calls.give_up(handle)
            raise

    def fetch(self, chain: Chain, rows: Sequence[memoryview], deadline_s: float) -> Landed:
        handle = CallHandle(self._release)
        try:
            asked, fetched = self._run(partial(self._fetch, chain, deadline_s), handle)
            arena = self._store.arena(self.namespace.domain).view
            for place, row in zip(fetched.places, rows, strict=False):
                self.slice_copy.read(payload(arena[place:], self.namespace.raw_bytes), row)
            whole = self._store.calls.run(partial(self._end_lease, handle, chain))
        except StoreClosedError as error:
            return Landed(0, 0, {}, Outcome.GONE, str(error))
        except BaseException:
            self._store.calls.give_up(handle)
            raise
        blocks = len(fetched.places)
        if not whole:
            return Landed(0, 0, {}, Outcome.LATE, "the lease ended before the copy did")
        tokens = blocks * self.namespace.block_tokens
        reason = fetched.reason
        if not blocks and not asked.blocks:
            reason = nothing_held(recovering=RECOVERING in reason)
        landed = Landed(tokens, blocks, fetched.sources, fetched.outcome, reason)
        return name_unanswered(landed, asked.unanswered if blocks < len(chain) else {})

    def list_keys(self, start: int, limit: int) -> KeyPage:
        return self._run(partial(inspect.list_keys, self._store, self.namespace, start, limit))

    def follow(self, session: str, keys: Sequence[bytes]) -> None:
        self._run(partial(hints.follow, self._store, self.namespace, session, keys))

    def closed(self, session: str) -> int:
        return self._run(partial(hints.closed, self._store, self.namespace.domain, session))

    def returns(self, session: str, in_s: float) -> int:
        return self._run(partial(hints.returns, self._store, self.namespace.domain, session, in_s))

    def prestage(self, keys: Sequence[bytes], in_s: float, deadline_s: float) -> int:
        prestage = partial(hints.prestage, self._store, self.namespace, keys, in_s, deadline_s)
        return self._run(prestage)

    def pin(self, keys: Sequence[bytes], ttl_s: float, deadline_s: float) -> int:
        return self._run(partial(hints.pin, self._store, self.namespace, keys, ttl_s, deadline_s))

    def sync(self, keys: Sequence[bytes], deadline_s: float) -> int:
        return self._run(partial(durable.sync, self._store, self.namespace, keys, deadline_s))

    def _run(self, work: Callable[[], T], handle: CallHandle[T] | None = None) -> T:
        """Run what reads or changes the store's state; raise StoreClosedError if it is closed."""
        if self._store.gone:
            raise StoreClosedError(self._store.gone)
        return self._store.calls.run(work, handle)

    def _ask(self, keys: Sequence[bytes], deadline_s: float) -> LookupResult:
        store, began_s = self._store, self._store.clock.now()
        asked = lookup.ask_in_time(store, self.namespace, keys, deadline_s)
        self._count(asked, store.clock.now() - began_s)
        return asked

    def _count(self, asked: LookupResult, took_s: float) -> None:
        blocks = asked.blocks
        outcome = Outcome.OK if blocks else Outcome.MISS
        self._store.activity.call("lookup", outcome, took_s, blocks)

    def _commit(self, handle: CallHandle[SaveSlots], retention: Retention) -> int:
        """Commit what a handle holds, if it was not given back."""
        return sum(save.commit(self._store, one.ticket, retention) for one in handle.take())

    def _fetch(self, chain: Chain, deadline_s: float) -> _Fetched:
        """Ask shared tiers, then fetch; the lease is the caller's."""
        began_s = self._store.clock.now()
        asked, left_s = lookup.ask_first(self._store, self.namespace, chain.keys, deadline_s)
        self._count(asked, self._store.clock.now() - began_s)
        return asked, fetch.fetch(self._store, self.namespace, chain.keys, left_s)

    def _end_lease(self, handle: CallHandle[_Fetched], chain: Chain) -> bool:
        """End the lease that a handle holds, and count the prompt; False if it ended before."""
        size = self.namespace.block_tokens
        for answer in handle.take():
            whole = self._release(answer)
            sources = answer[1].sources if whole else {}
            loaded = {tier: blocks * size for tier, blocks in sources.items()}
            self._store.activity.prompt(PromptCounts(len(chain) * size, 0, loaded))
            return whole
        return False

    def _release(self, answer: _Fetched) -> bool:
        return self._store.release(answer[1].lease)
