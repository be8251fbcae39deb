"""The interface of LMCache's L2 adapters that `HoldfastL2Adapter` was written for."""

from __future__ import annotations

import logging

from holdfast.engines.interface import ExpectedClass, check_version, differences

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

_log = logging.getLogger("lmcache.holdfast")


def check_interface(version: str) -> None:
    """Raise InterfaceError if the installed LMCache has another interface of L2 adapters."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.memory_management import MemoryObj

    found = [
        *differences(L2AdapterInterface, ADAPTER),
        *differences(ObjectKey, KEY),
        *differences(MemoryLayoutDesc, LAYOUT),
        *differences(MemoryObj, MEMORY),
    ]
    check_version("LMCache", version, TESTED, found, _log)
