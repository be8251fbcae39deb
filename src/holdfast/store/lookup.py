"""Coverage of a chain: what the index knows, and what the shared tiers answer that they hold.

Answers of shared tiers are cached in the index as places that may turn out to be empty. Then the
fetch misses, the cached entry is removed, and the engine computes the block.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.errors import NotFollowed, Outcome
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.index.residency import Coverage
from holdfast.plan.cost import NO_QUEUE, QueuedPrefill, TierEstimate
from holdfast.plan.planner import Plan, PlanQuestion
from holdfast.session import LOOK_S, LOOKUP_SHARE, RECOVERING
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.estimates import EngineId, EngineProcess
from holdfast.store.plan_log import PlanRecord
from holdfast.tiers.base import (
    AnsweringTier,
    HeldAnswer,
    is_away,
    segment_place,
)

_NONE: Mapping[str, Outcome] = MappingProxyType({})

_log = logging.getLogger("holdfast.store")


class PromptTokens(NamedTuple):
    """An engine's question: tokens of the prompt, and leading tokens it has already.

    `tokens` 0: a question about a chain that is not to be computed now; its plan is not logged.
    `limit_s`: longest time of a fetch. `instead_of`: number of an earlier plan for the same prompt,
    which this one replaces. `queued`: prefill that the engine does first. `to_load`: blocks by tier
    that it is about to fetch for other prompts, and has not asked for yet. `process`: see
    `EngineProcess`.
    """

    engine: EngineId
    tokens: int
    have: int
    limit_s: float
    instead_of: int = 0
    queued: QueuedPrefill = NO_QUEUE
    to_load: Mapping[str, int] = MappingProxyType({})
    process: int = 0

    @property
    def waits_in(self) -> EngineProcess:
        """The engine process in whose queue the prompt waits."""
        return EngineProcess(self.engine, self.process)


class PlannedFetch(NamedTuple):
    """Leading blocks held of a prompt, and the plan for them.

    `sources` counts the blocks to fetch by tier; `number` names the plan, 0: there is none.
    `unanswered`: see `LookupResult`; tiers that are out of reach are among them.
    """

    held: int
    sources: dict[str, int]
    plan: Plan
    number: int
    unanswered: dict[str, Outcome]


class LookupResult(NamedTuple):
    """Leading blocks held of a chain, by tier, and the shared tiers that did not answer.

    `unanswered` has LATE or GONE by name of tier. It is empty if all of the chain is held, if every
    shared tier answered that it lacks the next block, or if none was to be asked.
    """

    blocks: int
    sources: dict[str, int]
    unanswered: dict[str, Outcome]


def cover(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> LookupResult:
    """Count the leading blocks of a chain that the index knows of, by tier; state only."""
    table = store.table
    with table.lock:
        coverage = table.index.cover(namespace, keys)
    return LookupResult(coverage.blocks, sources(table, coverage, coverage.blocks), {})


def pending(store: StoreParts, namespace: Namespace, keys: Sequence[bytes], held: int) -> int:
    """Count the leading blocks of a chain that are held or being saved; `held` of them are held.

    A session that saves a block may still give up, so a caller waits for a limited time.
    """
    table, rest = store.table, keys[held:]
    with table.lock:
        reserved = table.leases.reserved_keys(namespace) if rest else set[bytes]()
        if not reserved:
            return held
        later = table.index.held(namespace, rest)
    found = (
        at
        for at, (key, is_held) in enumerate(zip(rest, later, strict=True))
        if not is_held and key not in reserved
    )
    return held + next(found, len(rest))


def asks(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> bool:
    """Return whether `look` would ask a shared tier about blocks unknown to the index."""
    there = not all(map(is_away, store.table.shared.values()))
    return there and cover(store, namespace, keys).blocks < len(keys)


def look(
    store: StoreParts, namespace: Namespace, keys: Sequence[bytes], within_s: float = LOOK_S
) -> LookupResult:
    """Count the leading blocks, asking shared tiers about those the index does not know.

    `keys` starts with the first block of the chain. Waits for answers, or for another caller's
    equal lookup, for `within_s` in all.
    """
    covered, until = cover(store, namespace, keys), time.monotonic() + within_s
    unanswered = dict[str, Outcome]()
    for number, tier in store.table.shared.items():
        if covered.blocks == len(keys):
            break
        left_s = until - time.monotonic()
        if is_away(tier):
            unanswered[tier.name] = Outcome.GONE
        elif left_s <= 0:
            unanswered[tier.name] = Outcome.LATE
        else:
            outcome = ask_tier(store.table, number, namespace, keys, covered.blocks, left_s)
            covered = cover(store, namespace, keys)
            if outcome is not Outcome.OK:
                unanswered[tier.name] = outcome
    return covered._replace(unanswered=unanswered if covered.blocks < len(keys) else {})


def ask_in_time(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    within_s: float,
    priority: Priority = Priority.DEMAND,
) -> LookupResult:
    """Like `look`, on a thread of the store, so that no tier delays the caller beyond the limit.

    No thread is used, and no tier asked, if the index knows the whole chain or no tier is shared. A
    lookup that outlasts the limit continues, and its answer serves later callers.
    """
    table = store.table
    covered = cover(store, namespace, keys)
    if covered.blocks == len(keys) or not table.shared:
        return covered
    late = dict.fromkeys(store.shared_tiers, Outcome.LATE)
    within_s = min(within_s, LOOK_S)
    if within_s <= 0:
        return covered._replace(unanswered=late)
    share = table.usage.share(namespace.domain)
    work_item = WorkItem(namespace.domain, len(keys) * namespace.slot_bytes, share, priority)
    try:
        asking = store.lookups.submit(work_item, partial(look, store, namespace, keys, within_s))
    except RuntimeError:  # the store is closed
        return covered._replace(unanswered=dict.fromkeys(late, Outcome.GONE))
    wait([asking], timeout=within_s)
    if asking.cancel() or not asking.done():
        covered = cover(store, namespace, keys)
        return covered._replace(unanswered=late if covered.blocks < len(keys) else {})
    return asking.result()


def ask_first(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline_s: float,
    priority: Priority = Priority.DEMAND,
) -> tuple[LookupResult, float]:
    """Ask shared tiers before a fetch; return the result and the seconds left for the fetch.

    The lookup takes at most `LOOKUP_SHARE` of the deadline, so that blocks held here are fetched
    even if no shared tier answers. If a busy machine wakes the caller late, the fetch still has the
    rest of the deadline.
    """
    late_at = store.clock.now() + deadline_s
    asked = ask_in_time(store, namespace, keys, LOOKUP_SHARE * deadline_s, priority)
    return asked, max(late_at - store.clock.now(), (1 - LOOKUP_SHARE) * deadline_s)


def ask_tier(
    table: BlockTable,
    number: int,
    namespace: Namespace,
    keys: Sequence[bytes],
    start: int,
    within_s: float,
) -> Outcome:
    """Ask one shared tier about the blocks from `start` on, unless another caller does or just did.

    Blocks before `start` need not be held. Returns OK if the tier answered. Another caller's
    question is about that caller's chain, which may end or branch off before this one does: then
    the tier is asked again about the rest.
    """
    answer = HeldAnswer(0, Outcome.GONE)
    until = time.monotonic() + within_s
    with table.lock:
        # Another caller's lookup may have ended since this caller looked at the index.
        start = max(start, table.index.cover(namespace, keys).blocks)
        if start == len(keys):
            return Outcome.OK
        name = number, namespace, keys[start]
        now_s, failed, readable = table.clock.now(), table.failed_remote, len(keys)
        if failed:
            each = range(start, len(keys))
            ends = (at for at in each if failed.get((number, namespace, keys[at]), now_s))
            readable = next(ends, readable)
        if readable == start:  # its copy failed here a moment ago
            return Outcome.OK
        other = table.inflight_lookups.begin(name, now_s)
    if other is not None:
        wait([other], timeout=within_s)
        if not other.done():
            return Outcome.LATE
        with table.lock:
            covered = table.index.cover(namespace, keys).blocks
        if other.result() is not Outcome.OK or not start < covered < len(keys):
            return other.result()
        left_s = until - time.monotonic()
        return (
            ask_tier(table, number, namespace, keys, covered, left_s)
            if left_s > 0
            else Outcome.LATE
        )
    try:
        tier, asked = table.shared[number], keys[:readable]
        try:
            if isinstance(tier, AnsweringTier):
                answer = tier.ask(namespace, asked, start, within_s)
            else:
                answer = HeldAnswer(tier.held(namespace, asked, start, within_s), Outcome.OK)
        except Exception:  # noqa: BLE001  # a tier may be third-party code
            _log.exception("asking failed tier=%s", tier.name)
        held = keys[: start + answer.blocks]
        with table.lock:
            for depth in reversed(range(start, len(held))):  # the oldest goes first: the tail
                head = keys[depth - depth % table.segment_blocks]
                parent = keys[depth - 1] if depth else namespace.fingerprint
                row = table.index.add(namespace, keys[depth], parent, depth)
                table.publish_below(row, number, segment_place(head[:SEGMENT_BYTES]))
                table.remote_lookups.note(row)
        table.drop_oldest_lookups()
    finally:
        end = start + answer.blocks
        with table.lock:
            now_s = table.clock.now()
            if answer.blocks and answer.outcome is Outcome.OK and end < readable:
                table.inflight_lookups.note_miss((number, namespace, keys[end]), now_s)
            table.inflight_lookups.end(name, answer.blocks, now_s, answer.outcome)
    return answer.outcome


def plan_fetch(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    prompt: PromptTokens,
    unanswered: Mapping[str, Outcome] = _NONE,
) -> PlannedFetch:
    """Plan which of the leading blocks that the index knows of are worth fetching.

    `unanswered`: shared tiers that did not answer the lookup before.
    """
    table, estimates, began_s = store.table, store.estimates, store.clock.now()
    away = {tier for tier, shared in table.shared.items() if is_away(shared)}
    with table.lock:
        coverage = table.index.cover(namespace, keys)
        if not away.isdisjoint(coverage.tiers):  # cut at the first block that is out of reach
            blocks = next(at for at, tier in enumerate(coverage.tiers) if tier in away)
            coverage = coverage._replace(rows=coverage.rows[:blocks], tiers=coverage.tiers[:blocks])
        being_read = bytes_being_read(table, coverage)
    cost, delivery = estimates.cost(prompt.engine)
    question = PlanQuestion(
        tiers=coverage.tiers,
        block_bytes=namespace.slot_bytes,
        block_tokens=namespace.block_tokens,
        estimates=without_queued(with_queue(store, namespace, prompt), being_read),
        names=table.tier_names(),
        limit_s=prompt.limit_s,
        queued_s=cost.queue_s(prompt.queued) if cost is not None else 0.0,
        cost=cost,
        prompt_tokens=prompt.tokens,
        have_tokens=prompt.have,
        delivery=delivery,
    )
    plan, number = store.planner.plan(question), 0
    if prompt.instead_of and plan.blocks < coverage.blocks:
        rows = coverage.rows[plan.blocks :]
        _end_prestages(store, namespace, keys[plan.blocks :], rows, prompt.waits_in)
    if coverage.blocks < len(keys) and store.recovery.is_running:
        plan = plan._replace(reason=f"{plan.reason}; {RECOVERING}")
    if question.first >= coverage.blocks:
        store.plan_log.not_followed(prompt.engine, prompt.instead_of, NotFollowed.HAD)
    else:
        if prompt.tokens:
            record = PlanRecord(
                engine=prompt.engine,
                prompt_tokens=prompt.tokens,
                have_tokens=prompt.have,
                held=coverage.blocks,
                plan=plan,
                block_bytes=namespace.slot_bytes,
                first_block=question.first,
            )
            number = store.plan_log.add(record, prompt.instead_of)
        if plan.blocks < coverage.blocks:
            tier = coverage.tiers[plan.blocks]
            if tier != HOST and estimates.wants_probe(tier):  # now and then, though not worth it
                with table.lock:
                    store.probes[tier] = namespace, keys[plan.blocks]
            if cost is None:  # an engine that tells nothing
                probe(store)
    outcome = Outcome.OK if coverage.blocks else Outcome.MISS
    store.activity.call("lookup", outcome, store.clock.now() - began_s, coverage.blocks)
    wanted = coverage._replace(tiers=coverage.tiers[question.first :])
    taken = sources(table, wanted, plan.blocks - question.first)
    missing = {table.tier_name(tier): Outcome.GONE for tier in away} | dict(unanswered)
    return PlannedFetch(
        coverage.blocks, taken, plan, number, missing if coverage.blocks < len(keys) else {}
    )


def _end_prestages(
    store: StoreParts,
    namespace: Namespace,
    keys: Sequence[bytes],
    rows: Sequence[int],
    waits_in: EngineProcess,
) -> None:
    """End the prestages for a request whose plan leaves out these blocks at its turn.

    `rows`: those of the blocks that are held. The plan takes what arrives while the engine computes
    what is left of its queue. Reads for a pin, or for the prestage of another request, go on.
    """
    left_out = frozenset(keys)
    with store.table.lock:
        store.pending_hints.withdraw(namespace, keys, waits_in)
    store.mover.end_prestages(rows, lambda prestage: prestage.is_of(namespace, left_out, waits_in))


def bytes_being_read(table: BlockTable, coverage: Coverage) -> Mapping[int, int]:
    """Return the bytes of a chain that tiers are reading for others; call under the lock.

    A prestage or another fetch has queued them, so a fetch of the chain does not read them again.
    """
    fillings = table.copies.fillings(HOST)
    if not fillings:
        return {}
    pairs = zip(coverage.rows, coverage.tiers, strict=True)
    blocks = Counter(tier for row, tier in pairs if tier != HOST and row in fillings)
    return {tier: number * coverage.namespace.slot_bytes for tier, number in blocks.items()}


def without_queued(
    estimates: Sequence[TierEstimate], nbytes: Mapping[int, int]
) -> list[TierEstimate]:
    """Return the estimates of tiers without these bytes, by tier, in their queues."""
    found = list(estimates)
    for tier, queued in nbytes.items():
        left = max(0.0, found[tier].queued_bytes - queued)
        found[tier] = found[tier]._replace(queued_bytes=left)
    return found


def with_queue(store: StoreParts, namespace: Namespace, prompt: PromptTokens) -> list[TierEstimate]:
    """Return the estimates of the tiers, with what the engine is about to fetch in their queues."""
    found = store.estimates.estimates(namespace.domain)
    for tier, name in enumerate(store.table.tier_names() if prompt.to_load else ()):
        if blocks := prompt.to_load.get(name, 0):
            queued_bytes = found[tier].queued_bytes + blocks * namespace.slot_bytes
            found[tier] = found[tier]._replace(queued_bytes=queued_bytes)
    return found


def probe(store: StoreParts) -> None:
    """Promote the blocks to be probed, so that their tiers are measured again.

    Call it after an engine has reported its steps: reading and verifying takes a core for
    milliseconds, for which an engine on CPUs that was just told to compute would wait.
    """
    if not store.probes:
        return
    with store.table.lock:
        requested = list(store.probes.values())
        store.probes.clear()
    for namespace, key in requested:
        with store.table.lock:
            row = store.table.index.find(namespace, key)
            promotions = store.mover.reserve(namespace, [row] if row >= 0 else [])
        for read_batch in store.mover.start_reads(namespace, promotions):
            read_batch.reading.add_done_callback(lambda _: store.estimates.update_fits())


def sources(table: BlockTable, coverage: Coverage, blocks: int) -> dict[str, int]:
    """Count the first `blocks` of a coverage by tier."""
    tiers = coverage.tiers[:blocks]
    return {table.tier_name(tier): tiers.count(tier) for tier in sorted(set(tiers))}
