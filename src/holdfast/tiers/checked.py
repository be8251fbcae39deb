"""Check the answers of tiers of other packages, bound the wait for them, count their faults.

A store calls a tier that Holdfast does not contain only through this class. An answer of a wrong
type, length or range, and an exception, become the outcome GONE (LATE if the tier is not asked),
count as a fault, and are logged at most once in `LOG_S`. After several faults in a row, or one call
that is too slow, the tier's circuit breaker opens: it is not asked for a while. The tier's status
shows why.

Calls that must not take time (`STATE_S`) run on one thread of the tier, in order, so that their
caller waits for a limited time. The store calls only `free` under its lock, and `free` does not
wait. What is freed while places are reserved is held back (`holding_frees`). Lookups run on threads
of their own. Reads and writes run on the caller's thread: it owns the buffers, and waits in the
background.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.errors import ConfigError, Outcome
from holdfast.status import MemberStatus
from holdfast.tiers.base import (
    NOWHERE,
    Announceable,
    AnsweringTier,
    Candidate,
    Erasable,
    Expiring,
    Flushable,
    HealthReporting,
    HeldAnswer,
    Indexed,
    LocalTier,
    Lockable,
    NamesCandidates,
    Permitted,
    Place,
    PrefersBatches,
    Queryable,
    Reachable,
    Rebalancing,
    RecordsFrees,
    ReservedPlaces,
    SharedTier,
    StopsWrites,
    SurvivingRecord,
    Tier,
    TierGet,
    TierPut,
    TierUsage,
    Volatile,
)
from holdfast.tiers.breaker import BreakerOptions, CallEnding, CircuitBreaker
from holdfast.tiers.tier_answers import (
    TierFaultError,
    flags,
    held_answer,
    listed,
    named_blocks,
    number_up_to,
    outcomes_of,
    reserved_places,
    shown,
    surviving_record,
    typed,
)

STATE_S = 0.5
"""Longest wait for a call that only reads or changes state, in seconds."""

REMOTE_S = 2.5
"""Longest wait for a call that may ask the remote side and moves no record, in seconds."""

LOOKUP_SPARE_S = 0.25
"""Time that a lookup may take beyond its limit before its caller goes on without it, in seconds."""

STALL_S = 10.0
"""Time for which calls wait without any answer until the breaker opens, in seconds."""

LOG_S = 60.0
"""Shortest time between two log lines about faults of one tier, in seconds."""

BATCH_WAIT_S_MAX = 600.0
"""Longest wait of a store for a batch that a tier prefers, in seconds; no wait for more."""

_READ = frozenset(Outcome) - {Outcome.FULL, Outcome.UNSENT}
_WRITTEN = frozenset(Outcome) - {Outcome.MISS}
_OPTIONS = BreakerOptions(stall_s=STALL_S)

_CONTAINED = ("holdfast.tiers.", "holdfast.testing.memory")
"""Modules whose tiers are not checked."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _TooSlowError(TierFaultError):
    """A call that took too long."""


class _NotAskedError(Exception):
    """The breaker is open, so the tier was not asked."""


def checked(tier: Tier, clock: Clock) -> Tier:
    """Return a tier of this package as it is, and a tier of another package behind the checks.

    Raises ConfigError for an object that has not all methods of a `LocalTier` or a `SharedTier`.
    """
    replaced = vars(tier).keys() & {"read", "write", "reserve", "free", "held", "ask"}
    if type(tier).__module__.startswith(_CONTAINED) and not replaced:
        return tier
    if isinstance(tier, Volatile):
        return CheckedVolatileTier(tier, clock)
    if isinstance(tier, LocalTier):
        return CheckedLocalTier(tier, clock)
    if isinstance(tier, SharedTier):
        return CheckedSharedTier(tier, clock)
    methods = set(dir(SharedTier)) if hasattr(tier, "held") else set(dir(LocalTier))
    lacks = sorted(name for name in methods - set(dir(tier)) if not name.startswith("_"))
    raise ConfigError(
        f"tier of type {type(tier).__name__}: it lacks {', '.join(lacks)}; update the package that "
        "offers it, and certify it with holdfast.testing"
    )


def _preferred_batch(tier: Tier) -> tuple[int, float]:
    """Return the batch that a tier prefers, and how long to wait for it; 0 if it prefers none."""
    if not isinstance(tier, PrefersBatches):
        return 0, 0.0
    nbytes, wait_s = tier.batch_bytes, tier.batch_wait_s
    if type(nbytes) is not int or not isinstance(wait_s, int | float):
        return 0, 0.0
    wait_s = float(wait_s) if 0 <= wait_s <= BATCH_WAIT_S_MAX else 0.0
    return max(0, nbytes), wait_s


class _TierThread:
    """One thread on which calls of a tier run in order, each waited for at most a while."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Queue work; return its result to come."""
        future: Future[T] = Future()
        self._queue.put((work, future))
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        return future

    def close(self) -> None:
        """End the thread when all that is queued has run."""
        self._queue.put(None)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            _run_into(*queued)


class CheckedTier:
    """What local and shared tiers of other packages have in common; see `tiers.base`."""

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self.name = tier.name if type(tier.name) is str and tier.name else type(tier).__name__
        self._tier: Any = tier
        self.batch_bytes, self.batch_wait_s = _preferred_batch(tier)
        self._clock = clock
        self._mutex = threading.Lock()
        self._breaker = CircuitBreaker(clock, _OPTIONS, random.Random())  # noqa: S311 - jitter
        self._state = _TierThread(f"holdfast-state-{self.name}")
        self._fault, self._fault_at = "", -math.inf
        self._logged_at = -math.inf
        self._not_logged = 0
        self._usage = TierUsage(0, 0, 0)
        self._freed: Future[None] | None = None
        """The last places that are being freed; the thread frees in order."""
        self._held_frees: list[Place] | None = None
        """Places to free at the end of `holding_frees`; None outside it."""
        self._evicted: set[Place] = set()
        """Places of the blocks that the tier evicted within `holding_frees`."""

    # The promises of `Tier`.

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        try:
            return self._ask("read", lambda: outcomes_of(self._tier.read(batch), batch, _READ))
        except TierFaultError:
            return [Outcome.GONE] * len(batch)
        except _NotAskedError:
            return [Outcome.LATE] * len(batch)

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        try:
            return self._ask("write", lambda: outcomes_of(self._tier.write(batch), batch, _WRITTEN))
        except TierFaultError:
            self._free_unwritten(batch)
            return [Outcome.GONE] * len(batch)
        except _NotAskedError:
            self._free_unwritten(batch)
            return [Outcome.LATE] * len(batch)

    def usage(self) -> TierUsage:
        """Return the tier's last usable report; `writes_stopped` says why it is not asked."""
        answered = True
        try:
            self._usage = self._ask("usage", lambda: typed(self._tier.usage(), TierUsage), STATE_S)
        except (TierFaultError, _NotAskedError):
            answered = False
        with self._mutex:
            if answered and self._breaker.allows():
                return self._usage
            ago_s = self._clock.now() - self._fault_at
        reason = f"{ago_s:.0f} s ago: {self._fault}"
        return msgspec.structs.replace(self._usage, writes_stopped=reason)

    def close(self) -> None:
        try:
            self._tier.close()
        except Exception as error:  # noqa: BLE001  # code of another package
            self._note("close", error)
        self._state.close()

    # Internal.

    def _allows(self) -> bool:
        with self._mutex:
            return self._breaker.allows()

    def _ask(self, method: str, work: Callable[[], T], within_s: float | None = None) -> T:
        """Return the checked answer of a call; count how it ended.

        `within_s` None: on this thread; otherwise on the tier's, and waited for so long. Raises
        TierFaultError after a fault, _NotAskedError if the breaker is open.
        """
        with self._mutex:
            ticket = self._breaker.begin()
        if ticket is None:
            raise _NotAskedError(f"{self.name} is not asked, because {self._fault}")
        ending = CallEnding.ERROR
        try:
            result = work() if within_s is None else self._wait(self._state.start(work), within_s)
            ending = CallEnding.OK
        except Exception as error:  # code of another package
            self._note(method, error)
            raise TierFaultError(self._fault) from error
        finally:
            with self._mutex:
                self._breaker.end(ticket, ending)
        return result

    def _state_of(self, method: str, work: Callable[[], T], otherwise: T) -> T:
        """Return the answer of a call that only reads or changes state; another after a fault."""
        try:
            return self._ask(method, work, STATE_S)
        except (TierFaultError, _NotAskedError):
            return otherwise

    def _wait(self, future: Future[T], within_s: float) -> T:
        """Return a result; if it is late, open the breaker and raise _TooSlowError."""
        try:
            return future.result(within_s)
        except TimeoutError:
            if future.done():  # the tier raised it
                raise
            with self._mutex:
                self._breaker.trip()
            raise _TooSlowError(f"took more than {within_s:.3g} s") from None

    def _note(self, method: str, error: Exception) -> None:
        """Remember a fault as the reason of the breaker's state, and log it now and then."""
        told = str(error) if isinstance(error, TierFaultError) else f"raised {error!r:.200}"
        told = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in told)
        now_s = self._clock.now()
        with self._mutex:
            self._fault, self._fault_at = f"{method}() {told}", now_s
            self._not_logged += 1
            if now_s < self._logged_at + LOG_S:
                return
            self._logged_at, faults, self._not_logged = now_s, self._not_logged, 0
        cause = None if isinstance(error, TierFaultError) else error
        _log.warning(
            "tier %s: %s() %s (faults=%d since the last such line); after %d in a row it is not "
            "asked for a while; update the package that offers it",
            *(self.name, method, told, faults, _OPTIONS.failures),
            exc_info=cause,
        )

    def _free_unwritten(self, batch: Sequence[TierPut]) -> None:
        """Free the places of records that were not written; a shared tier has none."""


class CheckedLocalTier(CheckedTier):
    """A `LocalTier` of another package; it is `Erasable`, `Lockable` and so on at once.

    A method that the tier lacks does nothing, which is what the store would do without it.
    """

    @contextmanager
    def holding_frees(self) -> Iterator[None]:
        """Hold back frees, from before a `reserve` until the store has forgotten what it evicted.

        `reserve` may give the place of an evicted block to a new one. Until the store has forgotten
        the evicted block, a drop of it frees that place, which belongs to the new block. Places of
        evicted blocks are not freed; the others are freed at the end. One thread at a time
        reserves.
        """
        with self._mutex:
            self._held_frees = []
        try:
            yield
        finally:
            with self._mutex:
                held, self._held_frees = self._held_frees, None
                places = [place for place in held if place not in self._evicted]
                self._evicted = set()
                if places:
                    self._free_soon(places)

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        """Reserve within `holding_frees`, on the caller's thread, which holds no lock.

        Places that were freed before are free by then.
        """

        def work() -> ReservedPlaces:
            self._await_frees()
            return reserved_places(self._tier.reserve(sizes), sizes)

        reserved = self._quietly("reserve", work)
        if reserved is None:
            return ReservedPlaces([NOWHERE] * len(sizes), [])
        with self._mutex:
            self._evicted.update(dropped.place for dropped in reserved.dropped)
        return reserved

    def candidates(self, nbytes: int) -> list[Candidate]:
        if not isinstance(self._tier, NamesCandidates):
            return []
        find, none = self._tier.candidates, list[Candidate]()
        return self._state_of("candidates", lambda: named_blocks(find(nbytes), Candidate), none)

    def free(self, places: Sequence[Place]) -> None:
        """Free places soon, and before the next `reserve`, whatever the breaker says."""
        with self._mutex:
            if self._held_frees is None:
                self._free_soon(places)
            else:
                self._held_frees += places

    def _free_soon(self, places: Sequence[Place]) -> None:
        """Queue places to be freed. Call under the mutex, so that `_freed` is the last one."""

        def work() -> None:
            try:
                self._tier.free(places)
            except Exception as error:  # noqa: BLE001  # code of another package
                self._note("free", error)

        self._freed = self._state.start(work)

    def _await_frees(self) -> None:
        """Wait until all places that were freed so far are free; raise _TooSlowError if late."""
        if (freed := self._freed) is not None:
            self._wait(freed, STATE_S)

    def survivors(self) -> Iterator[SurvivingRecord]:
        try:
            survivors = self._tier.survivors()
            if not isinstance(survivors, Iterable):
                raise TierFaultError(f"returned {shown(survivors)}, not an iterator")
            yield from map(surviving_record, survivors)
        except Exception as error:
            self._note("survivors", error)
            raise

    def wipe(self, survivor: SurvivingRecord) -> None:
        if isinstance(self._tier, Erasable):
            self._quietly("wipe", partial(self._tier.wipe, survivor))

    def accepts_writes(self) -> bool:
        if not isinstance(self._tier, StopsWrites):
            return self._allows()
        accepts = self._tier.accepts_writes
        return self._state_of("accepts_writes", lambda: typed(accepts(), bool), False)

    def record_frees(self) -> bool:
        if not isinstance(self._tier, RecordsFrees):
            return True
        record = self._tier.record_frees

        def work() -> bool:
            self._await_frees()
            return typed(record(), bool)

        return self._quietly("record_frees", work) or False

    def flush(self, places: Sequence[Place]) -> list[bool]:
        unsafe = [False] * len(places)
        if not isinstance(self._tier, Flushable):
            return unsafe
        flush = self._tier.flush
        return self._quietly("flush", lambda: listed(flush(places), places, bool)) or unsafe

    def give_up_copy(self) -> None:
        if isinstance(self._tier, Lockable):  # in a forked child: no lock, no thread, no log
            self._tier.give_up_copy()

    def _free_unwritten(self, batch: Sequence[TierPut]) -> None:
        self.free([put.place for put in batch])

    def _quietly(self, method: str, work: Callable[[], T]) -> T | None:
        try:
            return self._ask(method, work)
        except (TierFaultError, _NotAskedError):
            return None


class CheckedVolatileTier(CheckedLocalTier):
    """A `Volatile` tier of another package."""

    volatile: ClassVar[Literal[True]] = True


class CheckedSharedTier(CheckedTier):
    """A `SharedTier` of another package; it is `Reachable`, `Queryable` and so on at once.

    A method that the tier lacks gives the answer that changes nothing.
    """

    def held(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        return self.ask(namespace, keys, start, within_s).blocks

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> HeldAnswer:
        most = len(keys) - start

        def work() -> HeldAnswer:
            if isinstance(self._tier, AnsweringTier):
                return held_answer(self._tier.ask(namespace, keys, start, within_s), most)
            held = self._tier.held(namespace, keys, start, within_s)
            return HeldAnswer(number_up_to(held, most), Outcome.OK)

        try:
            return self._ask("held", partial(self._beside, work, within_s + LOOKUP_SPARE_S))
        except TierFaultError as error:
            late = isinstance(error.__cause__, _TooSlowError)
            return HeldAnswer(0, Outcome.LATE if late else Outcome.GONE)
        except _NotAskedError:
            return HeldAnswer(0, Outcome.GONE)

    def reachable(self) -> bool:
        if not isinstance(self._tier, Reachable):
            return self._allows()
        reachable = self._tier.reachable
        return self._state_of("reachable", lambda: typed(reachable(), bool), False)

    def indexed(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        if not isinstance(self._tier, Indexed):
            return bytes(len(keys))
        work = partial(self._tier.indexed, namespace, keys)
        return self._state_of("indexed", lambda: flags(work(), keys), bytes(len(keys)))

    def aged(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        if not isinstance(self._tier, Expiring):
            return bytes(len(keys))
        work = partial(self._tier.aged, namespace, keys)
        return self._state_of("aged", lambda: flags(work(), keys), bytes(len(keys)))

    def refresh(self, namespace: Namespace, keys: Sequence[bytes], within_s: float) -> bool:
        if not isinstance(self._tier, Expiring):
            return True
        asked_s = min(within_s, REMOTE_S - LOOKUP_SPARE_S)
        work = partial(self._tier.refresh, namespace, keys, asked_s)
        return self._in_time("refresh", lambda: typed(work(), bool), False)

    def may_write(self) -> bool:
        if not isinstance(self._tier, Permitted):
            return True
        may_write = self._tier.may_write
        return self._state_of("may_write", lambda: typed(may_write(), bool), False)

    def limits(self) -> str:
        if not isinstance(self._tier, Permitted):
            return ""
        limits = self._tier.limits
        return self._state_of("limits", lambda: typed(limits(), str), "")

    def announce(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, in_s: float
    ) -> None:
        if isinstance(self._tier, Announceable):
            work = partial(self._tier.announce, namespace, keys, start, in_s)
            self._in_time("announce", work, None)

    def flush(self, places: Sequence[Place]) -> list[bool]:
        unsafe = [False] * len(places)
        if not isinstance(self._tier, Flushable):
            return unsafe
        flush = self._tier.flush
        return self._in_time("flush", lambda: listed(flush(places), places, bool), unsafe)

    def known(self, batch: Sequence[TierPut]) -> list[bool]:
        if not isinstance(self._tier, Queryable):
            return [False] * len(batch)
        work = partial(self._tier.known, batch)
        return self._in_time("known", lambda: listed(work(), batch, bool), [False] * len(batch))

    def misplaced(self, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
        if not isinstance(self._tier, Rebalancing):
            return set()
        misplaced = self._tier.misplaced

        def work() -> set[bytes]:
            found = typed(misplaced(namespace, keys), set)
            if not found.issubset(keys):
                raise TierFaultError("misplaced() names blocks that it was not asked about")
            return found

        return self._state_of("misplaced", work, set[bytes]())

    def lost(self) -> Callable[[Place], bool] | None:
        if not isinstance(self._tier, Rebalancing):
            return None
        find = self._tier.lost

        def work() -> Callable[[Place], bool] | None:
            found = find()
            if found is not None and not callable(found):
                raise TierFaultError(f"returned {type(found).__name__}, not a test of places")
            return found

        lost = self._state_of("lost", work, None)
        return lost and partial(self._was_lost, lost)

    def member_health(self) -> Sequence[MemberStatus]:
        """Return the members; raises an error that names the fault after one."""
        if not isinstance(self._tier, HealthReporting):
            return []
        return self._ask("member_health", self._tier.member_health, STATE_S)

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        self._in_time("delete_corrupt", lambda: self._tier.delete_corrupt(batch), None)

    def delete(self, batch: Sequence[TierGet]) -> None:
        self._in_time("delete", lambda: self._tier.delete(batch), None)

    def describe(self) -> dict[str, Any]:
        """Return what the tier tells; raises an error that names the fault after one."""
        return self._ask("describe", partial(self._beside, self._tier.describe, REMOTE_S))

    def _was_lost(self, lost: Callable[[Place], bool], place: Place) -> bool:
        try:
            return bool(lost(place))
        except Exception as error:  # noqa: BLE001  # code of another package
            self._note("lost", error)
            return False

    def _in_time(self, method: str, work: Callable[[], T], otherwise: T) -> T:
        try:
            return self._ask(method, partial(self._beside, work, REMOTE_S))
        except (TierFaultError, _NotAskedError):
            return otherwise

    def _beside(self, work: Callable[[], T], within_s: float) -> T:
        """Run work on a thread of its own; raise _TooSlowError if it is late."""
        future: Future[T] = Future()
        name = f"holdfast-asks-{self.name}"
        threading.Thread(target=_run_into, args=(work, future), name=name, daemon=True).start()
        return self._wait(future, min(within_s, threading.TIMEOUT_MAX))


def _run_into(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # the waiting thread raises it
        future.set_exception(error)
