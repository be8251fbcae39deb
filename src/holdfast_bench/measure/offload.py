"""vLLM's own offloading with two secondary tiers: rows that leave its host memory and come back.

vLLM's manager, shared memory and tier `fs` do the work; no engine runs. A row is what vLLM offloads
of one chunk of tokens. A load is timed from the first lookup until every row can be read from
vLLM's host memory; a save from the moment at which the rows are there until the tier has them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast_bench.harness.hardware_limits import SEED

ROW_BYTES = MIB
PAGE_TOKENS = 128
LAYERS = 4
MEMORY_ROWS = 16
"""Rows that vLLM's host memory has beside those of one context."""

LIMIT_S = 60.0
STEP_S = 0.0002
"""Pause between two steps of an engine that has nothing to compute."""

FS, HOLDFAST = "fs", "holdfast"


class OffloadedEngine:
    """The scheduler's side of a vLLM engine that offloads to one secondary tier; close it."""

    def __init__(self, vllm_config: Any, tier: Mapping[str, object], rows: int) -> None:  # noqa: ANN401  # vLLM's, where the tier looks for it
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        config = _offloading(tier, (rows + MEMORY_ROWS) * ROW_BYTES)
        self._manager: Any = TieringOffloadingSpec(config).get_manager()
        self._rows: Any = np.asarray(self._manager.primary_tier.get_kv_memoryview())
        self._requests = 0
        del vllm_config

    def save(self, keys: Sequence[Any], content: Any) -> float:  # noqa: ANN401  # an array
        """Put rows into vLLM's host memory, and return the seconds until the tier has them."""
        context = self._request(keys)
        stored = self._manager.prepare_store(list(keys), context)
        self._rows[np.array(stored.store_spec.chunk_ids)] = content
        began_s = time.monotonic()
        self._manager.complete_store(stored.keys_to_store, context)
        self._manager.on_request_finished(context)
        self._until(lambda: not self._manager.has_pending_work())
        return time.monotonic() - began_s

    def forget(self) -> None:
        """Empty vLLM's host memory; the tier keeps its rows."""
        self._manager.primary_tier.reset_cache()

    def load(self, keys: Sequence[Any], content: Any) -> float:  # noqa: ANN401  # an array
        """Return the seconds until all rows are in vLLM's host memory; raise if one differs."""
        from vllm.v1.kv_offload.base import LookupResult

        context, began_s = self._request(keys), time.monotonic()
        waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
        found: list[Any] = []

        def settled() -> bool:
            found[:] = [self._manager.lookup(key, context) for key in keys]
            return waits.isdisjoint(found)

        self._until(settled)
        took_s = time.monotonic() - began_s
        if set(found) != {LookupResult.HIT}:
            raise HoldfastError(f"{found.count(LookupResult.MISS)} of {len(keys)} rows were missed")
        chunks = self._manager.prepare_load(list(keys), context).chunk_ids
        if not (self._rows[np.array(chunks)] == content).all():
            raise HoldfastError("a row came back with other bytes")
        self._manager.complete_load(list(keys), context)
        self._manager.on_request_finished(context)
        return took_s

    def close(self) -> None:
        """End the tier, and free the memory."""
        self._rows = None
        self._manager.shutdown()

    def _request(self, keys: Sequence[Any]) -> Any:  # noqa: ANN401  # vLLM's context of a request
        from vllm.v1.kv_offload.base import ReqContext

        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        for number, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, number * PAGE_TOKENS)
        self._manager.on_new_request(context)
        return context

    def _until(self, done: Callable[[], bool]) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        end_s = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > end_s:
                raise HoldfastError(f"the tier did not answer within {LIMIT_S:.0f} s")
            self._manager.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(STEP_S)


def keys_of(context: int, rows: int) -> list[Any]:
    """Return the keys of the rows of one context."""
    from vllm.v1.kv_offload.base import make_offload_key

    random = np.random.default_rng([SEED, context])
    return [make_offload_key(random.bytes(32), 0) for _ in range(rows)]


def content_of(context: int, rows: int) -> Any:  # noqa: ANN401  # an array
    """Return the bytes of the rows of one context."""
    random = np.random.default_rng([SEED, context, 1])
    return random.integers(-128, 128, (rows, ROW_BYTES), np.int8)


def engine_config(model: Path) -> Any:  # noqa: ANN401  # vLLM's
    """Return vLLM's configuration of an engine that serves a model."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model), enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()


def fs_tier(folder: Path) -> dict[str, object]:
    """Return the options of vLLM's own tier of files."""
    return {"type": "fs", "root_dir": str(folder)}


def holdfast_tier(node: str) -> dict[str, object]:
    """Return the options of the tier of a node."""
    path = "holdfast.engines.vllm.tier"
    return {"type": "HoldfastTier", "module_path": path, "holdfast": node}


def _offloading(tier: Mapping[str, object], memory_bytes: int) -> Any:  # noqa: ANN401  # vLLM's
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    layers = tuple(f"layers.{number}" for number in range(LAYERS))
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(PAGE_TOKENS, layers, 0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": memory_bytes, "secondary_tiers": [dict(tier)]},
        engine_id=str(uuid.uuid4()),
        model=OffloadingModelConfig("bench", "float32"),
        cache=OffloadingCacheConfig(PAGE_TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBHNC",
    )
