"""The store: a ladder of tiers with an index, a planner and policies.

Contexts are saved to it and fetched from it in this process; `holdfast serve` puts the same object
behind a socket. Thread-safe. `cover`, `reserve`, `release` and `abort` only change state and return
at once; `fetch` and `commit` move and check bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Concatenate, ParamSpec, Self, TypeVar

import msgspec

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import LayoutSlice
from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import WHOLE
from holdfast.errors import NotFollowed, Outcome, StoreClosedError
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.named_blocks import NamedSession
from holdfast.policy.retention import Retention
from holdfast.session import Session, check_session
from holdfast.status import MemoryStatus, NodeStatus, PlansStatus
from holdfast.store import domains as domain_keys
from holdfast.store import (
    durable,
    group_lookup,
    hints,
    indexed_blocks,
    lookup,
    media,
    page_locks,
    peer_requests,
    public_domain,
    reported_records,
)
from holdfast.store import fetch as fetch_path
from holdfast.store import find as finding
from holdfast.store import inspect as inspection
from holdfast.store import receive as receiving
from holdfast.store import save as save_path
from holdfast.store import scrub as scrubbing
from holdfast.store.activity import PromptCounts
from holdfast.store.call_threads import CallHandle
from holdfast.store.copy_events import CopyListener
from holdfast.store.core import StoreParts
from holdfast.store.estimates import EngineId, EngineStep
from holdfast.store.estimates_file import EstimatesFile
from holdfast.store.fetch import FetchResult
from holdfast.store.named_blocks import EmbeddedNamedSession
from holdfast.store.options import StoreOptions
from holdfast.store.plan_log import PlanEnding
from holdfast.store.prefault import ArenaPrefault
from holdfast.store.probe_tiers import probe_tier, unmeasured_tiers
from holdfast.store.receive import ReceiveSlot
from holdfast.store.record_reader import RecordForm
from holdfast.store.save import ChainRun, SaveSlots
from holdfast.store.scrub import Scrubber
from holdfast.store.session import EmbeddedSession
from holdfast.store.shared_ring import SharedRing
from holdfast.tiers.base import NOWHERE, Lockable, Tier
from holdfast.wire.remote.expiry import credential_states

_HOUSEKEEPING_S = 0.5
_CHECK_S = 0.05
_SAVE_ESTIMATES_S = 30.0

CLOSE_WRITE_S = 10.0
"""Longest time that `close`, also at exit, writes blocks that wait to be written."""

CLOSE_STOP_S = 10.0
"""Longest time that `close` waits for threads and tiers besides."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger("holdfast.store")


def _while_open(
    work: Callable[Concatenate[Store, _P], _T],
) -> Callable[Concatenate[Store, _P], _T]:
    """Make a method: it runs on the store's threads, and raises StoreClosedError once closed.

    `work` is a function of a module of the read or save path, which documents it, or a method.
    """

    @functools.wraps(work)
    def method(self: Store, /, *args: _P.args, **named: _P.kwargs) -> _T:
        self._check_open()
        return self.calls.run(partial(work, self, *args, **named))

    return method


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
        self.shared_ring = SharedRing(self, self._promote_public)
        self._public_is_cold = False
        """Whether the public domain's blocks must be promoted to memory."""
        self._probed_tiers = set[int]()
        self._save_estimates_at = self.clock.now() + _SAVE_ESTIMATES_S
        self._prefault = ArenaPrefault(self.table)
        self._files = FairThreads(1, 0, "holdfast-files")
        self._files_kept: Future[None] | None = None
        self._failed_parts: dict[int, str] = {}
        self._failed_files: dict[int, str] = {}
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
        self._estimates_file.load()
        self._prefault.start()
        inspection.load_drops(self)
        durable.load_marks(self)
        self.recovery.start()
        if self.table.lower:
            self.mover.start()
        self._promote_public()
        self._housekeeper.start()
        self.scrubber.start()
        _open_stores.add(self)

    def session(
        self,
        fingerprint: Fingerprint,
        domain: str = "default",
        layout_slice: LayoutSlice | None = None,
    ) -> Session:
        """Return the store in terms of tokens and blocks, for one fingerprint in one domain.

        `layout_slice`: the heads and layers of portable blocks that the session writes and reads;
        by default all of them.
        """
        self._check_open()
        check_session(fingerprint, domain, layout_slice)
        return Session(EmbeddedSession(self, fingerprint, domain, layout_slice))

    def named_session(self, fingerprint: Fingerprint, domain: str = "default") -> NamedSession:
        """Return the blocks of a fingerprint in a domain that an engine names by its own hashes."""
        self._check_open()
        return NamedSession(EmbeddedNamedSession(self, fingerprint, domain), fingerprint)

    cover = _while_open(lookup.cover)
    find = _while_open(finding.find)
    look = _while_open(lookup.look)
    asks = _while_open(lookup.asks)
    pending = _while_open(lookup.pending)
    plan_fetch = _while_open(lookup.plan_fetch)
    look_groups = _while_open(group_lookup.look_groups)
    plan_groups = _while_open(group_lookup.plan_groups)

    @_while_open
    def learn(
        self,
        engine: EngineId,
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
            if delivery := self.plan_log.ended(engine, ending):
                self.estimates.delivered(engine, *delivery)
        for number, why, first_token_s in not_followed:
            self.plan_log.not_followed(engine, number, why, first_token_s)
        self.estimates.update_fits()
        lookup.probe(self)

    def fetch(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> FetchResult:
        """Bring blocks into the arena, verified and leased; see `holdfast.store.fetch`."""
        return self._fetch(partial(fetch_path.fetch, self, namespace, keys, deadline_s))

    def fetch_unverified(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        deadline_s: float,
        priority: Priority = Priority.DEMAND,
    ) -> FetchResult:
        """Like `fetch`, for another node: the records may be encoded, and it verifies them."""
        kind = fetch_path.FetchKind(priority, RecordForm.STORED)
        return self._fetch(
            partial(fetch_path.fetch_unverified, self, namespace, keys, deadline_s, kind)
        )

    def reserve(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        parent: bytes,
        depth: int,
        segment: bytes = b"",
    ) -> SaveSlots:
        """Reserve slots to fill; see `holdfast.store.save`."""
        return self.reserve_part(namespace, ChainRun(keys, parent, depth, segment), WHOLE)

    def reserve_part(self, namespace: Namespace, run: ChainRun, part: bytes) -> SaveSlots:
        """Reserve slots of which this writer fills a part, and others the rest."""
        handle: CallHandle[SaveSlots] = CallHandle(
            lambda reserved: save_path.abort(self, reserved.ticket)
        )
        work = partial(save_path.reserve, self, namespace, run, part)
        closed = SaveSlots(0, [int(NOWHERE)] * len(run.keys), Outcome.GONE)
        return self._call(work, handle) or closed

    def commit(self, reservation: int, retention: Retention = Retention.SESSION) -> int:
        """Pack and publish filled slots; return how many blocks are new."""
        return self._call(partial(save_path.commit, self, reservation, retention)) or 0

    has_public_copies = _while_open(public_domain.has_public_copies)
    copy_public = _while_open(public_domain.copy_public)
    follow = _while_open(hints.follow)
    closed = _while_open(hints.closed)
    returns = _while_open(hints.returns)
    prestage = _while_open(hints.prestage)
    pin = _while_open(hints.pin)
    sync = _while_open(durable.sync)

    def abort(self, reservation: int, *, rest_s: float = 0.0) -> None:
        """Free a reservation's slots, after a delay if its writer may still be alive."""
        self._call(partial(save_path.abort, self, reservation, rest_s=rest_s))

    def release(self, lease: int) -> bool:
        """End a lease; False: it had ended before, and what was copied under it is not valid."""
        return self._call(partial(super().release, lease)) or False

    held = _while_open(peer_requests.held)
    note_indexed = _while_open(indexed_blocks.note)
    use = _while_open(peer_requests.use)

    receive_slots = _while_open(receiving.receive_slots)

    def publish_received(
        self, slots: Sequence[ReceiveSlot], announced: bytes = b""
    ) -> list[Outcome]:
        """Verify and publish the records received; see `holdfast.store.receive`."""
        publish = partial(receiving.publish_received, self, slots, announced)
        return self._call(publish) or [Outcome.GONE] * len(slots)

    def discard_received(self, slots: Sequence[ReceiveSlot]) -> None:
        """Free slots that were not filled, and to which the caller does not write any more."""
        self._call(partial(receiving.discard_received, self, slots))

    check_suspects = _while_open(reported_records.check_suspects)

    def subscribe(self, listener: CopyListener) -> None:
        """Call a listener with every later change of a copy's state; see `store.copy_events`.

        Hold `table.lock` around this call and a look at what is held, to miss nothing between.
        """
        self._check_open()
        with self.table.lock:
            self.table.copies.events.subscribe(listener)

    def unsubscribe(self, listener: CopyListener) -> None:
        """Call a listener with no later change; events recorded before may still come."""
        with self.table.lock:
            self.table.copies.events.unsubscribe(listener)

    @_while_open
    def plans(self) -> PlansStatus:
        """Return the last plans, newest first, and the estimates behind them."""
        return msgspec.structs.replace(
            self.plan_log.status(),
            tiers=self.estimates.tier_speeds(),
            engines=self.estimates.engine_speeds(),
        )

    @_while_open
    def status(self) -> NodeStatus:
        """Return usage, counters and the state of recovery."""
        memory = MemoryStatus(
            capacity_bytes=self.host_bytes,
            resident_bytes=sum(host.resident_bytes() for host in self.table.all_hosts()),
            reclaimed_bytes=self._prefault.reclaimed_bytes,
        )
        return msgspec.structs.replace(
            inspection.status(self),
            memory=memory,
            page_locks=page_locks.status(self),
            scrub=self.scrubber.status(),
            credentials=credential_states(self.options.credentials),
        )

    forget = _while_open(inspection.forget)
    listing = _while_open(inspection.listing)
    list_keys = _while_open(inspection.list_keys)
    shared = _while_open(inspection.shared)
    would_drop = _while_open(inspection.would_drop)
    drop = _while_open(inspection.drop)
    verify = _while_open(scrubbing.scrub)

    would_lose = _while_open(media.would_lose)
    detach_medium = _while_open(media.detach)
    replace_medium = _while_open(media.replace)

    domains = _while_open(domain_keys.listing)
    rotate = _while_open(domain_keys.rotate)
    would_retire = _while_open(domain_keys.would_retire)
    retire = _while_open(domain_keys.retire)
    would_erase = _while_open(domain_keys.would_erase)
    erase = _while_open(domain_keys.erase)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, write_s: float = CLOSE_WRITE_S) -> None:
        """Write queued blocks for at most `write_s`, stop the threads, close the tiers.

        Returns within `write_s` and `CLOSE_STOP_S` more, whatever a tier does. It can be called
        again, also after an exception interrupted it. From the call on, nothing is accepted:
        `fetch`, `reserve` and `publish_received` answer GONE, `commit` returns 0, `release` returns
        False, `abort` and `discard_received` do nothing; other methods raise StoreClosedError.
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

    def _fetch(self, work: Callable[[], FetchResult]) -> FetchResult:
        handle: CallHandle[FetchResult] = CallHandle(
            lambda fetched: StoreParts.release(self, fetched.lease)
        )
        return self._call(work, handle) or FetchResult(0, [], {}, Outcome.GONE, self.gone)

    def _call(self, work: Callable[[], _T], handle: CallHandle[_T] | None = None) -> _T | None:
        """Run work on the store's threads; None, if the store is closed before it begins."""
        if self.gone:
            return None
        try:
            result = self.calls.run(work, handle)
        except StoreClosedError:  # closed since the check
            return None
        if handle is not None:
            handle.take()
        return result

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
            self.mover.give_up,
            partial(self.lookups.shutdown, cancel_futures=True),
            partial(self.background.shutdown, cancel_futures=True),
            partial(self.mover.close, write_s),
            partial(self._files.shutdown, cancel_futures=True),
            partial(inspection.finish_drops, self),
            self._estimates_file.save,
            partial(durable.save_marks, self),
            partial(self.flushes.shutdown, cancel_futures=True),
            self.table.copies.events.close,
            *(tier.close for tier in lower),
            *(host.close for host in hosts),
            partial(self.audit.catch_up, whole=True),
        ]
        _run_each(steps, "a part of the store could not be closed", {})
        _open_stores.discard(self)
        self._is_over = True
        self._over.release()

    def give_up_hung_calls(self, number: int) -> None:
        """As `StoreParts.give_up_hung_calls`, with the scrub's read."""
        super().give_up_hung_calls(number)
        self.scrubber.give_up_hung_call()

    def _run_housekeeping(self) -> None:
        while True:
            try:
                write_s = self._close_asked.get(timeout=_HOUSEKEEPING_S)
            except Empty:
                self._housekeep_once()
            else:
                self._tear_down(write_s)
                return

    def _start_in_background(self, work: Callable[[], object]) -> bool:
        """Run work on the background thread; False if it cannot be started, as at exit."""
        try:
            self.background.run_unawaited(WorkItem(b""), work)
        except RuntimeError:
            return False
        return True

    def _promote_public(self) -> None:
        """Have the public domain's blocks promoted to memory, once recovery is over."""
        self._public_is_cold = True

    def _housekeep_once(self) -> None:
        """Run every part of housekeeping, even if another part fails."""
        parts: list[Callable[[], object]] = [
            self.housekeep,
            partial(media.restore_files, self),
            self.recovery.recover_replaced,  # after what the former medium held is forgotten
            self.audit.start_catch_up,
            self.shared_ring.follow,
            self._warm_public,
            self._keep_durable,
            partial(hints.start_prestages, self),
            self._probe_tiers,
            self._start_keeping_files,
        ]
        _run_each(parts, "housekeeping failed in part; it goes on", self._failed_parts)

    def _warm_public(self) -> None:
        if self._public_is_cold and self.recovery.seconds is not None:
            warm = partial(public_domain.warm, self)
            self._public_is_cold = not self._start_in_background(warm)

    def _keep_durable(self) -> None:
        if not self.recovery.is_running:
            durable.await_marked(self)

    def _start_keeping_files(self) -> None:
        """Write the small files on a thread of its own, because their drive may hang."""
        if self._files_kept is not None and not self._files_kept.done():
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started, as at exit
            self._files_kept = self._files.submit(WorkItem(b""), self._keep_files)

    def _keep_files(self) -> None:
        parts: list[Callable[[], object]] = [
            partial(inspection.finish_drops, self),
            partial(durable.save_marks, self),
            self._save_estimates,
        ]
        failure = "a file of the store could not be kept; it is tried again"
        _run_each(parts, failure, self._failed_files)

    def _probe_tiers(self) -> None:
        for number in set(unmeasured_tiers(self)) - self._probed_tiers:
            if self._start_in_background(partial(probe_tier, self, number)):
                self._probed_tiers.add(number)

    def _save_estimates(self) -> None:
        if self.clock.now() >= self._save_estimates_at:
            self._estimates_file.save()
            self._save_estimates_at = self.clock.now() + _SAVE_ESTIMATES_S


def _run_each(parts: Sequence[Callable[[], object]], failure: str, failed: dict[int, str]) -> None:
    """Run every part, and log `failure` for each that raises.

    `failed`: by the number of a part, the error of its last run. A part that fails again and again
    for one reason is logged once.
    """
    for number, part in enumerate(parts):
        try:
            part()
        except Exception as error:  # noqa: BLE001  # the other parts must run too
            if failed.get(number) != repr(error):
                failed[number] = repr(error)
                _log.exception(failure)
        else:
            failed.pop(number, None)


_open_stores = set[Store]()
"""Open stores of this process: closed at exit, and given up in a forked child.

The exit hook runs for `sys.exit`, an exception and the end of the main program, not for signals
that end the process at once, `os._exit` or SIGKILL.
"""


def _close_all() -> None:
    for store in list(_open_stores):
        store.close()


def _give_up_copies() -> None:
    for store in list(_open_stores):
        store.give_up_copy()
    _open_stores.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_give_up_copies)
