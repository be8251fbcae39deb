"""The interface of SGLang that `HoldfastStorage` was written for."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast.engines.interface import ExpectedClass, check_version, differences_of

TESTED = ("0.5.23",)
"""Versions of SGLang."""

_PAGES = ("keys", "host_indices", "extra_info")
_TRANSFERS = ("transfers", "extra_info")
_PLACES = ("target_location", "target_sizes")
_ALL_PLACES = ("target_locations", "target_sizes")

STORAGE = ExpectedClass(
    methods={
        "register_mem_pool_host": ("mem_pool_host",),
        "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
        "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
        "batch_get_v2": _TRANSFERS,
        "batch_set_v2": _TRANSFERS,
        "batch_exists": ("keys", "extra_info"),
        "batch_get_v1": _PAGES,
        "batch_set_v1": _PAGES,
        "exists": ("key",),
        "get": ("key", *_PLACES),
        "batch_get": ("keys", *_ALL_PLACES),
        "set": ("key", "value", *_PLACES),
        "batch_set": ("keys", "values", *_ALL_PLACES),
        "clear": (),
    },
    abstract=True,
)
CONFIG = ExpectedClass(
    fields=(
        *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"),
        *("dcp_rank", "dcp_size", "logical_page_size", "is_mla_model", "extra_config"),
    )
)
EXTRA = ExpectedClass(fields=("prefix_keys",))
TRANSFER = ExpectedClass(fields=("name", "host_indices", "keys", "hit_policy"))
RESULT = ExpectedClass(fields=("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"))
HOOKS = ExpectedClass(
    methods={"register": ("target", "hook", "hook_type", "source"), "apply_hooks": ()}
)
UPDATER = ExpectedClass(
    methods={
        "update_weights_from_disk": (
            *("model_path", "load_format", "weight_name_filter", "recapture_cuda_graph"),
        ),
        "load_weights_from_distributed": ("named_tensors",),
        "update_weights_from_tensor": ("named_tensors", "load_format"),
        "update_weights_from_ipc": ("recv_req",),
    }
)
"""Its methods are hooked: an update of weights that is not seen would be a wrong hit."""
CONTEXT = ExpectedClass(methods={"config_leaf": ("name",)})

_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_RUNNER = "sglang.srt.model_executor.model_runner_components"

INTERFACE: Mapping[str, ExpectedClass] = {
    f"{_STORAGE}.HiCacheStorage": STORAGE,
    f"{_STORAGE}.HiCacheStorageConfig": CONFIG,
    f"{_STORAGE}.HiCacheStorageExtraInfo": EXTRA,
    f"{_STORAGE}.PoolTransfer": TRANSFER,
    f"{_STORAGE}.PoolTransferResult": RESULT,
    "sglang.srt.plugins.hook_registry.HookRegistry": HOOKS,
    f"{_RUNNER}.weight_updater.WeightUpdater": UPDATER,
    "sglang.srt.runtime_context.RuntimeContext": CONTEXT,
}
"""What the storage uses of SGLang."""

_log = logging.getLogger("sglang.holdfast")


def check_interface() -> None:
    """Raise InterfaceError if the installed SGLang has another interface of storages."""
    import sglang

    check_version("SGLang", str(sglang.__version__), TESTED, differences_of(INTERFACE), _log)
