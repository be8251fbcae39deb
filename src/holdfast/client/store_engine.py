"""The engine client over a store: embedded in this process, or a node's.

Both are sessions that take the same messages (`client.connection`), so this is one implementation.
Loads run on the threads of `client.loader`; saves, and writes to the durable tier, on a few others.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.group_rules import unit_tokens
from holdfast.blocks.key import Chain, Tokens
from holdfast.client.connection import Connection, StoreClient
from holdfast.client.engine import (
    BlockRun,
    ContextKeys,
    EngineGroup,
    GroupPages,
    Loaded,
    LookupOptions,
    Pending,
    Saved,
    Ticket,
)
from holdfast.client.fresh_slots import reserve_slots
from holdfast.client.loader import GroupLoad, Loader, LoadJob, LoadResult, RunningLoad
from holdfast.client.prompt_ledger import by_tier
from holdfast.devices.base import NO_PAGE, DirectDevice, Move
from holdfast.errors import (
    BlockError,
    HoldfastError,
    NodeGoneError,
    Outcome,
    ProtocolError,
    RefusedError,
)
from holdfast.limits import CHAIN_BLOCKS_MAX, RESERVE_BLOCKS_MAX
from holdfast.policy.retention import Retention
from holdfast.wire.local import messages as m

T = TypeVar("T")

ANSWER_S = 30.0
"""Timeout of a store's answer to a save."""

SAVE_THREADS = 2

_SHORTEST_DEADLINE_S = 0.001
"""Smallest deadline of a lookup that is sent; 0 selects the store's default."""

_OUTCOMES = {str(outcome): outcome for outcome in Outcome}
_log = logging.getLogger(__name__)


class StoreEngine:
    """See `EngineClient`; `first`: the client of the session that `connection` began with."""

    def __init__(
        self, connection: Connection, first: StoreClient, groups: Sequence[EngineGroup]
    ) -> None:
        self.groups = tuple(groups)
        self._rules = [group.rule for group in self.groups]
        self._writes = [group.writes for group in self.groups]
        self.unit_tokens = unit_tokens(self._rules)
        self._digests = [group.fingerprint.digest() for group in self.groups]
        self._welcome = first.welcome
        self._connection = connection
        self._loader = Loader(connection)
        self._savers = ThreadPoolExecutor(SAVE_THREADS, "holdfast-save-context")

    def context(
        self, tokens: Tokens, extras: Mapping[int, Sequence[bytes]] | None = None
    ) -> ContextKeys:
        """Return the keys of a context in every group."""
        chains = []
        for rule, digest in zip(self._rules, self._digests, strict=True):
            by_block: dict[int, list[bytes]] = {}
            for token, found in sorted((extras or {}).items()):
                by_block.setdefault(token // rule.block_tokens, []).extend(found)
            segment_blocks = self._welcome.segment_blocks
            key, size = self._welcome.domain_key, rule.block_tokens
            chains.append(Chain(key, digest, size, by_block, segment_blocks))
        context = ContextKeys(tuple(chains))
        context.extend(tokens)
        return context

    def lookup(
        self,
        context: ContextKeys,
        options: LookupOptions = LookupOptions(),  # noqa: B008  # immutable
    ) -> Pending[Ticket]:
        """Ask how many leading tokens of a context to load, and what they consist of."""
        have = options.have
        client = self._connection.client()
        if client is None:
            return Answered(Ticket(have, have, outcome=Outcome.GONE, reason=self._why_away()))
        keys = [chain.packed(0, CHAIN_BLOCKS_MAX) for chain in context.chains]
        chain = context.chains[0]
        cover = m.Cover(
            keys[0],
            tokens=options.tokens or len(chain) * chain.block_tokens + 1,
            have=have,
            limit_s=options.limit_s,
            session=options.session,
            deadline_s=max(options.deadline_s, _SHORTEST_DEADLINE_S),
            more_keys=keys[1:],
        )
        try:
            request_id = client.send(cover)
        except NodeGoneError as error:
            return Answered(Ticket(have, have, outcome=Outcome.GONE, reason=str(error)))
        return _PendingTicket(client, request_id, partial(self._ticket, context, options), have)

    def observed(self, ticket: Ticket, loaded: LoadResult | None, tokens: int) -> None:
        """Report a prompt to the store, which counts its tokens by source, and how a plan ended.

        `tokens`: leading tokens that the engine has now. `loaded` None: nothing was loaded.
        """
        client = self._connection.client()
        if client is None or not ticket.prompt_tokens:
            return
        by_source, endings = dict[str, int](), []
        if loaded is not None and (new := tokens - ticket.have) > 0:
            total = sum(loaded.sources.values())
            shares = {tier: new * blocks // total for tier, blocks in loaded.sources.items()}
            by_source = by_tier(new, shares)
            endings = [(ticket.plan, loaded.seconds, 0.0)] if ticket.plan else []
        prompt = ticket.prompt_tokens, min(ticket.have, ticket.prompt_tokens), by_source
        report = m.Observed([], endings=endings, prompts=[prompt])
        with contextlib.suppress(NodeGoneError):  # the report is lost
            client.forget(client.send(report))

    def load(
        self, ticket: Ticket, pages: Sequence[GroupPages | None], after: Any = None
    ) -> Pending[Loaded]:
        """Load what a ticket names into pages; see `EngineClient`.

        Raises BlockError for pages that do not fit the blocks.
        """
        if ticket.is_empty:
            return Answered(Loaded(ticket.have, {}, ticket.outcome, ticket.reason))
        _check_groups(len(pages), len(self.groups))
        is_full = [rule.attention for rule in self._rules] == ["full"]
        loads = []
        for group, (run, given) in enumerate(zip(ticket.runs, pages, strict=True)):
            if not run.keys:
                continue
            if given is None:
                raise BlockError(f"load: no pages for group {group}, whose blocks are needed")
            _check_pages(group, run, given, may_end_in_block=is_full)
            loads.append(GroupLoad(group, run.keys, given.device, list(given.pages), given.first))
        running = self._loader.put(LoadJob(tuple(loads), ticket.deadline_s, ticket.plan, after))
        start, page_tokens = ticket.have, 0
        if is_full:
            size = self._rules[0].block_tokens
            page_tokens = size // loads[0].device.pages.pages_per_block
            start = ticket.runs[0].first * size + loads[0].first * page_tokens
        return _PendingLoad(running, ticket, start, page_tokens, self.observed)

    def save(
        self,
        context: ContextKeys,
        blocks: Sequence[range],
        pages: Sequence[GroupPages | None],
        retention: Retention = Retention.SESSION,
    ) -> PendingContextSave:
        """Save blocks of each group, which are full in these pages now; see `EngineClient`.

        Of a group of which another rank writes every byte, nothing is saved.
        """
        _check_groups(len(pages), len(self.groups))
        _check_groups(len(blocks), len(self.groups))
        runs: list[_SaveRun] = []
        for group, (chosen, given) in enumerate(zip(blocks, pages, strict=True)):
            if chosen and given is not None:
                chain, per_block = context.chains[group], given.device.pages.pages_per_block
                if chosen.step != 1 or chosen.stop > len(chain):
                    raise BlockError(
                        f"save: blocks {chosen} of group {group}, whose context has {len(chain)}"
                    )
                if len(given.pages) != len(chosen) * per_block:
                    raise BlockError(
                        f"save: {len(given.pages)} pages of group {group} given for "
                        f"{len(chosen)} blocks of {per_block} pages"
                    )
                if self._writes[group]:
                    runs += _save_runs(group, chain, chosen, given)
        work = partial(self._save, runs, retention)
        return PendingContextSave(self, self._submit(work), context, blocks)

    def sync(self, context: ContextKeys, blocks: Sequence[range], deadline_s: float) -> int:
        """Write held blocks of a context to the durable tier; return how many it keeps.

        `blocks`: consecutive ones of each group. Blocks the caller for up to `deadline_s`.
        """
        until_s, client, kept = time.monotonic() + deadline_s, self._client(), 0
        for group, (chain, chosen) in enumerate(zip(context.chains, blocks, strict=True)):
            if chosen:
                left_s = max(until_s - time.monotonic(), 0.0)
                sync = m.Sync(chain.packed(chosen.start, chosen.stop), left_s, group=group)
                kept += client.call(sync, m.Hinted, left_s + ANSWER_S).blocks
        return kept

    def run_later(self, work: Callable[[], T]) -> Pending[T | None]:
        """Run work on a thread for saves; the answer is None if the store went away."""
        return Running(self._submit(work))

    def close(self) -> None:
        """End loads and saves, and then the session."""
        self._savers.shutdown(wait=True, cancel_futures=True)
        self._loader.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _client(self) -> StoreClient:
        client = self._connection.client()
        if client is None:
            raise NodeGoneError(self._why_away())
        return client

    def _why_away(self) -> str:
        return f"{self._connection.address}: no session with the store"

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._savers.submit(work)
        except RuntimeError as error:
            raise NodeGoneError("this engine client was closed; open another") from error

    def _ticket(self, context: ContextKeys, options: LookupOptions, covered: m.Covered) -> Ticket:
        """Return the ticket that a store's answer means."""
        unit, have = self.unit_tokens, options.have
        held = covered.blocks * unit
        tokens = covered.worth * unit
        if options.tokens:
            tokens = min(tokens, (options.tokens - 1) // unit * unit)
        tokens = max(tokens, have)
        runs = []
        for rule, chain in zip(self._rules, context.chains, strict=True):
            blocks = rule.needed(tokens, have) if tokens > have else range(0)
            runs.append(BlockRun(blocks.start, chain.packed(blocks.start, blocks.stop)))
        unanswered = list(covered.unanswered.values())
        outcome = Outcome.OK if held else Outcome.MISS
        if not held and unanswered:
            outcome = Outcome.LATE if str(Outcome.LATE) in unanswered else Outcome.GONE
        ticket = Ticket(
            tokens=tokens,
            have=have,
            held=held,
            pending=max(covered.pending, covered.blocks) * unit,
            runs=tuple(runs),
            sources={tier: blocks * unit for tier, blocks in covered.sources.items()},
            expected_s=covered.expected_s,
            recompute_s=covered.recompute_s,
            deadline_s=covered.deadline_s or options.limit_s,
            plan=covered.plan,
            outcome=outcome,
            reason=covered.reason,
            prompt_tokens=options.tokens or len(context.chains[0]) * self._rules[0].block_tokens,
        )
        if ticket.is_empty:
            self.observed(ticket, None, have)
        return ticket

    def _save(self, runs: Sequence[_SaveRun], retention: Retention) -> Saved:
        """Save runs of blocks one after the other; return what became of all."""
        saved, outcome = 0, Outcome.OK
        try:
            client = self._client()
            for run in runs:
                blocks, found = _save_run(client, run, retention)
                saved += blocks
                outcome = found if outcome is Outcome.OK else outcome
        except (HoldfastError, OSError) as error:
            _log.warning("blocks not saved: %s", error)
            return Saved(saved, Outcome.GONE, str(error))
        return Saved(saved, outcome, "" if outcome is Outcome.OK else "no room for some blocks")


class Answered(Generic[T]):
    """An answer that is there at once."""

    def __init__(self, answer: T) -> None:
        self._answer = answer

    def poll(self) -> T | None:
        """Return the answer."""
        return self._answer

    def wait(self, timeout_s: float) -> T | None:
        """Return the answer."""
        del timeout_s
        return self._answer

    def cancel(self) -> None:
        """Do nothing."""


class Running(Generic[T]):
    """An answer that a thread computes; None also if the store went away."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def poll(self) -> T | None:
        """Return the answer if it is there, else None."""
        return self.wait(0.0) if self._future.done() else None

    def wait(self, timeout_s: float) -> T | None:
        """Return the answer if it comes within this time, else None."""
        try:
            return self._future.result(timeout_s)
        except (TimeoutError, HoldfastError):
            return None

    def cancel(self) -> None:
        """Do not begin the work, if it has not begun."""
        self._future.cancel()


class _PendingTicket:
    """A lookup that the store answers."""

    def __init__(
        self,
        client: StoreClient,
        request_id: int,
        ticket_of: Callable[[m.Covered], Ticket],
        have: int,
    ) -> None:
        self._client = client
        self._request_id = request_id
        self._ticket_of = ticket_of
        self._have = have
        self._ticket: Ticket | None = None

    def poll(self) -> Ticket | None:
        """Return the ticket if the answer is there, else None."""
        return self._read(lambda: self._client.poll(self._request_id))

    def wait(self, timeout_s: float) -> Ticket | None:
        """Return the ticket if the answer comes within this time, else None."""
        return self._read(lambda: self._client.expect(self._request_id, timeout_s))

    def cancel(self) -> None:
        """Do without the answer."""
        if self._ticket is None:
            self._client.forget(self._request_id)

    def _read(self, read: Callable[[], m.Reply | None]) -> Ticket | None:
        if self._ticket is None:
            try:
                reply = read()
                if reply is None:
                    return None
                if not isinstance(reply, m.Covered):
                    raise ProtocolError(f"Cover was answered with {type(reply).__name__}")
                self._ticket = self._ticket_of(reply)
            except (NodeGoneError, RefusedError, ProtocolError) as error:
                have = self._have
                self._ticket = Ticket(have, have, outcome=Outcome.GONE, reason=str(error))
        return self._ticket


class _PendingLoad:
    """A load that runs; `start` and `page_tokens`: where the pages of full attention begin.

    `page_tokens` 0: leading pages are of no use without the others, because a resume after fewer
    tokens needs other blocks, too. `observe` reports its end to the store.
    """

    def __init__(
        self,
        load: RunningLoad,
        ticket: Ticket,
        start: int,
        page_tokens: int,
        observe: Callable[[Ticket, LoadResult | None, int], None],
    ) -> None:
        self._observe = observe
        self._loaded: Loaded | None = None
        self._load = load
        self._ticket = ticket
        self._start = start
        self._page_tokens = page_tokens

    def poll(self) -> Loaded | None:
        """Return the result if the load has ended, else None."""
        return self._result() if self._load.poll() is not None else None

    def wait(self, timeout_s: float) -> Loaded | None:
        """Return the result if the load ends within this time, else None."""
        return self._result() if self._load.wait(timeout_s) is not None else None

    def cancel(self) -> None:
        """Do nothing: the pages belong to the load until it has ended."""

    def _result(self) -> Loaded | None:
        result, ticket = self._load.poll(), self._ticket
        if result is None or self._loaded is not None:
            return self._loaded
        tokens = ticket.tokens
        if self._page_tokens:
            tokens = min(self._start + result.pages * self._page_tokens, tokens)
        elif result.pages < self._load.job.wanted:
            tokens = ticket.have
        tokens = max(tokens, ticket.have) if result.pages else ticket.have
        outcome = _OUTCOMES.get(result.outcome, Outcome.GONE)
        self._loaded = Loaded(tokens, result.sources, outcome, result.reason)
        self._observe(ticket, result, tokens)
        return self._loaded


class PendingContextSave:
    """See `PendingSave`."""

    def __init__(
        self,
        engine: StoreEngine,
        future: Future[Saved],
        context: ContextKeys,
        blocks: Sequence[range],
    ) -> None:
        self._engine = engine
        self._running = Running(future)
        self._context = context
        self._blocks = blocks

    def poll(self) -> Saved | None:
        """Return the result if the save has ended, else None."""
        return self._running.poll()

    def wait(self, timeout_s: float) -> Saved | None:
        """Return the result if the save ends within this time, else None."""
        return self._running.wait(timeout_s)

    def cancel(self) -> None:
        """Do not begin the save, if it has not begun."""
        self._running.cancel()

    def durable(self, deadline_s: float) -> Pending[int | None]:
        """Have the blocks written to the durable tier; the answer is how many it has flushed."""
        sync = partial(self._engine.sync, self._context, self._blocks, deadline_s)
        return self._engine.run_later(sync)


class _SaveRun(NamedTuple):
    """One reservation of a save: its request, and the device and pages of its blocks."""

    reserve: m.Reserve
    device: DirectDevice
    pages: Sequence[int]


def _check_pages(group: int, run: BlockRun, given: GroupPages, *, may_end_in_block: bool) -> None:
    """Raise BlockError unless these are the pages of a load's blocks, from page `first` on.

    `may_end_in_block`: the last block may have pages for its leading tokens only.
    """
    per_block = given.device.pages.pages_per_block
    wanted = len(run.blocks) * per_block - given.first
    least = wanted - per_block + 1 if may_end_in_block else wanted
    if not 0 <= given.first < per_block or not least <= len(given.pages) <= wanted:
        raise BlockError(
            f"load: {len(given.pages)} pages of group {group} given for {len(run.blocks)} blocks "
            f"of {per_block} pages, from page {given.first} of the first block on; pass one for "
            f"each page of them, {NO_PAGE} for those that the engine does not need"
        )


def _save_runs(group: int, chain: Chain, blocks: range, given: GroupPages) -> Iterator[_SaveRun]:
    """Yield the reservations of a group's blocks."""
    per_block = given.device.pages.pages_per_block
    for first in range(blocks.start, blocks.stop, RESERVE_BLOCKS_MAX):
        stop = min(first + RESERVE_BLOCKS_MAX, blocks.stop)
        reserve = m.Reserve(
            chain.packed(first, stop), chain.parent(first), first, chain.segment(first), group
        )
        at = (first - blocks.start) * per_block
        pages = given.pages[at : at + (stop - first) * per_block]
        yield _SaveRun(reserve, given.device, pages)


def _save_run(client: StoreClient, run: _SaveRun, retention: Retention) -> tuple[int, Outcome]:
    """Reserve slots, copy blocks into them, and commit; return new blocks, and OK or FULL."""
    reserved = reserve_slots(client, run.reserve, ANSWER_S)
    per_block = run.device.pages.pages_per_block
    moves = [
        Move(place + HEADER_BYTES, run.pages[at * per_block : (at + 1) * per_block])
        for at, place in enumerate(reserved.places)
        if place >= 0
    ]
    try:
        if client.arena is None:
            raise NodeGoneError("the session has no arena")
        copied = not moves or run.device.gather(client.arena, moves).result()
    except BaseException:
        client.forget(client.send(m.Abort(reserved.ticket)))
        raise
    if not copied:
        client.forget(client.send(m.Abort(reserved.ticket)))
        return 0, Outcome.GONE
    commit = m.Commit(reserved.ticket, str(retention))
    blocks = client.call(commit, m.Committed, ANSWER_S).blocks
    return blocks, _OUTCOMES.get(reserved.outcome, Outcome.GONE)


def _check_groups(given: int, groups: int) -> None:
    if given != groups:
        raise BlockError(f"{given} entries given, the model has {groups} KV groups")
