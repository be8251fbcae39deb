"""Page-locked memory of an engine: chunks of the node's arena that its device copies at full speed.

The node grants locks and asks for them back (`holdfast.node.local.page_locks`). A chunk is *asked*
for, then *locked*; when the node *recalls* it, no new batch uses it, and it is unlocked when the
batches that use it have ended. Copies of all other memory go through the device's own buffers.

Locking takes milliseconds and locks of the driver, so one thread does it, a chunk a call, with
pauses. It looks for the node's replies every `POLL_S` and never waits for one: a thread that waits
receives for all threads of the engine, and then each of their replies needs its turn at the GIL.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

from holdfast.buffers import Registrar, SharedMapping
from holdfast.errors import HoldfastError, NodeGoneError, ProtocolError
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import AwaitRecall, Lock, Locked, Recall, Unlock

T = TypeVar("T")

POLL_S = 0.1
"""Interval at which the node's replies are looked for."""

CHUNKS_AT_ONCE = 32
"""Maximum chunks in one request: the node populates them all before it answers."""

PAUSE_TIMES = 4
"""Pause after locking a chunk, in times of its duration, in which others use the driver."""

START_S = 2.0
"""Default time for locking at an engine's start, without pauses."""

ASK_AGAIN_S = 5.0
"""Time after which a chunk that the node did not grant is asked for again."""

END_S = 10.0
"""Longest wait for batches when locks end; memory that is still in use then stays locked."""

_START_POLL_S = 0.002

_log = logging.getLogger(__name__)

_unreleased: list[SharedMapping] = []
"""Mappings that could not be unlocked; they stay mapped, because the device may still use them."""


class _State(enum.Enum):
    ASKED = enum.auto()
    LOCKED = enum.auto()
    RECALLED = enum.auto()


class LockedMemory:
    """The page-locked chunks of one client's arena. Any thread may call any method.

    A range is an offset in the arena and a number of bytes. `chunk_bytes`: a copy of locked memory
    must not cross a multiple of it, because each chunk is locked by itself; 0: the node grants no
    locks. `failure`: why memory is not locked, with the remedy; empty if it is, or will be.
    `lock_seconds`: time spent in the driver.

    The node's arena stays mapped until `close`, or until the connection has ended and every chunk
    is unlocked.
    """

    def __init__(self, client: Client, registrar: Registrar) -> None:
        welcome = client.welcome
        self.chunk_bytes = welcome.chunk_bytes if client.arena is not None else 0
        self.failure = ""
        self.lock_seconds = 0.0
        self._client = client
        self._registrar = registrar
        self._arena = client.arena
        self._start = client.arena.address if client.arena is not None else 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._states: dict[int, _State] = {}
        self._uses = Counter[int]()
        self._wanted = Counter[int]()
        """Bytes of batches that met each chunk unlocked."""
        self._not_before: dict[int, float] = {}
        """Time before which a chunk is not asked for again."""
        self._registered: set[int] = set()
        self._granted: deque[int] = deque()
        """Chunks to lock; the thread takes them."""
        self._lock_id = self._recall_id = 0
        self._lock_at = 0.0
        self._is_open = bool(self.chunk_bytes)
        self._closing = False
        self._has_stuck = False
        """Whether memory could not be unlocked."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if not self.chunk_bytes:
            self._fail("the node grants no page locks; install the same version on both sides")
        elif not welcome.lockable_bytes:
            self._is_open = False
            self._fail("the node allows no page-locked memory; set its option tiers.0.lock")
        elif self._arena is not None:
            # A child would keep the memory that its parent has locked.
            with contextlib.suppress(OSError):
                self._arena.keep_from_children()

    @property
    def locked_bytes(self) -> int:
        """Bytes that are locked now."""
        with self._lock:
            locked = sum(state is not _State.ASKED for state in self._states.values())
        return locked * self.chunk_bytes

    def lock_at_start(self, within_s: float = START_S) -> int:
        """Lock chunks that the node chooses, without pauses; return the bytes that are locked.

        For an engine's start, before `start`, when nothing else uses the device. Returns when
        nothing is left to lock or the time is over.
        """
        until_s = time.monotonic() + within_s
        with contextlib.suppress(HoldfastError):
            while self._is_open and not self.failure and time.monotonic() < until_s:
                if not self._lock_id:
                    self._lock_id = self._client.send(Lock(most=CHUNKS_AT_ONCE))
                reply = self._take(self._lock_id, Locked)
                if reply is None:
                    time.sleep(_START_POLL_S)
                    continue
                self._lock_id = 0
                self._take_grants(reply.chunks)
                if not reply.chunks:
                    break
                while self._granted and time.monotonic() < until_s:
                    self._register(self._granted.popleft())
        return self.locked_bytes

    def start(self) -> None:
        """Start the thread `holdfast-lock`, after the engine has captured its graphs."""
        if self._thread is None and (self._is_open or self._states):
            self._thread = threading.Thread(target=self._run, name="holdfast-lock", daemon=True)
            self._thread.start()

    def use(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Return whether all memory of a batch is locked; if so, keep it locked until `done`."""
        with self._lock:
            if not self._is_open or self._client.closed or os.getpid() != self._process:
                return False
            chunks = self._chunks(ranges)
            if any(self._states.get(chunk) is not _State.LOCKED for chunk in chunks):
                return False
            self._uses.update(chunks.keys())
            return True

    def done(self, ranges: Iterable[tuple[int, int]]) -> None:
        """End a use: all copies of the batch have ended. Call once for each `use` that was True."""
        with self._lock:
            for chunk in self._chunks(ranges):
                self._uses[chunk] -= 1
                if not self._uses[chunk]:
                    del self._uses[chunk]
                    if self._states.get(chunk) is _State.RECALLED or not self._is_open:
                        self._wake.set()

    def want(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Note memory that a batch met unlocked; the thread asks for the chunks with most bytes."""
        with self._lock:
            if self._is_open and not self.failure:
                for chunk, nbytes in self._chunks(ranges).items():
                    if chunk not in self._states:
                        self._wanted[chunk] += nbytes

    def close(self) -> None:
        """Unlock all memory, when the batches that use it have ended, and stop the thread."""
        with self._lock:
            self._is_open, self._closing = False, True
        self._wake.set()
        if self._thread is not None:
            if self._thread is not threading.current_thread():
                self._thread.join()
        else:
            self._end()

    def _chunks(self, ranges: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return the chunks of ranges, and the bytes in each."""
        size, found = self.chunk_bytes, dict[int, int]()
        for start, nbytes in ranges:
            end = start + nbytes
            for chunk in range(start // size, -(-end // size)):
                part = min(end, (chunk + 1) * size) - max(start, chunk * size)
                found[chunk] = found.get(chunk, 0) + part
        return found

    # The methods below run on one thread: that of `lock_at_start`, then `holdfast-lock`.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
                pause_s = max(0.0, self._lock_at - time.monotonic()) if self._granted else POLL_S
                self._wake.wait(min(pause_s, POLL_S))
                self._wake.clear()
        except NodeGoneError:
            pass
        except HoldfastError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  # the engine goes on without locks
            _log.exception("page-locking of memory ended")
            self._fail(f"{type(error).__name__}: {error}")
        self._end()

    def _step(self) -> None:
        """Take replies that have arrived, lock and unlock what is due, ask for what is wanted."""
        if not self._recall_id:
            self._recall_id = self._client.send(AwaitRecall())
        recall = self._take(self._recall_id, Recall)
        # The node grants a chunk before it recalls it, so a grant that the recall is about is here.
        if self._lock_id and (reply := self._take(self._lock_id, Locked)) is not None:
            self._lock_id = 0
            self._take_grants(reply.chunks)
        if recall is not None:
            self._recall_id = self._client.send(AwaitRecall())
            self._recall(recall.chunks)
        self._unregister_recalled()
        now_s = time.monotonic()
        if self._granted and now_s >= self._lock_at:
            self._register(self._granted.popleft())
            self._lock_at = time.monotonic() + PAUSE_TIMES * (time.monotonic() - now_s)
        if not self._lock_id and not self._granted and (chunks := self._most_wanted(now_s)):
            self._lock_id = self._client.send(Lock(chunks))

    def _take(self, request_id: int, kind: type[T]) -> T | None:
        """Return a reply if it has arrived."""
        reply = self._client.poll(request_id)
        if reply is not None and not isinstance(reply, kind):
            raise ProtocolError(f"{kind.__name__} was expected, the node sent {reply!r:.200}")
        return reply

    def _most_wanted(self, now_s: float) -> list[int]:
        """Return the chunks to ask for, those with the most wanted bytes first, as asked for."""
        with self._lock:
            if not self._wanted or self.failure:
                return []
            due = [
                chunk
                for chunk, _ in self._wanted.most_common()
                if chunk not in self._states and self._not_before.get(chunk, now_s) <= now_s
            ]
            asked = due[:CHUNKS_AT_ONCE]
            for chunk in asked:
                del self._wanted[chunk]
            self._states.update(dict.fromkeys(asked, _State.ASKED))
            return asked

    def _take_grants(self, granted: Sequence[int]) -> None:
        """Note an answer of the node: chunks to lock; it did not grant the others asked for."""
        returned, now_s = list[int](), time.monotonic()
        with self._lock:
            open_states = [
                chunk
                for chunk, state in self._states.items()
                if state is not _State.LOCKED and chunk not in self._registered
            ]
            for chunk in {*open_states} - {*granted, *self._granted}:
                del self._states[chunk]
                self._not_before[chunk] = now_s + ASK_AGAIN_S
            for chunk in granted:
                if self._states.get(chunk) is _State.RECALLED:
                    del self._states[chunk]
                    returned.append(chunk)
                elif chunk not in self._registered:
                    self._states[chunk] = _State.ASKED
                    self._granted.append(chunk)
        self._return(returned)

    def _recall(self, chunks: Sequence[int]) -> None:
        """Give chunks back: at once, or when the batches that use them have ended."""
        returned = list[int]()
        with self._lock:
            for chunk in chunks:
                if chunk in self._granted:
                    self._granted.remove(chunk)
                    del self._states[chunk]
                    returned.append(chunk)
                elif chunk in self._states:
                    self._states[chunk] = _State.RECALLED
                else:
                    returned.append(chunk)
        self._return(returned)

    def _register(self, chunk: int) -> None:
        """Lock a granted chunk; give it back if that fails."""
        began_s = time.monotonic()
        try:
            self._registrar.register(self._address(chunk), self.chunk_bytes)
        except Exception as error:  # noqa: BLE001  # a device's own errors
            with self._lock:
                returned = [chunk, *self._granted]
                self._granted.clear()
                self._wanted.clear()
                for each in returned:
                    del self._states[each]
            self._fail(
                f"after {self.locked_bytes} bytes, the device cannot lock more: {error}; raise the "
                "limit of locked memory (`ulimit -l unlimited`, LimitMEMLOCK=infinity, or "
                "`--ulimit memlock=-1` of a container), or set the node's option tiers.0.lock"
            )
            self._return(returned, self.failure)
        else:
            with self._lock:
                self._registered.add(chunk)
                self._states[chunk] = _State.LOCKED
        finally:
            self.lock_seconds += time.monotonic() - began_s

    def _unregister_recalled(self) -> None:
        """Unlock the recalled chunks that no batch uses, and tell the node."""
        with self._lock:
            due = [
                chunk
                for chunk, state in self._states.items()
                if state is _State.RECALLED and chunk in self._registered and not self._uses[chunk]
            ]
        unlocked = [chunk for chunk in due if self._unregister(chunk)]
        self._return(unlocked)
        if len(unlocked) < len(due):
            raise ProtocolError("the device cannot unlock memory; see the error above")

    def _unregister(self, chunk: int) -> bool:
        """Unlock a chunk; False if the device fails: then it stays locked, and the node counts it.

        The node ends the session when the recall's time is over.
        """
        began_s = time.monotonic()
        try:
            self._registrar.unregister(self._address(chunk))
        except Exception:  # noqa: BLE001  # a device's own errors
            if not self._has_stuck:  # a GPU that has failed refuses every chunk
                self._has_stuck = True
                _log.exception("memory stays page-locked")
            return False
        finally:
            self.lock_seconds += time.monotonic() - began_s
        with self._lock:
            self._registered.discard(chunk)
            self._states.pop(chunk, None)
        return True

    def _return(self, chunks: Sequence[int], failure: str = "") -> None:
        """Tell the node that chunks are not locked."""
        if chunks or failure:
            self._client.forget(self._client.send(Unlock(list(chunks), failure)))

    def _end(self) -> None:
        """Unlock everything as soon as no batch uses it, and let go of the arena.

        The node gets back all that it has granted. If a part cannot be unlocked, the session ends,
        because nothing answers a recall of it any more.
        """
        until_s = time.monotonic() + END_S
        with self._lock:
            self._is_open = False
        while self._uses and time.monotonic() < until_s:
            self._wake.wait(POLL_S)
            self._wake.clear()
        with self._lock:
            unused = [chunk for chunk in self._registered if not self._uses[chunk]]
        returned = [chunk for chunk in unused if self._unregister(chunk)]
        with contextlib.suppress(HoldfastError):
            self._return([*returned, *self._granted], "" if self._closing else self.failure)
            for request_id in (self._lock_id, self._recall_id):
                self._client.forget(request_id)
        self._granted.clear()
        if self._registered and self._arena is not None:
            _unreleased.append(self._arena)
            if not (self._closing or self._client.closed):
                reason = f"{self.locked_bytes} bytes stay page-locked: {self.failure}"
                _log.error("the session with the node ends, and begins again: %s", reason)
                self._client.close(reason)
        self._arena = None

    def _address(self, chunk: int) -> int:
        return self._start + chunk * self.chunk_bytes

    def _fail(self, reason: str) -> None:
        """Note, and log once, why memory is not locked."""
        self.failure = reason
        _log.warning("blocks are copied without page-locked memory: %s", reason)
