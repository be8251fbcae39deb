"""Hints: what an engine, a router or an agent knows about future use, and the store cannot know.

On public traces perfect hints add 5 to 33 points to the hit rate of a tight cache. A hint may be
late, wrong, or about blocks that are not held; then it changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from holdfast.blocks.key import unpack_keys
from holdfast.blocks.namespace import Namespace
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.plan.cost import QueuedPrefill
from holdfast.plan.planner import PlanQuestion, fetch_s
from holdfast.plan.prestage import PrestageTimes, begin_in_s
from holdfast.policy.base import NEVER
from holdfast.session import (
    LOOK_S,
    PIN_S,
    PIN_TTL_S_MAX,
    SECONDS_MAX,
    check_name,
    check_seconds,
)
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.store.estimates import EngineId, EngineProcess
from holdfast.store.evict import slots
from holdfast.store.fetch import FetchKind, fetch_unverified
from holdfast.store.lookup import ask_first, ask_in_time
from holdfast.store.pending_hints import KeptLimit, NamedChain, PendingPrestage, PinnedChain
from holdfast.tiers.base import Announceable

KEPT_SHARE = 0.5
"""Maximum share of the host tier for pins and prestages together.

For a domain, what other domains have reserved is left out.
"""

STAGED_S = 10.0
"""Time for which a prestaged context stays in memory beyond the time when it is needed, unless a
request uses it before."""

TURN_S_MAX = 60.0
"""Longest time for which a context waits in memory for a request that waits for its turn.

The wait is what an engine says. An engine whose request waits for longer announces it again.
"""

ANNOUNCED_S_MIN = 0.5
"""Shortest time before the read of a prestage at which shared tiers are told of it."""

_PROMOTION_S = 60.0


class EngineTurn(NamedTuple):
    """The turn of a request that waits in its engine's queue: after the prefill `queued`.

    `process`: see `EngineProcess`.
    """

    engine: EngineId
    queued: QueuedPrefill
    process: int = 0


def follow(store: StoreParts, namespace: Namespace, session: str, keys: Sequence[bytes]) -> None:
    """Note that a session uses this chain; later hints name only the session."""
    check_name(session)
    with store.table.lock:
        store.pending_hints.follow(namespace, session, keys)


def closed(store: StoreParts, domain: bytes, session: str) -> int:
    """Record that a session is over: its blocks are evicted first. Return how many are here."""
    check_name(session)
    blocks = _expect(store, domain, session, NEVER)
    with store.table.lock:
        store.pending_hints.forget(domain, session)
    return blocks


def returns(store: StoreParts, domain: bytes, session: str, in_s: float) -> int:
    """Record that a session comes back in `in_s` seconds; return how many of its blocks are held.

    The eviction policy takes that time as the next use of its blocks, and blocks below memory are
    read into it before. Shared tiers are asked about blocks that are not held here, for `LOOK_S` at
    most.
    """
    check_name(session)
    check_seconds("returns.in_s", in_s, SECONDS_MAX)
    with store.table.lock:
        chain = store.pending_hints.chain(domain, session)
    if chain is None:
        return 0
    at_s = store.clock.now() + in_s
    ask_in_time(store, chain.namespace, unpack_keys(chain.keys), LOOK_S, Priority.PREFETCH)
    blocks = _expect(store, domain, session, at_s)
    _stage(store, chain, at_s)
    return blocks


def prestage(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    in_s: float,
    deadline_s: float = LOOK_S,
    turn: EngineTurn | None = None,
) -> int:
    """Have what is held of a chain in memory in `in_s` seconds; return how many blocks.

    Shared tiers are asked for what is not held here, for `deadline_s` at most, at lower priority
    than requests. The blocks are read in the background, at lower priority than demand reads, and
    stay in memory until a request uses them, at most `STAGED_S` beyond `in_s`. Blocks beyond the
    limit of pins and prestages are left out; a prestage waits while others take all of it.

    `turn`: a request for the chain waits for it, so the read begins as soon as the tier is free,
    in the order of `plan.prestage`; `in_s` is then the shortest wait, and `TURN_S_MAX` the longest.
    """
    check_seconds("prestage.in_s", in_s, SECONDS_MAX)
    check_seconds("prestage: deadline_s", deadline_s, SECONDS_MAX)
    at_s = store.clock.now() + in_s
    ask_in_time(store, namespace, keys, deadline_s, Priority.PREFETCH)
    return _stage(store, NamedChain(namespace, b"".join(keys)), at_s, turn)


def pin(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    ttl_s: float,
    deadline_s: float = PIN_S,
) -> int:
    """Read what is held of a chain into memory and keep it there for `ttl_s`; return its blocks.

    Asks shared tiers for what is not held here and waits for reads from lower tiers, for
    `deadline_s` at most, at lower priority than requests. Blocks beyond the limit of pinned memory
    are left out. An earlier pin of the chain, or of its beginning, becomes part of this one, which
    ends no sooner.
    """
    check_seconds("pin.ttl_s", ttl_s, PIN_TTL_S_MAX)
    check_seconds("pin: deadline_s", deadline_s, SECONDS_MAX)
    left_s = ask_first(store, namespace, keys, deadline_s, Priority.PREFETCH)[1]
    size, table, pending_hints = namespace.slot_bytes, store.table, store.pending_hints
    domain = namespace.domain
    with table.lock:
        kept = pending_hints.kept_bytes(store.clock.now())
        own, others = kept[domain], kept.total() - kept[domain]
        own -= sum(pin.nbytes for pin in pending_hints.pins_within(namespace, keys).values())
        open_bytes = _kept_limit(store, domain).open_bytes(own, others)
        keys = keys[: max(0, open_bytes) // size]
        claimed_bytes = len(keys) * size
        pending_hints.claim(domain, claimed_bytes)  # so that two pins cannot get these bytes
    try:
        leased = fetch_unverified(store, namespace, keys, left_s, FetchKind(Priority.PREFETCH))
        try:
            with table.lock:
                keys = keys[: len(leased.places)]
                before = pending_hints.pins_within(namespace, keys)
                until_s = max(
                    [store.clock.now() + ttl_s, *(pin.until_s for pin in before.values())]
                )
                held = table.index.cover(namespace, keys).rows
                rows = list(takewhile(partial(table.is_on, tier=HOST), held))
                table.touch(rows)
                lease = table.leases.lease(rows, until_s) if rows else 0
                for last, pin in before.items():
                    pending_hints.unpin(namespace, last)
                    table.leases.release(pin.lease)
                if rows:
                    pinned = PinnedChain(until_s, len(rows) * size, lease)
                    pending_hints.pin(namespace, keys[len(rows) - 1], pinned)
                return len(rows)
        finally:
            store.release(leased.lease)
    finally:
        with table.lock:
            pending_hints.end_claim(domain, claimed_bytes)


def start_prestages(store: StoreParts) -> None:
    """Start the prestages that are due, fairly between domains; housekeeping calls it."""
    if store.gone:
        return
    with store.table.lock:
        due = store.pending_hints.due(store.clock.now(), partial(_kept_limit, store))
    for staging in due:
        domain = staging.chain.namespace.domain
        item = WorkItem(domain, staging.nbytes, store.share(domain), Priority.PREFETCH)
        try:
            store.background.run_unawaited(item, partial(_promote, store, staging))
        except RuntimeError:  # no thread can be started, because the process ends for example
            with store.table.lock:
                store.pending_hints.done(staging)


def _kept_limit(store: StoreParts, domain: bytes) -> KeptLimit:
    """Return the limit of pins and prestages for a domain. Call under the store's lock.

    Other domains that are configured or that have blocks here may keep contexts, too. The public
    domain is left out: only a publisher could.
    """
    table = store.table
    open_bytes = store.host_bytes - table.usage.reserved_by_others(domain)
    configured = table.hosts if domain in table.hosts else ()
    domains = (configured, *table.usage.used)
    is_shared = any(other not in (domain, table.public) for some in domains for other in some)
    return KeptLimit(int(KEPT_SHARE * open_bytes), is_shared)


def _expect(store: StoreParts, domain: bytes, session: str, at_s: float) -> int:
    table = store.table
    with table.lock:
        chain = store.pending_hints.chain(domain, session)
        if chain is None:
            return 0
        rows = table.index.cover(chain.namespace, unpack_keys(chain.keys)).rows
        table.eviction.expect(rows, at_s)
    return len(rows)


def _stage(
    store: StoreParts, chain: NamedChain, at_s: float, turn: EngineTurn | None = None
) -> int:
    """Queue a prestage for `at_s` of the store's clock; return how many blocks will be in memory.

    Reading begins early enough for all blocks, at once if it is due or if a request waits for its
    turn. A block in memory now may be evicted before: it counts as on the tier below, unless a
    request waits. Blocks that do not fit in memory, or beyond the limit of pins and prestages, are
    not counted.
    """
    table, namespace = store.table, chain.namespace
    with table.lock:
        tiers = table.index.cover(namespace, unpack_keys(chain.keys)).tiers
        most = _kept_limit(store, namespace.domain).open_bytes() // namespace.slot_bytes
        tiers = tiers[: min(most, slots(table, namespace))]
        names = table.tier_names()
        if not tiers or len(names) == 1:
            return len(tiers)
        question = PlanQuestion(
            tiers=tiers if turn else [max(1, tier) for tier in tiers],
            block_bytes=namespace.slot_bytes,
            block_tokens=namespace.block_tokens,
            estimates=store.estimates.estimates(namespace.domain),
            names=names,
            limit_s=SECONDS_MAX,
        )
        now_s = store.clock.now()
        times = _times(store, question, at_s, turn)
        begin_s = now_s
        if turn is None:
            ahead_s = begin_in_s(max(0.0, at_s - now_s), fetch_s(question, len(tiers)))
            begin_s = now_s + ahead_s
        is_queued = store.pending_hints.wait(begin_s, PendingPrestage(chain, times))
    if is_queued:
        _announce(store, chain, tiers, begin_s - now_s)
        if begin_s <= now_s:
            start_prestages(store)
        return len(tiers)
    return next((at for at, tier in enumerate(tiers) if tier != HOST), len(tiers))


def _times(
    store: StoreParts, question: PlanQuestion, at_s: float, turn: EngineTurn | None
) -> PrestageTimes:
    """Return the times of a prestage that is needed at `at_s`, or at its engine's turn after it."""
    tiers = question.tiers
    idle = [estimate._replace(queued_bytes=0.0) for estimate in question.estimates]
    read_s = fetch_s(question._replace(estimates=idle), len(tiers))
    if turn is None:
        return PrestageTimes(at_s, read_s, max(tiers))
    now_s, waits_in = store.clock.now(), EngineProcess(turn.engine, turn.process)
    cost = store.estimates.cost(turn.engine)[0]
    turn_s, saved_s = now_s, 0.0
    if cost is not None:
        turn_s += cost.queue_s(turn.queued)
        saved_s = cost.seconds(len(tiers) * question.block_tokens)
    needed_s = min(max(at_s, turn_s), now_s + TURN_S_MAX)
    return PrestageTimes(needed_s, read_s, max(tiers), waits_in, saved_s)


def _announce(store: StoreParts, chain: NamedChain, tiers: Sequence[int], in_s: float) -> None:
    """Have shared tiers read blocks into their remote memory before this store reads them.

    Only if there is time for it: this store reads the blocks of a prestage that is due at once.
    """
    if in_s < ANNOUNCED_S_MIN:
        return
    namespace, keys = chain.namespace, unpack_keys(chain.keys)
    for number in sorted(set(tiers) & store.table.shared.keys()):
        tier = store.table.shared[number]
        if isinstance(tier, Announceable):
            wanted = keys[: max(at for at, held in enumerate(tiers) if held == number) + 1]
            work = partial(tier.announce, namespace, wanted, tiers.index(number), in_s)
            item = WorkItem(namespace.domain, share=store.share(namespace.domain))
            with contextlib.suppress(RuntimeError):  # no thread can be started, as at exit
                store.background.run_unawaited(item, work)


def _promote(store: StoreParts, staging: PendingPrestage) -> None:
    """Promote a chain and keep it, then begin the prestages that waited for this one."""
    try:
        _promote_and_keep(store, staging)
    finally:
        start_prestages(store)


def _promote_and_keep(store: StoreParts, staging: PendingPrestage) -> None:
    """Promote a chain and keep it, without counting it as a use: expectations of it stay.

    A cached remote lookup may have been forgotten since the hint: the tier is asked again.
    """
    namespace, keys = staging.chain.namespace, unpack_keys(staging.chain.keys)
    table, pending_hints = store.table, store.pending_hints
    try:
        ask_in_time(store, namespace, keys, LOOK_S, Priority.PREFETCH)
        kind = FetchKind(Priority.PREFETCH, prestage=staging)
        fetched = fetch_unverified(store, namespace, keys, _PROMOTION_S, kind)
    except BaseException:
        with table.lock:
            pending_hints.done(staging)
        raise
    with table.lock:
        pending_hints.done(staging)
        needed_s = max(staging.needed_s, store.clock.now())
        rows = table.index.cover(namespace, keys).rows
        table.eviction.expect(rows, needed_s)
        kept = list(takewhile(partial(table.is_on, tier=HOST), rows[: len(fetched.places)]))
        if kept:
            until_s, nbytes = needed_s + STAGED_S, len(kept) * namespace.slot_bytes
            staged = PinnedChain(until_s, nbytes, table.leases.lease(kept, until_s))
            table.leases.release(pending_hints.stage(namespace, keys[len(kept) - 1], staged))
        table.leases.release(fetched.lease)
