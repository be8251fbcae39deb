"""The session of one connected engine: answers its requests and owns its leases and reservations.

No other session can end them; they are released when the connection ends. Slots that a dead engine
may still write to are reused only after `RECLAIM_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import select
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace
from holdfast.client.lookup_answer import lookup_answer
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import BlockError, ConfigError, Outcome, ProtocolError, RefusedError, printable
from holdfast.fairness.fair_queue import WorkItem
from holdfast.limits import (
    CHAIN_BLOCKS_MAX,
    RECLAIM_S,
    RESERVATIONS_MAX,
    RESERVE_BLOCKS_MAX,
    RESERVED_BLOCKS_MAX,
)
from holdfast.node.local.groups import SessionGroups, check_slots
from holdfast.node.local.page_locks import SessionLocks
from holdfast.node.local.quantised import offer_codec
from holdfast.node.local.recorder import RequestRecorder, recorded
from holdfast.node.local.reports import report
from holdfast.node.local.threads import OPERATOR, NodeThreads, run_fair
from holdfast.node.local.users import PermittedUsers
from holdfast.node.recent import RecentRequests
from holdfast.node.refusals import RefusalLog
from holdfast.node.traces import RequestTraces
from holdfast.node.validation import (
    MAX_INLINE_BLOCKS,
    check_bytes,
    check_hello,
    check_key_page,
    engine_turn,
    prompt_counts,
    prompt_tokens,
    unpack_chain,
    why_not_followed,
)
from holdfast.policy.retention import Retention
from holdfast.session import LOOK_S, PIN_S, check_seconds
from holdfast.status import NodeStatus
from holdfast.store import page_locks
from holdfast.store.estimates import EngineId, EngineStep
from holdfast.store.lookup import PlannedFetch, PromptTokens
from holdfast.store.plan_log import PLANS_KEPT, PlanEnding
from holdfast.store.save import ChainRun
from holdfast.store.store import Store
from holdfast.wire.local import messages as m
from holdfast.wire.local.peer_check import ConnectedPeer

ENGINE_CHARS_MAX = 80
"""Characters of a peer's name that identify its engine in plans, metrics and logs."""

_GONE_WITHIN_S = 1.0

_log = logging.getLogger(__name__)


class NodeContext(NamedTuple):
    """What the sessions of a node share: store, threads, permitted users, recorder, traces."""

    store: Store
    threads: NodeThreads
    users: PermittedUsers
    recorder: RequestRecorder | None = None
    traces: RequestTraces | None = None
    status: Callable[[], NodeStatus] | None = None
    """Returns the status of the node; default: that of its store."""
    recent: RecentRequests | None = None
    exact: RefusalLog = RefusalLog(_log)
    """Warnings about sessions whose blocks stay exact although their domain asks for a codec."""


class PeerProcess:
    """The process of a connection, watched by pidfd, so that a reused id does not mislead.

    Id 0, or a process in another pid namespace, never ends.
    """

    def __init__(self, pid: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(pid) if pid else -1

    async def gone(self, within_s: float) -> bool:
        """Return whether it ends within this time; False at once if it cannot be watched."""
        if self._fd < 0:
            return False
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not poll.poll(0):
            if loop.time() >= end_s:
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NodeSession:
    """Answers one connection; called from the event loop's thread only."""

    def __init__(self, context: NodeContext, hello: m.Hello, peer: ConnectedPeer) -> None:
        check_hello(hello)
        self._context = context
        self._store = context.store
        self._user = peer.uid
        users, has_namespace = context.users, bool(hello.fingerprint or hello.raw_bytes)
        try:
            users.check_known(self._user)
            if has_namespace:
                users.check_domain(self._user, hello.domain)
            else:
                users.check_operator(self._user)
        except RefusedError as error:
            self._store.audit.deny(f"user {self._user}", str(error))
            raise
        self._leases: set[int] = set()
        self._reservations: dict[int, int] = {}
        self._open_plans = deque[int](maxlen=PLANS_KEPT)
        self._ended = False
        self._locks: SessionLocks | None = None
        self._groups: SessionGroups | None = None
        self._named = False
        engine = printable(hello.peer.partition(" ")[0], ENGINE_CHARS_MAX)
        self._engine = EngineId(engine, hello.fingerprint.hex())
        self.arena_fd: int | None = None
        self.welcome = m.Welcome(m.PROTOCOL, self._store.incarnation, b"", 0)
        if has_namespace:
            self._enter(hello)
        self._process = PeerProcess(peer.pid)
        self._peer = peer
        self.end: Callable[[str], None] = lambda _: None
        """Ends the connection, and tells the peer why; the server sets it."""
        who, fingerprint = (hello.peer[:80], peer.pid), hello.fingerprint.hex()
        if has_namespace:
            named = *who, hello.domain, fingerprint
            _log.info("session peer=%r pid=%d domain=%s fingerprint=%s", *named)
            _log.debug("fingerprint %s is %r", fingerprint, hello.description[:2_000])
        else:  # operators' commands (`inspect`, `top`) connect often, and would fill the log
            _log.debug("session peer=%r pid=%d", *who)

    def _enter(self, hello: m.Hello) -> None:
        """Check the namespace that a peer names, and share its domain's arena with the peer."""
        store = self._store
        try:
            domain_key, domain = store.domain(hello.domain)
        except ConfigError:
            store.audit.deny(f"user {self._user}", f"asked for domain {hello.domain!r}")
            raise
        common_key = b""  # a publisher gets none
        if not store.is_public(domain):
            if hello.publish:
                raise RefusedError(
                    f"domain {hello.domain!r} is not public on this node, so nothing would be "
                    "published; give the engine the public domain, or leave out its publish_file"
                )
            common_key = store.public_key()
        elif not hmac.compare_digest(hello.publish, store.options.publish_token):
            store.audit.deny(f"user {self._user}", f"would publish in domain {hello.domain!r}")
            raise RefusedError(
                f"domain {hello.domain!r} is public: only a publisher opens a session in it; give "
                "its engine the publish_file that the node has"
            )
        groups = SessionGroups(hello, domain)
        for group in groups:
            check_slots(store, hello.domain, group)
        namespace, arena = groups[0].namespace, store.arena(domain)
        self._groups, self._named = groups, hello.named
        for group in groups:
            store.note_element_bytes(group.namespace, group.element_bytes)
        self._engine = self._engine._replace(domain=domain.hex())
        self.arena_fd = arena.fd
        self.welcome = m.Welcome(
            protocol=m.PROTOCOL,
            incarnation=store.incarnation,
            domain_key=domain_key,
            arena_bytes=arena.nbytes,
            common_key=common_key,
            segment_blocks=store.options.segment_blocks,
            chunk_bytes=page_locks.chunk_bytes(store),
            lockable_bytes=page_locks.lockable_bytes(store, namespace),
            lock_requested=page_locks.is_requested(store),
        )

    async def offer_codec(self, hello: m.Hello) -> None:
        """Add to the welcome what the node says about the lossy codec of the session's domain.

        Raises RefusedError if the peer named quantised blocks and they are not permitted.
        """
        if self._groups is None:
            return
        opening, namespace = self._context.threads.opening, self._groups[0].namespace
        offer = await offer_codec(self._store, opening, hello, namespace)
        if offer.why:
            self._context.exact.report(f"domain {hello.domain}", offer.why, offer.why)
        self.welcome = msgspec.structs.replace(
            self.welcome,
            codec=offer.codec,
            codec_version=offer.version,
            exact_because=offer.why,
        )

    def answer(self, request: m.Request) -> m.Reply | Awaitable[m.Reply]:
        """Answer requests that only change state at once; run the others in a thread.

        The server sends a HoldfastError as a refusal with its message.
        """
        match request:
            case m.Cover():
                traces = self._context.traces
                if traces is None:
                    return self._look_up(request)
                return self._look_up_traced(request, traces)
            case m.Find():
                return self._find(request)
            case m.Fetch() | m.Commit() | m.ListKeys():
                return self._answer_in_thread(request)
            case m.Prestage() | m.Pin() | m.Sync() | m.Returns() | m.Closed():
                return self._take_hint(request)
            case m.Release():
                valid = request.lease in self._leases
                self._leases.discard(request.lease)
                return m.Released(valid and self._store.release(request.lease))
            case m.Reserve():
                return self._reserve(request)
            case m.Observed():
                self._entered()
                for plan, _, _ in request.endings:
                    with contextlib.suppress(ValueError):  # an old plan, or of another connection
                        self._open_plans.remove(plan)
                self._store.learn(
                    self._engine,
                    [EngineStep(*step) for step in request.steps],
                    [PlanEnding(*ending) for ending in request.endings],
                    [
                        (plan, why_not_followed(why), first_token_s)
                        for plan, why, first_token_s in request.not_followed
                    ],
                    [prompt_counts(self._store.tier_names(), each) for each in request.prompts],
                )
            case m.Lock() | m.Unlock() | m.AwaitRecall():
                return self._own_locks().answer(request)
            case m.Abort():
                if request.ticket in self._reservations:
                    del self._reservations[request.ticket]
                    self._store.abort(request.ticket, rest_s=0.0)
            case m.Hello():
                raise ProtocolError("hello was already sent; open another connection")
            case _:
                return self._report(request)
        return m.Done()

    def _look_up(self, request: m.Cover) -> m.Reply | Awaitable[m.Reply]:
        """Answer from the index; in a thread if the chain is long or shared tiers must be asked."""
        namespace, keys = self._entered(), unpack_chain(request.keys)
        prompt = prompt_tokens(self._engine, self._peer.pid, request)
        if request.session:
            self._store.follow(namespace, request.session, keys)
        # A prompt is one request: other lookups name no tokens, a repeated one names its plan.
        if request.tokens and not request.plan:
            now_s = time.time()
            if self._context.recorder is not None:
                self._context.recorder.note(recorded(request, namespace, keys, now_s))
            if self._context.recent is not None:
                self._context.recent.note(namespace, request.keys, request.tokens, now_s)
        if not self._entered_groups().is_plain:
            return self._cover_groups(request, prompt)
        common = unpack_chain(request.common)
        if (
            common
            and self._store.options.public_domain
            and self._store.has_public_copies(namespace, keys, common)
        ):
            return self._copy_public(namespace, keys, common, prompt, request.deadline_s)
        if len(keys) > MAX_INLINE_BLOCKS or self._store.asks(namespace, keys):
            return self._ask_shared(namespace, keys, prompt, request.deadline_s)
        return self._plan(namespace, keys, prompt, {})

    def _find(self, request: m.Find) -> m.Reply | Awaitable[m.Reply]:
        """Answer which blocks are held; in a thread if they are many, or on shared tiers."""
        namespace, keys = self._entered(), unpack_chain(request.keys)
        check_seconds("find.deadline_s", request.deadline_s, DEADLINE_S_MAX)
        within_s = request.deadline_s or LOOK_S
        look = partial(self._find_now, namespace, keys, within_s)
        if len(keys) > MAX_INLINE_BLOCKS or self._store.shared_tiers:
            return run_fair(self._context.threads.lookup, self._work_item(len(keys)), look)
        return look()

    def _find_now(self, namespace: Namespace, keys: list[bytes], within_s: float) -> m.Found:
        found = self._store.find(namespace, keys, within_s)
        return m.Found(found.held, {tier: str(why) for tier, why in found.unanswered.items()})

    async def _look_up_traced(self, request: m.Cover, traces: RequestTraces) -> m.Reply:
        began_ns = time.time_ns()
        answer = self._look_up(request)
        reply = await answer if isinstance(answer, Awaitable) else answer
        if isinstance(reply, m.Covered):
            traces.lookup(request, reply, began_ns, time.time_ns())
        return reply

    async def _copy_public(
        self,
        namespace: Namespace,
        keys: list[bytes],
        common: list[bytes],
        prompt: PromptTokens,
        timeout_s: float,
    ) -> m.Reply:
        """Copy the blocks that the public domain holds of the chain, then look up the rest."""
        copy = partial(self._store.copy_public, namespace, keys, common)
        await run_fair(self._context.threads.saving, self._work_item(len(common)), copy)
        if self._store.asks(namespace, keys):
            return await self._ask_shared(namespace, keys, prompt, timeout_s)
        return self._plan(namespace, keys, prompt, {})

    async def _ask_shared(
        self, namespace: Namespace, keys: list[bytes], prompt: PromptTokens, timeout_s: float
    ) -> m.Reply:
        """Look up the chain in shared tiers for at most the engine's timeout, then plan.

        A late lookup that has begun goes on, and its answer serves later requests; one that has not
        begun is cancelled.
        """
        work_item, look = self._work_item(len(keys)), partial(self._store.look, namespace, keys)
        lookup = self._context.threads.lookup.submit(work_item, look)
        await asyncio.wait([asyncio.wrap_future(lookup)], timeout=timeout_s or None)
        if not lookup.cancel() and lookup.done():
            unanswered = lookup.result().unanswered
        else:
            unanswered = dict.fromkeys(self._store.shared_tiers, Outcome.LATE)
        plan = partial(self._plan, namespace, keys, prompt, unanswered)
        if len(keys) > MAX_INLINE_BLOCKS:
            return await run_fair(self._context.threads.lookup, work_item, plan)
        return plan()

    def _plan(
        self,
        namespace: Namespace,
        keys: list[bytes],
        prompt: PromptTokens,
        unanswered: Mapping[str, Outcome],
    ) -> m.Covered:
        planned = self._store.plan_fetch(namespace, keys, prompt, unanswered)
        pending = self._store.pending(namespace, keys, planned.held)
        return self._covered(planned, pending)

    async def _cover_groups(self, request: m.Cover, prompt: PromptTokens) -> m.Covered:
        """Look up a context in several KV groups, as `_ask_shared` does in one, then plan."""
        chains = self._entered_groups().chains(request)
        store, threads = self._store, self._context.threads
        blocks = sum(len(chain.keys) for chain in chains)
        work_item, unanswered = self._work_item(blocks), dict[str, Outcome]()
        if store.shared_tiers:
            look = partial(store.look_groups, chains, prompt.tokens, prompt.have)
            lookup = threads.lookup.submit(work_item, look)
            await asyncio.wait([asyncio.wrap_future(lookup)], timeout=request.deadline_s or None)
            unanswered = dict.fromkeys(store.shared_tiers, Outcome.LATE)
            if not lookup.cancel() and lookup.done():
                unanswered = lookup.result()
        plan = partial(store.plan_groups, chains, prompt, unanswered)
        if blocks > MAX_INLINE_BLOCKS:
            return self._covered(await run_fair(threads.lookup, work_item, plan))
        return self._covered(plan())

    def _covered(self, planned: PlannedFetch, pending: int = 0) -> m.Covered:
        if planned.number:
            self._open_plans.append(planned.number)
        return lookup_answer(planned, pending)

    def ended(self) -> None:
        """Release all leases now, and reservations once it is known whether the engine lives.

        Called once, when the connection ends.
        """
        self._ended = True
        for lease in self._leases:
            self._store.release(lease)
        self._leases.clear()
        self._store.plan_log.engine_gone(self._engine, list(self._open_plans))
        if self._locks is not None:
            self._locks.session_ended()
        if self._reservations or self._locks is not None:
            task = asyncio.ensure_future(self._reclaim())
            task.add_done_callback(lambda _: self._process.close())
        else:
            self._process.close()

    async def _reclaim(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + RECLAIM_S
        gone = await self._process.gone(_GONE_WITHIN_S)
        rest_s = 0.0 if gone else RECLAIM_S
        _log.info("reclaiming reservations=%d rest_s=%g", len(self._reservations), rest_s)
        for ticket in self._reservations:
            self._store.abort(ticket, rest_s=rest_s)
        self._reservations.clear()
        if self._locks is not None:
            if not gone and not await self._process.gone(until_s - loop.time()):
                await asyncio.sleep(max(0.0, until_s - loop.time()))
            self._locks.drop()

    def _own_locks(self) -> SessionLocks:
        """Return the locks of this session; its first request for one makes them."""
        namespace = self._entered()
        if self._locks is None:
            peer = self._peer.pid or self._engine.name
            self._locks = SessionLocks(
                self._store, self._context.threads, namespace, self._engine.name, peer, self._end
            )
        return self._locks

    def _end(self, reason: str) -> None:
        _log.warning("session ended engine=%r: %s", self._engine.name, reason)
        self.end(reason)

    def _entered(self) -> Namespace:
        return self._entered_groups()[0].namespace

    def _entered_groups(self) -> SessionGroups:
        if self._groups is None:
            raise ProtocolError("this session named no namespace at hello; it may only read status")
        return self._groups

    async def _fetch(self, request: m.Fetch) -> m.Fetched:
        namespace = self._entered_groups()[request.group].namespace
        keys = unpack_chain(request.keys)
        check_seconds("fetch.deadline_s", request.deadline_s, DEADLINE_S_MAX)
        store, asked_at = self._store, self._store.clock.now()
        began_ns = time.time_ns()
        fetch = partial(store.fetch, namespace, keys, request.deadline_s)
        item = self._work_item(len(keys))
        item = item._replace(request=item.cost)  # short fetches pass long ones
        fetched = await run_fair(self._context.threads.fetching, item, fetch)
        lease, took_s = fetched.lease, store.clock.now() - asked_at
        store.plan_log.fetched(
            self._engine, request.plan, len(fetched.places), took_s, str(fetched.outcome)
        )
        if self._context.traces is not None:
            self._context.traces.fetch(request, fetched, began_ns, time.time_ns())
        if self._ended or not fetched.places:
            store.release(lease)
            lease = 0
        else:
            self._leases.add(lease)
        return m.Fetched(
            lease, fetched.places, fetched.sources, str(fetched.outcome), fetched.reason
        )

    def _reserve(self, request: m.Reserve) -> m.Reserved:
        group, keys = self._entered_groups()[request.group], unpack_chain(request.keys)
        check_bytes("reserve.parent", request.parent)
        if len(keys) > RESERVE_BLOCKS_MAX:
            raise BlockError(
                f"reserve.keys: {len(keys)} blocks, the limit is {RESERVE_BLOCKS_MAX}; send fewer "
                "at once"
            )
        if not 0 <= request.depth <= CHAIN_BLOCKS_MAX - len(keys):
            raise BlockError(
                f"reserve.depth: {request.depth} plus {len(keys)} blocks is not from 0 to "
                f"{CHAIN_BLOCKS_MAX}"
            )
        if len(request.segment) not in (0, SEGMENT_BYTES):
            raise BlockError(
                f"reserve.segment has {len(request.segment)} bytes, not {SEGMENT_BYTES}"
            )
        under_way = len(self._reservations), sum(self._reservations.values()) + len(keys)
        if under_way[0] >= RESERVATIONS_MAX or under_way[1] > RESERVED_BLOCKS_MAX:
            raise BlockError(
                f"reserve: {under_way[0]} open reservations with {under_way[1]} blocks, these "
                f"included; the limits are {RESERVATIONS_MAX} and {RESERVED_BLOCKS_MAX}; commit or "
                "abort some first"
            )
        run = ChainRun(keys, request.parent, request.depth, request.segment, self._named)
        reserved = self._store.reserve_part(group.namespace, run, group.part)
        self._reservations[reserved.ticket] = len(keys)
        return m.Reserved(reserved.ticket, reserved.places, str(reserved.outcome))

    async def _commit(self, request: m.Commit) -> m.Committed:
        try:
            retention = Retention(request.retention)
        except ValueError as error:
            raise BlockError(
                f"commit.retention: {request.retention[:80]!r} is not one of {', '.join(Retention)}"
            ) from error
        if request.ticket not in self._reservations:
            return m.Committed(0)
        blocks = self._reservations.pop(request.ticket)
        commit = partial(self._store.commit, request.ticket, retention)
        return m.Committed(
            await run_fair(self._context.threads.saving, self._work_item(blocks), commit)
        )

    def _take_hint(
        self, request: m.Prestage | m.Pin | m.Sync | m.Returns | m.Closed
    ) -> m.Hinted | Awaitable[m.Hinted]:
        """Answer a hint; in a thread if it may ask shared tiers, or read."""
        if isinstance(request, m.Closed):
            return m.Hinted(self._store.closed(self._entered().domain, request.session))
        namespace = self._entered_groups()[request.group].namespace
        store, keys = self._store, unpack_chain(request.keys)
        match request:
            case m.Prestage():
                check_seconds("prestage.deadline_s", request.deadline_s, DEADLINE_S_MAX)
                deadline_s = request.deadline_s or LOOK_S
                turn = engine_turn(self._engine, self._peer.pid, request)
                take = partial(store.prestage, namespace, keys, request.in_s, deadline_s, turn)
            case m.Pin():
                check_seconds("pin.deadline_s", request.deadline_s, DEADLINE_S_MAX)
                deadline_s = request.deadline_s or PIN_S
                take = partial(store.pin, namespace, keys, request.ttl_s, deadline_s)
            case m.Sync():
                check_seconds("sync.deadline_s", request.deadline_s, DEADLINE_S_MAX)
                sync = partial(store.sync, namespace, keys, request.deadline_s)
                take = partial(sync, saving=request.saving)
            case m.Returns():
                take = partial(self._take_return, namespace, keys, request)
                if not store.shared_tiers:
                    return m.Hinted(take())
        threads = self._context.threads
        pool = threads.syncing if isinstance(request, m.Sync) else threads.hinting
        return run_fair(pool, self._work_item(len(keys)), lambda: m.Hinted(take()))

    def _take_return(self, namespace: Namespace, keys: list[bytes], request: m.Returns) -> int:
        if keys:
            self._store.follow(namespace, request.session, keys)
        return self._store.returns(namespace.domain, request.session, request.in_s)

    def _answer_in_thread(
        self, request: m.Fetch | m.Commit | m.ListKeys
    ) -> m.Reply | Awaitable[m.Reply]:
        match request:
            case m.Fetch():
                return self._fetch(request)
            case m.Commit():
                return self._commit(request)
            case _:
                return self._list_keys(request)

    async def _list_keys(self, request: m.ListKeys) -> m.ListedKeys:
        check_key_page(request.start, request.limit)
        page = partial(self._store.list_keys, self._entered(), request.start, request.limit)
        found = await run_fair(self._context.threads.lookup, self._work_item(1), page)
        return m.ListedKeys(b"".join(found.keys), found.next)

    def _work_item(self, blocks: int) -> WorkItem:
        """Return a work item of this session's domain for this many blocks."""
        namespace = self._entered()
        return WorkItem(
            namespace.domain, blocks * namespace.slot_bytes, self._store.share(namespace.domain)
        )

    async def _report(self, request: m.Request) -> m.ReportReply:
        """Answer an operator's request about the node as a whole."""
        self._context.users.check_operator(self._user)
        if isinstance(request, m.Plans):  # what an operator asks if every thread waits for a tier
            return m.ReportReply(msgspec.to_builtins(self._store.plans()))
        threads = self._context.threads
        # An erasure must not wait for a long report.
        pool = threads.lookup if isinstance(request, m.Domains) else threads.reporting
        context = self._context
        make = partial(report, context.store, request, context.recent, context.status)
        return m.ReportReply(await run_fair(pool, WorkItem(OPERATOR), make))


async def open_session(context: NodeContext, hello: m.Hello, peer: ConnectedPeer) -> NodeSession:
    """Return the session of a peer, with its whole welcome. Raises HoldfastError if it gets none.

    Waits for at most `quantised.RECORD_S`.
    """
    session = NodeSession(context, hello, peer)
    try:
        await session.offer_codec(hello)
    except BaseException:
        session.ended()
        raise
    return session
