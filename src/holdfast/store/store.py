"""The store: a ladder of tiers with an index, a planner and policies.

Contexts are saved to it and fetched from it in this process; `holdfast serve` puts the same object
behind a socket. Thread-safe. `cover`, `reserve`, `release` and `abort` only change state and return
at once; `fetch` and `commit` move and check bytes.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from holdfast.blocks.envelope import Header
from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.namespace import Namespace
from holdfast.errors import NotFollowed, Outcome, StoreClosedError
from holdfast.fairness.work_slots import Priority
from holdfast.policy.retention import Retention
from holdfast.session import Session
from holdfast.store import domains as domain_keys
from holdfast.store import fetch as fetch_path
from holdfast.store import hints, open_stores, public_domain, reported_records
from holdfast.store import inspect as inspection
from holdfast.store import lookup as coverage
from holdfast.store import receive as receiving
from holdfast.store import save as save_path
from holdfast.store import scrub as scrubbing
from holdfast.store.activity import PromptCounts
from holdfast.store.call_threads import CallHandle
from holdfast.store.core import StoreParts
from holdfast.store.estimates import EngineCosts, EngineStep, PlanEnding
from holdfast.store.estimates_file import EstimatesFile
from holdfast.store.fetch import FetchResult
from holdfast.store.lookup import HeldPrefix, PlannedFetch, PromptTokens
from holdfast.store.options import StoreOptions
from holdfast.store.prefault import ArenaPrefault
from holdfast.store.probe_tiers import probe_tier, unmeasured_tiers
from holdfast.store.receive import ReceiveSlot
from holdfast.store.save import SaveSlots
from holdfast.store.scrub import EVERYTHING, Scrubber, ScrubRequest
from holdfast.store.session import EmbeddedSession
from holdfast.tiers.base import NOWHERE, Lockable, Tier

_HOUSEKEEPING_S = 0.5
_CHECK_S = 0.05
_KEEP_ESTIMATES_S = 30.0

CLOSE_WRITE_S = 10.0
"""Longest time that `close`, also at exit, writes blocks that wait to be written."""

CLOSE_STOP_S = 10.0
"""Longest time that `close` waits for threads and tiers besides."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger("holdfast.store")


def _while_open(
    method: Callable[Concatenate[Store, _P], _T],
) -> Callable[Concatenate[Store, _P], _T]:
    """Make a method raise StoreClosedError once the store is closed, and run on its threads."""

    @functools.wraps(method)
    def call(self: Store, /, *args: _P.args, **named: _P.kwargs) -> _T:
        self._check_open()
        return self.calls.run(partial(method, self, *args, **named))

    return call


class Store(StoreParts):
    """Host arenas above `lower` tiers, fastest first. The store owns and closes the tiers."""

    def __init__(
        self,
        host_bytes: int,
        lower: Sequence[Tier],
        domains: Mapping[str, bytes],
        options: StoreOptions | None = None,
    ) -> None:
        super().__init__(host_bytes, lower, domains, options or StoreOptions())
        self._estimates_file = EstimatesFile(self.estimates, self.options.estimates_file)
        self.scrubber = Scrubber(self, self.options.scrub_every_s, self.options.scrub_bytes_per_s)
        self._probed_tiers = set[int]()
        self._keep_at = self.clock.now() + _KEEP_ESTIMATES_S
        self._prefault = ArenaPrefault(self.table)
        self._close_asked: SimpleQueue[float] = SimpleQueue()
        self._torn_down = self._is_over = False
        self._over = threading.Lock()
        """Released once the store is closed; a waiter also checks `_is_over`."""
        self._over.acquire()
        self._opened_in = os.getpid()
        self._housekeeper = threading.Thread(
            target=self._run_housekeeping, name="holdfast-housekeeping", daemon=True
        )

    def start(self) -> None:
        """Start the store's threads: memory, recovery, write-behind, housekeeping."""
        self._estimates_file.recall()
        self._prefault.start()
        self.recovery.start()
        if self.table.lower:
            self.ladder.start()
        self.cold = True
        self._housekeeper.start()
        self.scrubber.start()
        open_stores.add(self)

    def session(self, fingerprint: Fingerprint, domain: str = "default") -> Session:
        """Return the store in terms of tokens and blocks, for one fingerprint in one domain."""
        self._check_open()
        return Session(EmbeddedSession(self, fingerprint, domain))

    @_while_open
    def cover(self, namespace: Namespace, keys: Sequence[bytes]) -> HeldPrefix:
        """Count the leading blocks of a chain that the index knows of, by tier."""
        return coverage.cover(self.table, namespace, keys)

    @_while_open
    def look(self, namespace: Namespace, keys: Sequence[bytes]) -> HeldPrefix:
        """Like `cover`, and ask shared tiers about the rest; waits for them, a bounded time."""
        return coverage.look(self.table, namespace, keys)

    @_while_open
    def asks(self, namespace: Namespace, keys: Sequence[bytes]) -> bool:
        """Return whether `look` would ask a shared tier about blocks unknown to the index."""
        return coverage.asks(self.table, namespace, keys)

    @_while_open
    def plan_fetch(
        self, namespace: Namespace, keys: Sequence[bytes], prompt: PromptTokens
    ) -> PlannedFetch:
        """Plan what of a prompt is worth fetching; see `holdfast.store.lookup`."""
        return coverage.plan_fetch(self, namespace, keys, prompt)

    @_while_open
    def learn(
        self,
        engine: EngineCosts,
        steps: Sequence[EngineStep],
        endings: Sequence[PlanEnding],
        not_followed: Sequence[tuple[int, NotFollowed, float]] = (),
        prompts: Sequence[PromptCounts] = (),
    ) -> None:
        """Learn from an engine's report, then do work that would delay a computing engine.

        `not_followed`: a plan that was not carried out, why not, seconds until the first token.
        `prompts`: those that the engine admitted, to count them.
        """
        for prompt in prompts:
            self.activity.prompt(prompt)
        if steps:
            self.estimates.computed(engine, steps)
        for ending in endings:
            self.estimates.ended(engine, ending)
        for number, why, first_token_s in not_followed:
            self.estimates.not_followed(engine, number, why, first_token_s)
        self.estimates.settle()
        coverage.probe(self)

    def fetch(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> FetchResult:
        """Bring blocks into the arena, verified and leased; see `holdfast.store.fetch`."""
        if self.gone:
            return FetchResult(0, [], {}, Outcome.GONE, self.gone)
        handle = CallHandle(self._end_lease)
        self.calls.run(partial(fetch_path.fetch, self, namespace, keys, deadline_s), handle)
        return handle.given.pop()  # type: ignore[no-any-return]  # a `FetchResult`

    def fetch_unverified(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        deadline_s: float,
        priority: Priority = Priority.DEMAND,
    ) -> FetchResult:
        """Like `fetch`, for a caller that verifies every record itself."""
        if self.gone:
            return FetchResult(0, [], {}, Outcome.GONE, self.gone)
        handle = CallHandle(self._end_lease)
        self.calls.run(
            partial(fetch_path.fetch_unverified, self, namespace, keys, deadline_s, priority),
            handle,
        )
        return handle.given.pop()  # type: ignore[no-any-return]  # a `FetchResult`

    def reserve(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        parent: bytes,
        depth: int,
        segment: bytes = b"",
    ) -> SaveSlots:
        """Reserve slots to fill; see `holdfast.store.save`."""
        if self.gone:
            return SaveSlots(0, [int(NOWHERE)] * len(keys), Outcome.GONE)
        handle = CallHandle(self._abort)
        work = partial(save_path.reserve, self, namespace, keys, parent, depth, segment)
        self.calls.run(work, handle)
        return handle.given.pop()  # type: ignore[no-any-return]  # a `SaveSlots`

    def commit(self, reservation: int, retention: Retention = Retention.SESSION) -> int:
        """Pack and publish filled slots; return how many blocks are new."""
        if self.gone:
            return 0
        return self.calls.run(partial(save_path.commit, self, reservation, retention))

    @_while_open
    def has_public_copies(
        self, namespace: Namespace, keys: Sequence[bytes], common: Sequence[bytes]
    ) -> bool:
        """Return whether the public domain holds more of a chain in memory than the reader's."""
        return public_domain.has_public_copies(self, namespace, keys, common)

    @_while_open
    def copy_public(
        self, namespace: Namespace, keys: Sequence[bytes], common: Sequence[bytes]
    ) -> int:
        """Copy what the public domain holds of a chain; return how many blocks are new."""
        return public_domain.copy_public(self, namespace, keys, common)

    @_while_open
    def follow(self, namespace: Namespace, session: str, keys: Sequence[bytes]) -> None:
        """Record the chain that a session uses; see `holdfast.store.hints`."""
        hints.follow(self, namespace, session, keys)

    @_while_open
    def closed(self, domain: bytes, session: str) -> int:
        """Record that a session is over; return how many of its blocks are here."""
        return hints.closed(self, domain, session)

    @_while_open
    def returns(self, domain: bytes, session: str, in_s: float) -> int:
        """Record when a session comes back; return how many of its blocks are held."""
        return hints.returns(self, domain, session, in_s)

    @_while_open
    def prestage(self, namespace: Namespace, keys: Sequence[bytes], in_s: float) -> int:
        """Have a chain in memory in `in_s` seconds; return how many of its blocks will be."""
        return hints.prestage(self, namespace, keys, in_s)

    @_while_open
    def pin(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float) -> int:
        """Keep a chain in memory for `ttl_s`; return how many of its blocks are."""
        return hints.pin(self, namespace, keys, ttl_s)

    def abort(self, reservation: int, *, rest_s: float = 0.0) -> None:
        """Free a reservation's slots, after a delay if its writer may still be alive."""
        if not self.gone:
            self.calls.run(partial(save_path.abort, self, reservation, rest_s=rest_s))

    def release(self, lease: int) -> bool:
        """End a lease; False: it had ended before, and what was copied under it is not valid."""
        return not self.gone and self.calls.run(partial(super().release, lease))

    @_while_open
    def held(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key, in any order: 1 if the block is held, on whatever tier."""
        with self.table.lock:
            return self.table.index.held(namespace, keys)

    @_while_open
    def receive_slots(self, headers: Sequence[Header]) -> list[ReceiveSlot]:
        """Reserve slots for records from another node; see `holdfast.store.receive`."""
        return receiving.receive_slots(self, headers)

    def publish_received(
        self, slots: Sequence[ReceiveSlot], announced: bytes = b""
    ) -> list[Outcome]:
        """Verify and publish the records received; see `holdfast.store.receive`."""
        if self.gone:
            return [Outcome.GONE] * len(slots)
        return self.calls.run(partial(receiving.publish_received, self, slots, announced))

    def discard_received(self, slots: Sequence[ReceiveSlot]) -> None:
        """Free slots that were not filled, and to which the caller does not write any more."""
        if not self.gone:
            self.calls.run(partial(receiving.discard_received, self, slots))

    @_while_open
    def lease(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float) -> int:
        """Lease the leading run that is in memory for `ttl_s`; return its length."""
        return receiving.lease(self, namespace, keys, ttl_s)

    @_while_open
    def forget(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Forget these blocks on all tiers; return how many were held."""
        return inspection.forget(self, namespace, keys)

    @_while_open
    def check_suspects(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Delete those of these blocks that fail a check without a key; return how many did."""
        return reported_records.check_suspects(self, namespace, keys)

    @_while_open
    def status(self) -> dict[str, Any]:
        """Return fill, speed, counters and recovery as plain data."""
        memory = {
            "capacity_bytes": self.host_bytes,
            "resident_bytes": sum(host.resident_bytes() for host in self.table.all_hosts()),
            "reclaimed_bytes": self._prefault.reclaimed_bytes,
        }
        return {**inspection.status(self), "memory": memory, "scrub": self.scrubber.status()}

    @_while_open
    def listing(self) -> list[dict[str, Any]]:
        """Return what is stored, by fingerprint and domain, with blocks and bytes per tier."""
        return inspection.listing(self)

    @_while_open
    def shared(self) -> dict[str, Any]:
        """Return what each shared tier reports of its remote side."""
        return inspection.shared(self)

    @_while_open
    def verify(self, request: ScrubRequest = EVERYTHING) -> dict[str, Any]:
        """Read and verify stored copies; drop what fails; see `holdfast.store.scrub`."""
        return scrubbing.scrub(self, request)

    @_while_open
    def drop(self, fingerprint: str) -> dict[str, Any]:
        """Forget the blocks of one fingerprint (hex), or all with `*`; leased ones go last."""
        return inspection.drop(self, fingerprint)

    @_while_open
    def would_drop(self, fingerprint: str) -> dict[str, Any]:
        """Return what `drop` would forget, by fingerprint and domain."""
        return inspection.would_drop(self, fingerprint)

    @_while_open
    def domains(self) -> dict[str, Any]:
        """Return every domain and its epochs as plain data."""
        return domain_keys.listing(self)

    @_while_open
    def rotate(self, name: str) -> dict[str, Any]:
        """Begin another epoch of a domain's data key."""
        return domain_keys.rotate(self, name)

    @_while_open
    def would_retire(self, name: str) -> dict[str, Any]:
        """Return what `retire` would make unreadable; see `holdfast.store.domains`."""
        return domain_keys.would_retire(self, name)

    @_while_open
    def retire(self, name: str, *, allow_loss: bool = False) -> dict[str, Any]:
        """Destroy all data keys of a domain but the newest; refused if blocks need one.

        With `allow_loss`, those blocks leave the index.
        """
        return domain_keys.retire(self, name, allow_loss=allow_loss)

    @_while_open
    def would_erase(self, name: str) -> dict[str, Any]:
        """Return what `erase` would make unreadable; see `holdfast.store.domains`."""
        return domain_keys.would_erase(self, name)

    @_while_open
    def erase(self, name: str) -> dict[str, Any]:
        """Destroy a domain's data keys and forget its blocks; see `holdfast.store.domains`."""
        return domain_keys.erase(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, write_s: float = CLOSE_WRITE_S) -> None:
        """Write queued blocks for at most `write_s`, stop the threads, close the tiers.

        Returns within `write_s` and `CLOSE_STOP_S` more, whatever a tier does. It can be called
        again, also after an exception interrupted it. From the call on, nothing is accepted:
        `fetch` and `reserve` answer GONE, other methods raise StoreClosedError.
        """
        if not self.gone:
            self.gone = "this store is closed; open it again"
        if self._opened_in != os.getpid():
            return
        self._close_asked.put(write_s)
        if self._housekeeper.ident is None:
            self._tear_down(write_s)
        elif self._housekeeper is not threading.current_thread():
            # Not `join`: where a signal interrupts it, CPython 3.11 takes the thread for ended.
            until = time.monotonic() + write_s + CLOSE_STOP_S
            while not self._is_over and time.monotonic() < until:
                self._over.acquire(timeout=_CHECK_S)
            if not self._is_over:
                _log.warning(
                    "closing did not end within %g s; it goes on in the background",
                    write_s + CLOSE_STOP_S,
                )

    def give_up_copy(self) -> None:
        """Make this the closed copy of a store that another process opened; called after `fork`.

        Waits for no lock, because its holder may not exist in this process, and writes nothing.
        The process that opened the store keeps it: the copies of its arenas and locks go.
        """
        self.gone = (
            f"this store was opened by process {self._opened_in}, and this is process "
            f"{os.getpid()}, forked from it; open a store in this process, after the fork"
        )
        self.calls.give_up_copy()
        for host in self.table.all_hosts():
            host.give_up_copy()
        for tier in self.table.lower:
            if isinstance(tier, Lockable):
                tier.give_up_copy()

    def _check_open(self) -> None:
        if self.gone:
            raise StoreClosedError(self.gone)

    def _abort(self, reserved: SaveSlots) -> None:
        save_path.abort(self, reserved.ticket)

    def _end_lease(self, fetched: FetchResult) -> bool:
        return super().release(fetched.lease)

    def _tear_down(self, write_s: float) -> None:
        """Close every part, even if another part fails to close."""
        if self._torn_down:
            return
        self._torn_down = True
        hosts, lower = self.table.all_hosts(), self.table.lower
        steps: list[Callable[[], object]] = [
            partial(self.calls.close, CLOSE_STOP_S / 2),
            self.recovery.close,  # the scrub waits for its end
            self.scrubber.close,
            self._prefault.close,
            self.ladder.give_up,
            partial(self.lookups.shutdown, cancel_futures=True),
            partial(self.background.shutdown, wait=True, cancel_futures=True),
            partial(self.ladder.close, write_s),
            self._estimates_file.keep,
            *(tier.close for tier in (*lower, *hosts)),
            partial(self.audit.catch_up, whole=True),
        ]
        for step in steps:
            try:
                step()
            except Exception:  # noqa: BLE001  # the other parts must be closed too
                _log.exception("a part of the store could not be closed")
        open_stores.discard(self)
        self._is_over = True
        self._over.release()

    def _run_housekeeping(self) -> None:
        while (write_s := self._wait_for_close()) is None:
            try:
                self._housekeep_once()
            except Exception:  # noqa: BLE001  # without this thread no lease would ever end
                if self._accepts_work():
                    _log.exception("housekeeping failed; it goes on")
        self._tear_down(write_s)

    def _accepts_work(self) -> bool:
        """Say whether executors run new work; when a process ends, they refuse it before we close.

        From the end of the main thread until its exit hooks run, the standard library's executors
        raise RuntimeError on submit. `sys.is_finalizing` is still false then.
        """
        try:
            self.background.submit(int)
        except RuntimeError:
            return False
        return True

    def _wait_for_close(self) -> float | None:
        """Return how long the close may write, or None when housekeeping is due."""
        try:
            return self._close_asked.get(timeout=_HOUSEKEEPING_S)
        except Empty:
            return None

    def _housekeep_once(self) -> None:
        self.housekeep()
        self.audit.catch_up()
        domain_keys.follow(self)
        if self.cold and self.recovery.seconds is not None:
            self.cold = False
            self.background.submit(public_domain.warm, self)
        hints.bring_up(self)
        for number in set(unmeasured_tiers(self)) - self._probed_tiers:
            self._probed_tiers.add(number)
            self.background.submit(probe_tier, self, number)
        if self.clock.now() >= self._keep_at:
            self._estimates_file.keep()
            self._keep_at = self.clock.now() + _KEEP_ESTIMATES_S
