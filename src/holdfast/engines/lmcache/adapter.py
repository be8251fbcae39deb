"""`HoldfastL2Adapter`: an L2 adapter of LMCache's server, whose chunks a node keeps.

LMCache's server copies chunks between engines and its own memory (L1); the adapter copies chunks of
that memory to and from the node, which verifies, tiers, seals and shares them. A task ends with an
outcome for each chunk and never raises: a chunk that cannot be read is a miss.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from holdfast.client.named_blocks import open_named_session
from holdfast.devices.host import run_anywhere
from holdfast.engines.lmcache.interface import check_interface
from holdfast.engines.lmcache.names import ENGINE, ChunkShape, fingerprint_of, name_of, shape_of
from holdfast.engines.lmcache.options import AdapterOptions, read_adapter_options
from holdfast.errors import BlockError, Outcome
from holdfast.named_blocks import NamedSession
from holdfast.workers import workers

LOAD_THREADS = 2
SAVE_THREADS = 1
LOOKUP_THREADS = 1
SHAPES_MAX = 64
"""Most shapes of chunks, each with a connection of its own: models x object groups."""

_log = logging.getLogger("lmcache.holdfast")


class _TaskResults:
    """Results of tasks of one kind, with the notifier that tells LMCache of each."""

    def __init__(self) -> None:
        self.notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}

    def put(self, task: int, result: object) -> None:
        with self._lock:
            self._results[task] = result
        self.notifier.notify()

    def pop(self, task: int) -> Any:  # a bitmap of LMCache's
        """Return the result of a task once; None if there is none."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            found, self._results = self._results, {}
        return found


class ChunkSessions:
    """The sessions of one node, by the shape of the chunks. Thread-safe."""

    def __init__(self, options: AdapterOptions, engine_version: str) -> None:
        self._options = options
        self._version = engine_version
        self._lock = threading.Lock()
        self._sessions: dict[ChunkShape, NamedSession | None] = {}

    def of(self, shape: ChunkShape) -> NamedSession | None:
        """Return the session for chunks of a shape, opening it if necessary; None: there is none.

        A shape beyond `SHAPES_MAX`, or one that no block can have, has none.
        """
        with self._lock:
            if shape not in self._sessions:
                self._sessions[shape] = self._open(shape)
            return self._sessions[shape]

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for session in self._sessions.values():
                if session is not None:
                    session.close()
            self._sessions.clear()

    def _open(self, shape: ChunkShape) -> NamedSession | None:
        if len(self._sessions) >= SHAPES_MAX:
            _log.warning(
                "chunks of %d bytes of %s are not kept: there are chunks of %d shapes already; "
                "omit LMCache's serde, Holdfast compresses by its own codecs",
                shape.nbytes,
                shape.model,
                SHAPES_MAX,
            )
            return None
        options = self._options
        try:
            fingerprint = fingerprint_of(shape, options, self._version)
        except BlockError as error:
            _log.warning("chunks of %s are not kept: %s", shape.model, error)
            return None
        return open_named_session(options.holdfast, fingerprint, options.domain, ENGINE)


class HoldfastL2Adapter(L2AdapterInterface):
    """See LMCache's `L2AdapterInterface`. `params` are those of `engines.lmcache.options`."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        del l1_memory_desc  # chunks are copied one by one, by their addresses
        self._options = read_adapter_options(params)
        engine_version = version(ENGINE)
        check_interface(engine_version)
        self._sessions = ChunkSessions(self._options, engine_version)
        self._numbers = itertools.count()
        self._stores, self._lookups, self._loads = (_TaskResults() for _ in range(3))
        self._looking = workers(LOOKUP_THREADS, "holdfast-l2-lookup")
        self._loading = workers(LOAD_THREADS, "holdfast-l2-load", run_anywhere)
        self._saving = workers(SAVE_THREADS, "holdfast-l2-save", run_anywhere)
        self._warned = False

    def get_store_event_fd(self) -> int:
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        work, lost = partial(self._store, keys, objects), L2StoreResult(False, 0)
        return self._submit(self._saving, self._stores, work, lost)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        work = partial(self._look_up, keys, group_layout_descs)
        return self._submit(self._looking, self._lookups, work, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:  # LMCache's bitmap
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: a chunk that is evicted between lookup and load is a miss."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        work = partial(self._load, keys, objects)
        return self._submit(self._loading, self._loads, work, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:  # LMCache's bitmap
        return self._loads.pop(task_id)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": type(self).__name__, "node": self._options.holdfast}

    def close(self) -> None:
        for pool in (self._looking, self._loading, self._saving):
            pool.shutdown(wait=True, cancel_futures=True)
        self._sessions.close()
        for results in (self._stores, self._lookups, self._loads):
            results.notifier.close()

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        results: _TaskResults,
        work: Callable[[], object],
        lost: object,
    ) -> int:
        """Begin a task; its result is `lost` if the work raises, because LMCache waits for one."""
        task = next(self._numbers)

        def run() -> None:
            result = lost
            try:
                result = work()
            except Exception:  # noqa: BLE001  # also what listeners of LMCache raise
                _log.exception("a task failed; its chunks are a miss")
            finally:
                results.put(task, result)

        pool.submit(run)
        return task

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:  # LMCache's
        outcomes = self._transfer(keys, objects, lambda s, names, memory: s.put(names, memory))
        stored = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        sizes = [int(objects[i].get_size()) for i in stored]
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:  # LMCache's
        within_s = self._options.load_deadline_s
        outcomes = self._transfer(
            keys, objects, lambda s, names, memory: s.get(names, memory, within_s)
        )
        loaded = [keys[i] for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if loaded:
            self._notify_keys_accessed(loaded)
        return _bitmap(outcomes)

    def _look_up(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Any:  # LMCache's
        shapes = [_described(key, layouts.get(key.object_group_id)) for key in keys]
        outcomes = [Outcome.MISS] * len(keys)
        for session, indices in self._by_session(keys, shapes).values():
            found = self._guarded(session.exists, [name_of(keys[i]) for i in indices])
            for i, outcome in zip(indices, found, strict=True):
                outcomes[i] = outcome
        return _bitmap(outcomes)

    def _transfer(
        self,
        keys: Sequence[Any],
        objects: Sequence[Any],
        act: Callable[[NamedSession, Any, Any], list[Outcome]],
    ) -> list[Outcome]:
        """Copy chunks to or from the node, each shape by its own session."""
        shapes = [
            shape_of(key.model_name, each.get_shapes(), each.get_dtypes())
            for key, each in zip(keys, objects, strict=True)
        ]
        outcomes = [Outcome.MISS] * len(keys)
        for session, indices in self._by_session(keys, shapes).values():
            names = [name_of(keys[i]) for i in indices]
            memory = [[(int(objects[i].data_ptr), int(objects[i].get_size()))] for i in indices]
            found = self._guarded(partial(act, session), names, memory)
            for i, outcome in zip(indices, found, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _by_session(
        self, keys: Sequence[Any], shapes: Sequence[ChunkShape | None]
    ) -> dict[ChunkShape, tuple[NamedSession, list[int]]]:
        """Return the chunks that can be kept, by shape: the session, and their indices."""
        found: dict[ChunkShape, tuple[NamedSession, list[int]]] = {}
        for i, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
            if shape is None or not self._is_safe(key):
                continue
            session = self._sessions.of(shape)
            if session is not None:
                found.setdefault(shape, (session, []))[1].append(i)
        return found

    def _is_safe(self, key: Any) -> bool:  # LMCache's
        safe = bool(name_of(key))
        if not safe and not self._warned:
            self._warned = True
            _log.warning(
                "no chunk is kept: LMCache's hashes have %d bytes here, and such short ones "
                "collide; start its server with --hash-algorithm blake3 or sha256_cbor",
                len(key.chunk_hash),
            )
        return safe

    def _guarded(
        self, act: Callable[..., list[Outcome]], names: Any, *more: Any
    ) -> list[Outcome]:  # what `act` takes
        try:
            return act(names, *more)
        except Exception:  # noqa: BLE001  # no request of LMCache fails for it
            _log.exception("%d chunks are a miss", len(names))
            return [Outcome.GONE] * len(names)


def _described(key: Any, layout: Any) -> ChunkShape | None:  # LMCache's
    """Return the shape of a chunk that is looked up; None if LMCache does not say it."""
    return None if layout is None else shape_of(key.model_name, layout.shapes, layout.dtypes)


def _bitmap(outcomes: Sequence[Outcome]) -> Any:  # LMCache's
    bitmap = Bitmap(len(outcomes))
    for i, outcome in enumerate(outcomes):
        if outcome is Outcome.OK:
            bitmap.set(i)
    return bitmap
