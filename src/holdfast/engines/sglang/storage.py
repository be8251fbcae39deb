"""`HoldfastStorage`: SGLang's storage interface, mapped onto named blocks of a node.

SGLang calls it in threads of its own, with batches of up to 128 pages. For a page that cannot be
read, the answer is a miss; one that cannot be saved is reported as not saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from holdfast.engines.sglang import weight_updates
from holdfast.engines.sglang.hits import PoolHits, RestorablePrefixes, leading, restorable
from holdfast.engines.sglang.host_pool import HostPool, position_after
from holdfast.engines.sglang.interface import check_interface
from holdfast.engines.sglang.options import read_options
from holdfast.engines.sglang.pages import tensor_memory
from holdfast.engines.sglang.portable_pool import PortablePool
from holdfast.engines.sglang.served_rank import ServedRank
from holdfast.errors import HoldfastError

KV = "kv"
"""SGLang's name of the pool with the KV state that every model has."""

WARNINGS_MAX = 64
"""Warnings that are remembered, so that each is logged once; then all are forgotten."""

_log = logging.getLogger("sglang.holdfast")


class HoldfastStorage(HiCacheStorage):
    """One rank's storage; SGLang's factory constructs it for the backend `dynamic`.

    Raises HoldfastError, which ends the server's start or the attachment, for options or a model
    that it cannot serve. A node that does not answer is no error: until it does, nothing is found.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any]) -> None:
        check_interface()
        self._options = read_options(storage_config.extra_config or {})
        self._rank = ServedRank(storage_config, self._options)
        self._pools: dict[str, HostPool | PortablePool] = {}
        self._logical: set[str] = set()
        self._updates = weight_updates.watch()
        self._updates_before = self._updates.begun
        self._warnings: set[str] = set()

    # Host pools: SGLang registers them after the construction.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != KV:  # registered above
            self._register(name, host_pool)

    # Interface v2: several pools.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        found = RestorablePrefixes(0, {}, [])
        kv_pages = self.batch_exists(keys)
        if kv_pages:
            pools = {
                one.name: PoolHits(
                    one.hit_policy.value,
                    self._held(str(one.name), keys[:kv_pages]),
                    len(one.keys) if one.keys else 1,
                )
                for one in pool_transfers or []
            }
            found = restorable(KV, kv_pages, pools)
        return PoolTransferResult(found.pages, found.by_pool, found.lengths)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            one.name: self._load(str(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        # The prefix is that of the KV pool's keys; another pool has some of them only.
        return {
            one.name: self._save(str(one.name), one.keys or [], one.host_indices, None)
            for one in transfers
        }

    # Interface v1: pages of the KV pool.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return leading(self._held(KV, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        prefix = extra_info.prefix_keys if extra_info is not None else None
        return self._save(KV, keys, host_indices, prefix)

    # Interface v0: pages of the KV pool as tensors of SGLang's.

    def exists(self, key: str) -> bool:
        return self._held(KV, [key]) == [True]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        whole = self._answers(
            KV,
            keys,
            lambda pool: pool.load_into(
                keys, [tensor_memory(one) for one in target_locations], self._options.get_deadline_s
            ),
        )
        return [
            tensor if good else None for tensor, good in zip(target_locations, whole, strict=True)
        ]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        tensors = [value.contiguous() for value in values]  # kept until the copy has ended
        return all(
            self._answers(
                KV,
                keys,
                lambda pool: pool.save_from(keys, [tensor_memory(tensor) for tensor in tensors]),
            )
        )

    def clear(self) -> None:
        """Drop the blocks of this rank's pools from the node's own tiers."""
        try:
            for pool in self._pools.values():
                self._rank.drop(pool)
        except HoldfastError as error:
            _log.warning("clear: not everything was dropped: %s", error)

    def close(self) -> None:
        """End the connections to the node."""
        for pool in self._pools.values():
            pool.close()

    def _register(self, name: str, pool: Any) -> None:
        if getattr(pool, "kv_buffer", self) is None:
            self._logical.add(name)  # it only counts pages: their bytes are in the other pools
        else:
            self._pools[name] = self._rank.host_pool(name, pool)

    def _held(self, name: str, keys: Sequence[str]) -> list[bool]:
        return self._answers(name, keys, lambda pool: pool.held(keys))

    def _load(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        deadline_s = self._options.get_deadline_s
        return self._answers(name, keys, lambda pool: pool.load(keys, indices, deadline_s))

    def _save(
        self, name: str, keys: Sequence[str], indices: Any, prefix: Sequence[str] | None
    ) -> list[bool]:
        return self._answers(
            name, keys, lambda pool: pool.save(keys, indices, position_after(prefix))
        )

    def _answers(
        self, name: str, keys: Sequence[str], ask: Callable[[HostPool | PortablePool], list[bool]]
    ) -> list[bool]:
        """Return what a pool answers for each key; False for all if it cannot answer."""
        nothing = [False] * len(keys)
        if self._updates.begun != self._updates_before:
            self._warn_once(
                "the weights of this server were updated, so what is saved belongs to other "
                "weights: Holdfast is off until the server starts again"
            )
            return nothing
        if name in self._logical:
            return [True] * len(keys)
        pool = self._pools.get(name)
        if pool is None or not keys:
            return nothing
        try:
            return ask(pool)
        except HoldfastError as error:
            self._warn_once(str(error))
        except Exception as error:  # noqa: BLE001  # no request of SGLang fails for it
            self._warn_once(f"{len(keys)} pages of the pool {name} are a miss: {error!r}")
        return nothing

    def _warn_once(self, what: str) -> None:
        if what not in self._warnings:
            if len(self._warnings) >= WARNINGS_MAX:
                self._warnings.clear()
            self._warnings.add(what)
            _log.warning("%s", what)
