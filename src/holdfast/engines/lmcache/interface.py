"""The interface of LMCache's L2 adapters that `HoldfastL2Adapter` was written for."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast.engines.interface import ExpectedClass, check_version, differences_of

TESTED = ("0.5",)
"""Versions of LMCache, up to their second number."""

ADAPTER = ExpectedClass(
    methods={
        "__init__": ("max_capacity_bytes",),
        "get_store_event_fd": (),
        "get_lookup_and_lock_event_fd": (),
        "get_load_event_fd": (),
        "submit_store_task": ("keys", "objects"),
        "pop_completed_store_tasks": (),
        "submit_lookup_and_lock_task": ("keys", "group_layout_descs"),
        "query_lookup_and_lock_result": ("task_id",),
        "submit_unlock": ("keys",),
        "submit_load_task": ("keys", "objects"),
        "query_load_result": ("task_id",),
        "close": (),
        "report_status": (),
        "_notify_keys_stored": ("keys", "sizes"),
        "_notify_keys_accessed": ("keys",),
    },
    abstract=True,
)
KEY = ExpectedClass(
    fields=("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"),
    exactly=True,
)
LAYOUT = ExpectedClass(fields=("shapes", "dtypes"))
MEMORY = ExpectedClass(methods={"get_size": (), "get_shapes": (), "get_dtypes": ()})

_DISTRIBUTED = "lmcache.v1.distributed"

INTERFACE: Mapping[str, ExpectedClass] = {
    f"{_DISTRIBUTED}.l2_adapters.base.L2AdapterInterface": ADAPTER,
    f"{_DISTRIBUTED}.api.ObjectKey": KEY,
    f"{_DISTRIBUTED}.api.MemoryLayoutDesc": LAYOUT,
    "lmcache.v1.memory_management.MemoryObj": MEMORY,
}
"""What the adapter uses of LMCache."""

_log = logging.getLogger("lmcache.holdfast")


def check_interface(version: str) -> None:
    """Raise InterfaceError if the installed LMCache has another interface of L2 adapters."""
    check_version("LMCache", version, TESTED, differences_of(INTERFACE), _log)
