"""The part of SGLang's interface that the binding uses, as recorded from the version tested.

A version with the same part is served, after a line in the log. Any other version is refused,
because a parameter that has moved would be misread silently.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from holdfast.errors import ConfigError

TESTED = "0.5.23"
"""The version of SGLang with which the binding is tested."""

_STORAGE = "sglang.srt.mem_cache.hicache_storage:"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater."
_KEY_SIZES = ("self", "key", "target_location", "target_sizes")
_KEYS_SIZES = ("self", "keys", "target_locations", "target_sizes")
_PAGES = ("self", "keys", "host_indices", "extra_info")
_TRANSFERS = ("self", "transfers", "extra_info")

RECORDED: Mapping[str, tuple[str, ...]] = {
    f"{_STORAGE}HiCacheStorage.register_mem_pool_host": ("self", "mem_pool_host"),
    f"{_STORAGE}HiCacheStorage.register_mem_host_pool_v2": (
        *("self", "host_pool", "host_pool_name"),
    ),
    f"{_STORAGE}HiCacheStorage.batch_exists_v2": (
        *("self", "keys", "pool_transfers", "extra_info"),
    ),
    f"{_STORAGE}HiCacheStorage.batch_get_v2": _TRANSFERS,
    f"{_STORAGE}HiCacheStorage.batch_set_v2": _TRANSFERS,
    f"{_STORAGE}HiCacheStorage.batch_exists": ("self", "keys", "extra_info"),
    f"{_STORAGE}HiCacheStorage.batch_get_v1": _PAGES,
    f"{_STORAGE}HiCacheStorage.batch_set_v1": _PAGES,
    f"{_STORAGE}HiCacheStorage.exists": ("self", "key"),
    f"{_STORAGE}HiCacheStorage.get": _KEY_SIZES,
    f"{_STORAGE}HiCacheStorage.batch_get": _KEYS_SIZES,
    f"{_STORAGE}HiCacheStorage.set": ("self", "key", "value", *_KEY_SIZES[2:]),
    f"{_STORAGE}HiCacheStorage.batch_set": ("self", "keys", "values", *_KEYS_SIZES[2:]),
    f"{_STORAGE}HiCacheStorage.clear": ("self",),
    f"{_STORAGE}HiCacheStorageConfig": (
        *("attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "extra_config", "is_mla_model"),
        *("logical_page_size", "pp_rank", "pp_size", "tp_rank", "tp_size"),
    ),
    f"{_STORAGE}HiCacheStorageExtraInfo": ("prefix_keys",),
    f"{_STORAGE}PoolTransfer": ("hit_policy", "host_indices", "keys", "name"),
    f"{_STORAGE}PoolTransferResult": (
        *("extra_pool_hit_pages", "kv_hit_pages", "restorable_prefix_pages"),
    ),
    f"{_STORAGE}PoolHitPolicy": ("all_pages", "block_groups", "trailing_pages"),
    "sglang.srt.plugins.hook_registry:HookType": ("before",),
    "sglang.srt.plugins.hook_registry:HookRegistry.register": (*("target", "hook", "hook_type"),),
    "sglang.srt.runtime_context:get_server_args": (),
    f"{_UPDATER}update_weights_from_disk": ("self", "model_path", "load_format"),
    f"{_UPDATER}load_weights_from_distributed": ("self",),
    f"{_UPDATER}update_weights_from_tensor": ("self", "named_tensors", "load_format"),
    f"{_UPDATER}update_weights_from_ipc": ("self", "recv_req"),
}
"""By `module:name`: parameters of a function, fields of a dataclass, values of an enumeration."""

_told: list[str] = []
_log = logging.getLogger("sglang.holdfast")


def check() -> None:
    """Raise ConfigError if the installed SGLang has another interface than the one tested."""
    import sglang

    version = str(sglang.__version__)
    if version == TESTED:
        return
    different = differences(RECORDED)
    if different:
        raise ConfigError(
            f"SGLang {version} differs from {TESTED}, which Holdfast is tested with, in "
            f"{'; '.join(different)}; install sglang=={TESTED}, or a Holdfast that is tested with "
            f"{version}"
        )
    if not _told:
        _told.append(version)
        _log.warning(
            "SGLang %s is not tested with Holdfast, only %s is; its storage interface is the same",
            *(version, TESTED),
        )


def differences(recorded: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a text for each part of the installed SGLang that differs from what is recorded.

    A dataclass or enumeration may have more members, and a function outside of the storage class
    more parameters, than are recorded.
    """
    found = []
    for path, expected in recorded.items():
        module, _, name = path.partition(":")
        try:
            part: Any = import_module(module)
            for step in name.split("."):
                part = getattr(part, step)
        except (ImportError, AttributeError):
            found.append(f"{name} is missing")
            continue
        actual = members(part)
        if "HiCacheStorage." in path:
            same = actual == expected
        elif inspect.isclass(part):
            same = set(expected) <= set(actual)
        else:
            same = actual[: len(expected)] == expected
        if not same:
            found.append(f"{name} has {', '.join(actual)} instead of {', '.join(expected)}")
    return found


def members(part: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass, the values of an enumeration, or the parameters."""
    if inspect.isclass(part) and issubclass(part, enum.Enum):
        return tuple(sorted(str(one.value) for one in part))
    if dataclasses.is_dataclass(part):
        return tuple(sorted(field.name for field in dataclasses.fields(part)))
    return tuple(inspect.signature(part).parameters)
