"""One session of a node: an engine's requests, and everything it holds while it is connected.

Leases and tickets belong to the session that got them: no other session can end them, and when the
connection ends they go back. Slots that a vanished engine might still be writing to rest before
anybody else gets them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any, NamedTuple

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.config import DEADLINE_S_MAX
from holdfast.errors import BlockError, ConfigError, ProtocolError, RefusedError
from holdfast.limits import (
    CHAIN_BLOCKS_MAX,
    PAYLOAD_BYTES_MAX,
    RECLAIM_S,
    RESERVE_BLOCKS_MAX,
    TICKET_BLOCKS_MAX,
    TICKETS_MAX,
)
from holdfast.node import hinted
from holdfast.node.bounds import (
    BLOCK_TOKENS_MAX,
    JUDGED_HERE_BLOCKS,
    check_bytes,
    check_hello,
    check_within,
    keys_of,
    prompt_of,
    wish_of,
)
from holdfast.node.process import Process
from holdfast.node.recorder import Recorder, asked_of
from holdfast.node.threads import OPERATOR, Threads, run, take_turn
from holdfast.node.users import Users
from holdfast.policy.turns import Turn
from holdfast.store.cover import Judged, Prompt
from holdfast.store.judgement import Ending, Engine, Step
from holdfast.store.store import Store
from holdfast.wire import messages as m
from holdfast.wire.server import Peer

_GONE_WITHIN_S = 1.0

_log = logging.getLogger(__name__)


class House(NamedTuple):
    """What the sessions of a node share: its store and threads, who may come in, who notes it."""

    store: Store
    threads: Threads
    users: Users
    recorder: Recorder | None = None


class NodeSession:
    """Answers one connection; see `holdfast.wire.server.Answering`."""

    def __init__(self, house: House, hello: m.Hello, peer: Peer) -> None:
        check_hello(hello)
        store = house.store
        self._store = store
        self._threads = house.threads
        self._recorder = house.recorder
        self._users = house.users
        self._user = peer.uid
        self._check_user(hello)
        self._leases: set[int] = set()
        self._tickets: dict[int, int] = {}
        self._ended = False
        self._world: World | None = None
        self._engine = Engine(hello.peer.partition(" ")[0][:80], hello.fingerprint.hex())
        self.arena_fd: int | None = None
        self.welcome = m.Welcome(m.PROTOCOL, store.incarnation, b"", 0)
        if hello.fingerprint or hello.payload_bytes:
            self._enter(hello)
        self._process = Process(peer.pid)
        _log.info("session peer=%r pid=%d %r", hello.peer[:80], peer.pid, hello.description[:200])

    def _check_user(self, hello: m.Hello) -> None:
        """Refuse a user who may not do what the peer means to."""
        try:
            self._users.check_known(self._user)
            if hello.fingerprint or hello.payload_bytes:
                self._users.check_enters(self._user, hello.domain)
            else:
                self._users.check_looks(self._user)
        except RefusedError as error:
            self._store.audit.deny(f"user {self._user}", str(error))
            raise

    def _enter(self, hello: m.Hello) -> None:
        """Check the world that a peer names, and lend it its domain's arena."""
        check_bytes("hello.fingerprint", hello.fingerprint)
        check_within("hello.payload_bytes", hello.payload_bytes, PAYLOAD_BYTES_MAX)
        check_within("hello.block_tokens", hello.block_tokens, BLOCK_TOKENS_MAX)
        try:
            domain_key, domain = self._store.domain(hello.domain)
        except ConfigError:
            self._store.audit.deny(f"user {self._user}", f"asked for domain {hello.domain!r}")
            raise
        common_key = self._check_publisher(hello, domain)
        world = World(hello.fingerprint, domain, hello.payload_bytes, hello.block_tokens)
        arena = self._store.arena(domain)
        if world.record_bytes > arena.nbytes:
            raise BlockError(
                f"hello.payload_bytes: one block takes {world.record_bytes} bytes, the host tier "
                f"has {arena.nbytes}; raise tiers.0.capacity"
            )
        self._check_quotas(hello.domain, world)
        self._world = world
        self._engine = self._engine._replace(domain=domain.hex())
        self.arena_fd = arena.fd
        incarnation = self._store.incarnation
        self.welcome = m.Welcome(
            *(m.PROTOCOL, incarnation, domain_key, arena.nbytes),
            common_key=common_key,
            segment_blocks=self._store.states.segment_blocks,
        )

    def _check_publisher(self, hello: m.Hello, domain: bytes) -> bytes:
        """Return the public domain's key for a reader; who would write there must show a token."""
        store = self._store
        if domain != store.states.public:
            return store.public_key()
        if not hmac.compare_digest(hello.publish, store.publisher):
            store.audit.deny(f"user {self._user}", f"would publish in domain {hello.domain!r}")
            raise RefusedError(
                f"domain {hello.domain!r} is public: only a publisher opens a session in it; give "
                "its engine the publish_file that the node has"
            )
        return b""

    def _check_quotas(self, name: str, world: World) -> None:
        """Refuse a world of which not one block fits its domain's quotas."""
        for tier, most in self._store.quotas(world.domain).items():
            if world.record_bytes > most:
                raise BlockError(
                    f"hello.payload_bytes: one block takes {world.record_bytes} bytes, the quota "
                    f"of domain {name!r} on {tier} is {most}; raise "
                    f"domains.{name}.quota_bytes.{tier}"
                )

    def answer(self, request: m.Request) -> m.Reply | Awaitable[m.Reply]:
        """Answer what only changes state at once; hand the rest to a thread."""
        match request:
            case m.Cover():
                return self._cover(request)
            case m.Fetch():
                return self._fetch(request)
            case m.Commit():
                return self._commit(request)
            case m.Prestage() | m.Pin():
                return self._bring(request)
            case (
                m.Status()
                | m.Members()
                | m.List()
                | m.Plans()
                | m.Verify()
                | m.Drop()
                | m.Domains()
            ):
                return self._look(request)
            case _:
                return self._change(request)

    def _cover(self, request: m.Cover) -> m.Reply | Awaitable[m.Reply]:
        """Answer from the index; in a thread where it takes long, or shared tiers know the rest."""
        world, keys = self._entered(), keys_of(request.keys)
        prompt = prompt_of(self._engine, request)
        self._store.follow(world, request.session, keys)
        if self._recorder is not None and not request.plan:
            self._recorder.note(asked_of(request, world, keys, time.time()))
        common = keys_of(request.common)
        if common and self._store.states.public and self._store.borrowable(world, keys, common):
            return self._borrow(world, keys, common, prompt)
        if len(keys) > JUDGED_HERE_BLOCKS or self._store.asks(world, keys):
            return self._look_further(world, keys, prompt, request.deadline_s)
        return _covered(self._store.judge(world, keys, prompt))

    async def _borrow(
        self, world: World, keys: list[bytes], common: list[bytes], prompt: Prompt
    ) -> m.Reply:
        borrow = partial(self._store.borrow, world, keys, common)
        await take_turn(self._threads.saving, self._turn(len(common)), borrow)
        return _covered(self._store.judge(world, keys, prompt))

    async def _look_further(
        self, world: World, keys: list[bytes], prompt: Prompt, within_s: float
    ) -> m.Reply:
        """Wait for the shared tiers as long as the engine does; they may answer for others yet."""
        turn, look = self._turn(len(keys)), partial(self._store.look, world, keys)
        looking = self._threads.asking.submit(turn, look)
        await asyncio.wait([asyncio.wrap_future(looking)], timeout=within_s or None)
        if not looking.cancel() and looking.done():
            looking.result()
        judge = partial(self._store.judge, world, keys, prompt)
        if len(keys) > JUDGED_HERE_BLOCKS:
            return _covered(await take_turn(self._threads.asking, turn, judge))
        return _covered(judge())

    def _change(self, request: m.Request) -> m.Reply:
        match request:
            case m.Release():
                return m.Released(self._release(request.lease))
            case m.Reserve():
                return self._reserve(request)
            case m.Observed():
                return self._learn(request)
            case m.Closed() | m.Returns():
                keys = keys_of(request.keys) if isinstance(request, m.Returns) else []
                return hinted.take(self._store, self._entered(), keys, request)
            case m.Abort():
                if request.ticket in self._tickets:
                    del self._tickets[request.ticket]
                    self._store.abort(request.ticket, rest_s=0.0)
                return m.Done()
            case _:
                raise ProtocolError("hello was said already; open another connection")

    def ended(self) -> None:
        """Give everything back; tickets once it is known whether their writer lives."""
        self._ended = True
        for lease in self._leases:
            self._store.release(lease)
        self._leases.clear()
        if self._tickets:
            task = asyncio.ensure_future(self._reclaim())
            task.add_done_callback(lambda _: self._process.close())
        else:
            self._process.close()

    async def _reclaim(self) -> None:
        rest_s = 0.0 if await self._process.gone(_GONE_WITHIN_S) else RECLAIM_S
        _log.info("reclaiming tickets=%d rest_s=%g", len(self._tickets), rest_s)
        for ticket in self._tickets:
            self._store.abort(ticket, rest_s=rest_s)
        self._tickets.clear()

    def _entered(self) -> World:
        if self._world is None:
            raise ProtocolError("this session named no world at hello; it may only look")
        return self._world

    async def _fetch(self, request: m.Fetch) -> m.Fetched:
        world, keys = self._entered(), keys_of(request.keys)
        if not 0 <= request.deadline_s <= DEADLINE_S_MAX:
            raise ProtocolError(
                f"fetch.deadline_s: {request.deadline_s:g} is not from 0 to {DEADLINE_S_MAX:g}"
            )
        store, asked_at = self._store, self._store.clock.now()
        fetch = partial(store.fetch, world, keys, request.deadline_s)
        fetched = await take_turn(self._threads.fetching, self._turn(len(keys)), fetch)
        lease, took_s = fetched.lease, store.clock.now() - asked_at
        store.judgement.fetched(
            self._engine, request.plan, len(fetched.places), took_s, str(fetched.outcome)
        )
        if self._ended or not fetched.places:
            store.release(lease)
            lease = 0
        else:
            self._leases.add(lease)
        return m.Fetched(
            lease, fetched.places, fetched.sources, str(fetched.outcome), fetched.reason
        )

    def _learn(self, request: m.Observed) -> m.Done:
        self._entered()
        steps = [Step(*step) for step in request.steps]
        self._store.told(self._engine, steps, [Ending(*ending) for ending in request.endings])
        return m.Done()

    def _release(self, lease: int) -> bool:
        if lease not in self._leases:
            return False
        self._leases.remove(lease)
        return self._store.release(lease)

    def _reserve(self, request: m.Reserve) -> m.Reserved:
        world, keys = self._entered(), keys_of(request.keys)
        check_bytes("reserve.parent", request.parent)
        if len(keys) > RESERVE_BLOCKS_MAX:
            raise BlockError(
                f"reserve.keys: {len(keys)} blocks, the limit is {RESERVE_BLOCKS_MAX}; send fewer "
                "at once"
            )
        if not 0 <= request.depth <= CHAIN_BLOCKS_MAX - len(keys):
            raise BlockError(
                f"reserve.depth: {request.depth} and {len(keys)} blocks more are not from 0 to "
                f"{CHAIN_BLOCKS_MAX}"
            )
        if len(request.segment) not in (0, SEGMENT_BYTES):
            raise BlockError(
                f"reserve.segment has {len(request.segment)} bytes, not {SEGMENT_BYTES}"
            )
        under_way = len(self._tickets), sum(self._tickets.values()) + len(keys)
        if under_way[0] >= TICKETS_MAX or under_way[1] > TICKET_BLOCKS_MAX:
            raise BlockError(
                f"reserve: {under_way[0]} tickets with {under_way[1]} blocks, these included, are "
                f"neither committed nor aborted; the limits are {TICKETS_MAX} and "
                f"{TICKET_BLOCKS_MAX}; end some first"
            )
        reserved = self._store.reserve(world, keys, request.parent, request.depth, request.segment)
        self._tickets[reserved.ticket] = len(keys)
        return m.Reserved(reserved.ticket, reserved.places, str(reserved.outcome))

    async def _commit(self, request: m.Commit) -> m.Committed:
        retention, ticket = hinted.retention(request.retention), request.ticket
        if ticket not in self._tickets:
            return m.Committed(0)
        blocks, commit = self._tickets.pop(ticket), partial(self._store.commit, ticket, retention)
        return m.Committed(await take_turn(self._threads.saving, self._turn(blocks), commit))

    async def _bring(self, request: m.Prestage | m.Pin) -> m.Hinted:
        world, keys = self._entered(), keys_of(request.keys)
        return await run(self._threads.looking, hinted.bring, self._store, world, keys, request)

    def _turn(self, blocks: int) -> Turn:
        """Return this session's turn among the domains, for work on so many blocks."""
        world = self._entered()
        return Turn(world.domain, blocks * world.record_bytes, self._store.share(world.domain))

    async def _look(self, request: m.Request) -> m.Report:
        self._users.check_looks(self._user)
        store, data = self._store, dict[str, object]()
        looking = self._threads.looking
        match request:
            case m.List():
                data["blocks"] = await run(looking, store.listing)
            case m.Plans():
                data |= store.judgement.plans()
            case m.Members():
                data |= await run(looking, store.shared)
            case m.Verify():
                data |= await run(looking, store.verify, wish_of(request))
            case m.Domains():  # not behind a long look: to erase is urgent
                data |= await take_turn(
                    self._threads.asking, Turn(OPERATOR), partial(_domains, store, request)
                )
            case m.Drop():
                data |= await run(looking, store.drop, request.fingerprint)
            case _:
                data |= await run(looking, store.status)
        return m.Report(data)


def _domains(store: Store, request: m.Domains) -> dict[str, Any]:
    match request.action:
        case "rotate":
            return store.rotate(request.name)
        case "retire":
            return store.retire(request.name)
        case "erase":
            return store.erase(request.name)
        case _:
            return store.domains()


def _covered(judged: Judged) -> m.Covered:
    plan = judged.plan
    return m.Covered(
        judged.held,
        plan.blocks,
        judged.sources,
        judged.number,
        plan.deadline_s,
        plan.expected_s,
        plan.recompute_s,
        plan.reason,
    )
