"""The page locks of one connected engine: grants, recalls with a deadline, and the end of locks.

The node answers a `Lock` when the memory is populated, and the engine locks it then. When the node
wants memory back, it answers the waiting `AwaitRecall`. An engine that has not unlocked it within
`LOCK_RECALL_S` loses its session: then its leases and reservations are void, so nothing that its
GPU copies is used. The locks count until the process is gone, or `RECLAIM_S` after the session.
An engine that has sent no `AwaitRecall` yet is starting, and has `LOCK_START_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial

from holdfast.blocks.namespace import Namespace
from holdfast.errors import RefusedError, printable
from holdfast.fairness.fair_queue import WorkItem
from holdfast.limits import LOCK_CHUNKS_MAX, LOCK_RECALL_S, LOCK_START_S
from holdfast.node.local.threads import NodeThreads, run_fair
from holdfast.store import page_locks
from holdfast.store.store import Store
from holdfast.wire.local import messages as m

_FAILURE_CHARS_MAX = 300

_log = logging.getLogger(__name__)


class SessionLocks:
    """The locks of one session; a `LockHolder`. Runs on the event loop, except for `recall`.

    `peer` identifies the engine's process in later sessions. `end` ends the session for a reason.
    """

    def __init__(
        self,
        store: Store,
        threads: NodeThreads,
        namespace: Namespace,
        engine: str,
        peer: Hashable,
        end: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.failure = ""
        self._store = store
        self._threads = threads
        self._namespace = namespace
        self._peer = peer
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._granting: set[int] = set()
        """Chunks that are being populated, so the engine does not know of their grant."""
        self._asked: list[int] = []
        """Chunks that are asked back, and not yet in an answer to the engine."""
        self._open: dict[int, tuple[set[int], asyncio.TimerHandle]] = {}
        """Recalls by number: the chunks that the engine has not returned, and the deadline."""
        self._recalls = 0
        self._recall_s = LOCK_START_S
        self._waiting: asyncio.Future[m.Recall] | None = None
        self._ended = False

    def answer(self, request: m.Lock | m.Unlock | m.AwaitRecall) -> m.Reply | Awaitable[m.Reply]:
        """Answer a request about locks."""
        match request:
            case m.Lock():
                return self._lock(request)
            case m.Unlock():
                return self._unlock_for(request)
            case m.AwaitRecall():
                return self._await_recall()

    async def _lock(self, request: m.Lock) -> m.Locked:
        """Grant locks, and answer when their memory is populated."""
        if self._store.table.recalls.refuses(self._peer):
            return m.Locked([])
        most = min(max(request.most, 0), LOCK_CHUNKS_MAX)
        granted = page_locks.lock(self._store, self._namespace, request.chunks, self, most)
        self._granting.update(granted)
        item = WorkItem(
            self._namespace.domain,
            len(granted) * page_locks.chunk_bytes(self._store),
            self._store.share(self._namespace.domain),
        )
        work = partial(page_locks.populate, self._store, self._namespace, granted)
        try:
            await run_fair(self._threads.hinting, item, work)
        except BaseException:
            self._unlock([chunk for chunk in granted if chunk in self._granting])
            raise
        granted = [chunk for chunk in granted if chunk in self._granting]
        self._granting.difference_update(granted)
        return m.Locked(granted)

    def _unlock_for(self, request: m.Unlock) -> m.Done:
        """End locks that the engine has ended."""
        if request.failure:
            self.failure = printable(request.failure, _FAILURE_CHARS_MAX)
            _log.warning("engine %r does not lock memory: %s", self.engine, self.failure)
        self._unlock(request.chunks)
        return m.Done()

    def _await_recall(self) -> asyncio.Future[m.Recall]:
        """Return the next recall, when there is one."""
        if self._waiting is not None and not self._waiting.done():
            raise RefusedError("a session waits for one recall at a time; wait for its answer")
        if self._recall_s != LOCK_RECALL_S:
            self._recall_s = LOCK_RECALL_S
            for number, (left, deadline) in self._open.items():
                deadline.cancel()
                self._open[number] = left, self._deadline(number)
        self._waiting = self._loop.create_future()
        self._answer()
        return self._waiting

    def recall(self, chunks: Sequence[int]) -> None:
        """Ask the engine for chunks; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the node is ending
            self._loop.call_soon_threadsafe(self._recall, list(chunks))

    def session_ended(self) -> None:
        """Stop recalls: the session is over."""
        self._end_recalls()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()

    def drop(self) -> None:
        """End all locks: the process is gone, or had `RECLAIM_S` to end its copies."""
        page_locks.leave(self._store, self._namespace, self)

    def _unlock(self, chunks: Sequence[int]) -> None:
        self._granting.difference_update(chunks)
        page_locks.unlock(self._store, self._namespace, chunks, self)
        for number, (left, deadline) in list(self._open.items()):
            left.difference_update(chunks)
            if not left:
                deadline.cancel()
                del self._open[number]
                self._store.table.recalls.outcomes["returned"] += 1

    def _recall(self, chunks: list[int]) -> None:
        if self._ended:
            return
        unknown = [chunk for chunk in chunks if chunk in self._granting]
        self._unlock(unknown)
        held = {*page_locks.locked_by(self._store, self._namespace, self)}.intersection(chunks)
        if not held:
            return
        self._recalls += 1
        self._open[self._recalls] = held, self._deadline(self._recalls)
        self._asked += sorted(held)
        self._answer()

    def _deadline(self, number: int) -> asyncio.TimerHandle:
        return self._loop.call_later(self._recall_s, self._missed, number)

    def _answer(self) -> None:
        """Answer the request that waits for a recall, if there is one and chunks are asked back."""
        if self._waiting is None or self._waiting.done() or not self._asked:
            return
        chunks, self._asked = self._asked[:LOCK_CHUNKS_MAX], self._asked[LOCK_CHUNKS_MAX:]
        self._waiting.set_result(m.Recall(chunks, LOCK_RECALL_S))

    def _end_recalls(self) -> None:
        self._ended = True
        for _, deadline in self._open.values():
            deadline.cancel()
            self._store.table.recalls.outcomes["ended"] += 1
        self._open.clear()

    def _missed(self, number: int) -> None:
        """End the session; recalls that are open beside this one are not missed too."""
        left, _ = self._open.pop(number)
        self._end_recalls()
        nbytes = len(left) * page_locks.chunk_bytes(self._store)
        self._store.table.recalls.missed(self._peer, self._store.clock.now())
        self._end(
            f"the engine did not unlock {nbytes} bytes of memory within {self._recall_s:g} s; it "
            "copies without page-locked memory after two such failures in an hour"
        )
