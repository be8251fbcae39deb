"""The client of a store in this process: it answers a node's messages without a socket.

So an engine uses an embedded store with the code that uses a node, plans and leases included.
Requests that may read, write or ask other nodes run on threads; the others are answered at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from holdfast.blocks.fingerprint import Attention, Fingerprint, KvGroup
from holdfast.blocks.group_rules import GroupRule
from holdfast.blocks.key import unpack_keys
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import SharedMapping
from holdfast.client.lookup_answer import lookup_answer
from holdfast.errors import (
    BlockError,
    HoldfastError,
    NodeGoneError,
    Outcome,
    ProtocolError,
    RefusedError,
    StoreClosedError,
)
from holdfast.plan.cost import QueuedPrefill
from holdfast.policy.retention import Retention
from holdfast.session import LOOK_S, PIN_S
from holdfast.store import lookup
from holdfast.store.activity import PromptCounts
from holdfast.store.estimates import EngineId, EngineStep
from holdfast.store.group_lookup import GroupChain
from holdfast.store.hints import EngineTurn
from holdfast.store.lookup import PromptTokens
from holdfast.store.plan_log import PLANS_KEPT, PlanEnding
from holdfast.store.save import ChainRun
from holdfast.store.store import Store
from holdfast.wire.local import messages as m

T = TypeVar("T")

THREADS = 8
"""Requests of one client that run at once; later ones wait."""


class _EmbeddedGroup(NamedTuple):
    """One KV group of a session; `part`: the ranges of each payload that the session writes."""

    namespace: Namespace
    rule: GroupRule
    part: bytes
    element_bytes: int

    @classmethod
    def of(cls, domain: bytes, group: m.GroupHello) -> _EmbeddedGroup:
        """Return a group as a hello names it."""
        size = group.block_tokens
        attention: Attention = group.attention  # type: ignore[assignment]  # `KvGroup` checks it
        rule = GroupRule.of(KvGroup(attention, group.window, (0,)), size)
        namespace = Namespace(group.fingerprint, domain, group.raw_bytes, size)
        return cls(namespace, rule, group.part, group.element_bytes)


def _first_group(hello: m.Hello) -> m.GroupHello:
    return m.GroupHello(
        fingerprint=hello.fingerprint,
        raw_bytes=hello.raw_bytes,
        block_tokens=hello.block_tokens,
        attention=hello.attention,
        window=hello.window,
        part=hello.part,
        element_bytes=hello.element_bytes,
    )


class EmbeddedClient:
    """See `StoreClient`; `hello` names the namespace, as it does for a node.

    `fingerprints`: those of the namespaces, quantised if the domain asks for it.
    """

    def __init__(self, store: Store, hello: m.Hello, fingerprints: Sequence[Fingerprint]) -> None:
        self.address = "embedded"
        self.refused = False
        self._store = store
        domain_key, domain = store.domain(hello.domain)
        self._groups = [
            _EmbeddedGroup.of(domain, each) for each in (_first_group(hello), *hello.more_groups)
        ]
        arena = store.arena(domain)
        for group, fingerprint in zip(self._groups, fingerprints, strict=True):
            if group.namespace.slot_bytes > arena.nbytes:
                raise BlockError(
                    f"one block takes {group.namespace.slot_bytes} bytes, the host tier has "
                    f"{arena.nbytes}; raise tiers.0.capacity, or open the store with a larger host"
                )
            store.quantise.enter(group.namespace, fingerprint)
            store.note_element_bytes(group.namespace, group.element_bytes)
        rules = [group.rule for group in self._groups]
        self._is_plain = len(rules) == 1 and rules[0].attention == "full"
        self.arena: SharedMapping | None = arena.mapping
        self.welcome = m.Welcome(
            protocol=m.PROTOCOL,
            incarnation=store.incarnation,
            domain_key=domain_key,
            arena_bytes=arena.nbytes,
            segment_blocks=store.options.segment_blocks,
        )
        name = hello.peer.partition(" ")[0]
        self._engine = EngineId(name, hello.fingerprint.hex(), domain.hex())
        self._threads = ThreadPoolExecutor(THREADS, "holdfast-embedded")
        self._lock = threading.Lock()
        self._last_id = 0
        self._pending: dict[int, Future[m.Reply]] = {}
        self._questions = set[int]()
        """Requests that need no answer if nobody waits for one."""
        self._leases = set[int]()
        self._reservations = set[int]()
        self._open_plans = deque[int](maxlen=PLANS_KEPT)
        self._closed = False

    def client(self) -> EmbeddedClient | None:
        """Return this client while it and the store are open: it is its own connection."""
        return self if self.connected() else None

    def connected(self) -> bool:
        """Return whether this client and the store are open."""
        return not (self._closed or self._store.gone)

    def send(self, message: m.Request) -> int:
        """Begin to answer a request; return its id."""
        self._check_open()
        answer = partial(self._answer, message)
        if isinstance(message, m.Release | m.Reserve | m.Abort):
            reply: Future[m.Reply] = Future()
            try:
                reply.set_result(answer())
            except HoldfastError as error:
                reply.set_exception(error)
        else:
            try:
                reply = self._threads.submit(answer)
            except RuntimeError as error:
                raise NodeGoneError("this client was closed") from error
        with self._lock:
            self._last_id += 1
            self._pending[self._last_id] = reply
            if isinstance(message, m.Cover | m.Fetch):
                self._questions.add(self._last_id)
            return self._last_id

    def poll(self, request_id: int) -> m.Reply | None:
        """Return the reply if it is there, else None; never waits."""
        reply = self._reply(request_id)
        return self._take(request_id) if reply.done() else None

    def expect(self, request_id: int, within_s: float) -> m.Reply | None:
        """Return the reply if it comes within this time, else None."""
        with contextlib.suppress(TimeoutError, HoldfastError):  # `poll` raises what it raised
            self._reply(request_id).result(within_s)
        return self.poll(request_id)

    def wait(self, request_id: int, timeout_s: float) -> m.Reply:
        """Return the reply; raise NodeGoneError if it does not come within `timeout_s`."""
        reply = self.expect(request_id, timeout_s)
        if reply is None:
            self.forget(request_id)
            raise NodeGoneError(f"the store did not answer within {timeout_s:g} s")
        return reply

    def call(self, message: m.Request, kind: type[T], timeout_s: float) -> T:
        """Answer a request in the caller's thread; return a reply of this kind."""
        del timeout_s  # the request's own deadline bounds the call
        self._check_open()
        reply = self._answer(message)
        if not isinstance(reply, kind):
            raise ProtocolError(f"the store answered {reply!r:.200}, not {kind.__name__}")
        return reply

    def node_is_runnable(self) -> bool:
        """Return False: there is no other process to wait for."""
        return False

    def forget(self, request_id: int) -> None:
        """Discard a reply; a lease or reservation that it grants goes back.

        A question that no thread answers yet is not answered; other requests are carried out.
        """
        with self._lock:
            reply = self._pending.pop(request_id, None)
            is_question = request_id in self._questions
            self._questions.discard(request_id)
        if reply is not None and not (is_question and reply.cancel()):
            reply.add_done_callback(self._discard)

    def close(self) -> None:
        """End the session: its leases and reservations go back to the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for lease in list(self._leases):
            self._store.release(lease)
        for number in list(self._reservations):
            self._store.abort(number)
        self._store.plan_log.engine_gone(self._engine, list(self._open_plans))

    def _check_open(self) -> None:
        if not self.connected():
            raise NodeGoneError(self._store.gone or "this client was closed")

    def _reply(self, request_id: int) -> Future[m.Reply]:
        with self._lock:
            reply = self._pending.get(request_id)
        if reply is None:
            raise ValueError(f"request {request_id} was not sent, or its reply was taken")
        return reply

    def _take(self, request_id: int) -> m.Reply:
        with self._lock:
            reply = self._pending.pop(request_id)
            self._questions.discard(request_id)
        return reply.result()

    def _discard(self, reply: Future[m.Reply]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        granted = reply.result()
        if isinstance(granted, m.Fetched):
            self._release(granted.lease)
        elif isinstance(granted, m.Reserved):
            self._abort(granted.ticket)

    def _answer(self, request: m.Request) -> m.Reply:
        """Answer a request; raises NodeGoneError once the store is closed, else RefusedError."""
        try:
            return self._answer_open(request)
        except StoreClosedError as error:
            raise NodeGoneError(str(error)) from error
        except NodeGoneError:
            raise
        except HoldfastError as error:
            raise RefusedError(str(error)) from error

    def _answer_open(self, request: m.Request) -> m.Reply:
        match request:
            case m.Cover():
                return self._cover(request)
            case m.Fetch():
                return self._fetch(request)
            case m.Release():
                return m.Released(self._release(request.lease))
            case m.Reserve():
                return self._reserve(request)
            case m.Commit():
                return self._commit(request)
            case m.Abort():
                self._abort(request.ticket)
                return m.Done()
            case m.Observed():
                return self._learn(request)
            case m.Prestage() | m.Pin() | m.Sync() | m.Returns() | m.Closed():
                return m.Hinted(self._hint(request))
            case _:
                raise RefusedError(f"an embedded store does not answer {type(request).__name__}")

    def _cover(self, request: m.Cover) -> m.Covered:
        store, namespace, keys = self._store, self._groups[0].namespace, unpack_keys(request.keys)
        if request.session:
            store.follow(namespace, request.session, keys)
        prompt = PromptTokens(
            *(self._engine, request.tokens, request.have, request.limit_s, request.plan),
            QueuedPrefill(request.queued_tokens, request.queued_pairs),
            request.to_load,
        )
        within_s = request.deadline_s or LOOK_S
        if self._is_plain:
            look = partial(lookup.ask_in_time, store, namespace, keys, within_s)
            planned = store.plan_fetch(namespace, keys, prompt, self._run(look).unanswered)
            pending = store.pending(namespace, keys, planned.held)
        else:
            packed = [request.keys, *request.more_keys]
            chains = [
                GroupChain(group.namespace, group.rule, unpack_keys(each))
                for group, each in zip(self._groups, packed, strict=True)
            ]
            unanswered = store.look_groups(chains, prompt.tokens, prompt.have, within_s)
            planned, pending = store.plan_groups(chains, prompt, unanswered), 0
        if planned.number:
            self._open_plans.append(planned.number)
        return lookup_answer(planned, pending)

    def _fetch(self, request: m.Fetch) -> m.Fetched:
        store, namespace = self._store, self._groups[request.group].namespace
        asked_at = store.clock.now()
        fetched = store.fetch(namespace, unpack_keys(request.keys), request.deadline_s)
        took_s, outcome = store.clock.now() - asked_at, str(fetched.outcome)
        landed = len(fetched.places)
        store.plan_log.fetched(self._engine, request.plan, landed, took_s, outcome)
        lease = fetched.lease
        if not landed or self._closed:
            store.release(lease)
            lease = 0
        else:
            self._leases.add(lease)
        return m.Fetched(lease, fetched.places, fetched.sources, outcome, fetched.reason)

    def _release(self, lease: int) -> bool:
        if lease not in self._leases:
            return False
        self._leases.discard(lease)
        return self._store.release(lease)

    def _reserve(self, request: m.Reserve) -> m.Reserved:
        keys = unpack_keys(request.keys)
        run = ChainRun(keys, request.parent, request.depth, request.segment)
        group = self._groups[request.group]
        reserved = self._store.reserve_part(group.namespace, run, group.part)
        if reserved.outcome is Outcome.GONE:
            raise NodeGoneError(self._store.gone)
        self._reservations.add(reserved.ticket)
        return m.Reserved(reserved.ticket, reserved.places, str(reserved.outcome))

    def _commit(self, request: m.Commit) -> m.Committed:
        if request.ticket not in self._reservations:
            return m.Committed(0)
        self._reservations.discard(request.ticket)
        return m.Committed(self._store.commit(request.ticket, Retention(request.retention)))

    def _abort(self, number: int) -> None:
        if number in self._reservations:
            self._reservations.discard(number)
            self._store.abort(number)

    def _learn(self, request: m.Observed) -> m.Done:
        for plan, _, _ in request.endings:
            with contextlib.suppress(ValueError):
                self._open_plans.remove(plan)
        self._store.learn(
            self._engine,
            [EngineStep(*step) for step in request.steps],
            [PlanEnding(*ending) for ending in request.endings],
            [],
            [PromptCounts(*prompt) for prompt in request.prompts],
        )
        return m.Done()

    def _hint(self, request: m.Prestage | m.Pin | m.Sync | m.Returns | m.Closed) -> int:
        store = self._store
        if isinstance(request, m.Closed):
            return store.closed(self._groups[0].namespace.domain, request.session)
        namespace = self._groups[request.group].namespace
        keys = unpack_keys(request.keys)
        match request:
            case m.Prestage():
                within_s = request.deadline_s or LOOK_S
                queued = QueuedPrefill(request.queued_tokens, request.queued_pairs)
                turn = EngineTurn(self._engine, queued) if request.queued else None
                return store.prestage(namespace, keys, request.in_s, within_s, turn)
            case m.Pin():
                return store.pin(namespace, keys, request.ttl_s, request.deadline_s or PIN_S)
            case m.Sync():
                return store.sync(namespace, keys, request.deadline_s)
            case m.Returns():
                if keys:
                    store.follow(namespace, request.session, keys)
                return store.returns(namespace.domain, request.session, request.in_s)

    def _run(self, work: Callable[[], T]) -> T:
        """Run work on the threads of the store's state, if it has them."""
        if self._store.gone:
            raise StoreClosedError(self._store.gone)
        return self._store.calls.run(work)
