"""The interfaces of vLLM that the connectors of KV and of encoder outputs were written for."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast.engines.interface import ExpectedClass, check_version, differences_of

TESTED = ("0.32",)
"""Versions of vLLM, up to their second number."""

CONNECTOR = ExpectedClass(
    methods={
        "__init__": ("vllm_config", "role", "kv_cache_config"),
        "shutdown": (),
        "get_kv_connector_stats": (),
        "build_kv_connector_stats": ("data",),
        "build_prom_metrics": (
            *("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        ),
        "register_kv_caches": ("kv_caches",),
        "get_handshake_metadata": (),
        "bind_connector_metadata": ("connector_metadata",),
        "start_load_kv": ("forward_context", "kwargs"),
        "wait_for_layer_load": ("layer_name",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
        "wait_for_save": (),
        "get_transfer_results": ("finished_req_ids",),
        "get_block_ids_with_load_errors": (),
        "build_connector_worker_meta": (),
        "set_xfer_handshake_metadata": ("metadata",),
        "set_xfer_handshake_metadata_pp_aware": ("metadata",),
        "bind_gpu_block_pool": ("gpu_block_pool",),
        "on_new_request": ("request",),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "get_external_cache_hit_sources": ("request", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "update_connector_output": ("connector_output",),
        "has_pending_push_work": (),
        "request_finished": ("request", "block_ids"),
        "reset_cache": (),
    },
    newer={"supports_sleep_mode": ("kv_transfer_config",), "unregister_kv_caches": ()},
    attributes=("requires_kv_delivery", "role"),
    abstract=True,
)
GROUPS = ExpectedClass(
    methods={"request_finished_all_groups": ("request", "block_ids")}, abstract=True
)
RESULTS = ExpectedClass(fields=("finished_recving", "failed_recving"))
REQUEST = ExpectedClass(
    attributes=(
        *("request_id", "all_token_ids", "num_tokens", "num_computed_tokens", "num_preemptions"),
        *("prompt_token_ids", "prompt_embeds", "mm_features", "lora_request", "cache_salt"),
        *("resumable", "skip_reading_prefix_cache", "sampling_params", "kv_transfer_params"),
        "get_num_encoder_embeds",
    )
)
FEATURE = ExpectedClass(fields=("data", "identifier", "mm_position", "modality"))
STEP = ExpectedClass(
    fields=(
        *("num_scheduled_tokens", "total_num_scheduled_tokens", "kv_connector_block_state"),
        *("free_encoder_mm_hashes", "scheduled_new_reqs", "scheduled_cached_reqs"),
    )
)
STEP_NEW = ExpectedClass(fields=("req_id",))
STEP_CACHED = ExpectedClass(fields=("resumed_req_ids",))
STEP_BLOCKS = ExpectedClass(
    methods={"get_block_ids": ("req_id",)}, fields=("boundary_state_offloads",)
)
OUTPUT = ExpectedClass(
    fields=(
        *("finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    )
)
BLOCKS = ExpectedClass(attributes=("get_block_ids",))
POOL = ExpectedClass(attributes=("blocks", "free_block_queue"))
FREE_PAGES = ExpectedClass(methods={"iter_blocks_after": ("cursor",)})
PAGE = ExpectedClass(attributes=("block_id", "block_hash"))
CACHE = ExpectedClass(fields=("num_blocks", "kv_cache_groups"))
CACHE_GROUP = ExpectedClass(fields=("layer_names", "kv_cache_spec"))
_PAGE = ("block_size", "page_size_bytes")
_HEADS = (*_PAGE, "num_kv_heads", "head_size", "dtype", "kv_quant_mode", "unpadded_page_size_bytes")
FULL = ExpectedClass(attributes=_HEADS)
WINDOW = ExpectedClass(attributes=(*_HEADS, "sliding_window", "extra_retained_tokens"))
CHUNK = ExpectedClass(attributes=(*_HEADS, "attention_chunk_size"))
STATE = ExpectedClass(attributes=(*_PAGE, "shapes", "dtypes", "mamba_type", "mamba_cache_mode"))
UNIFORM = ExpectedClass(attributes=("kv_cache_specs",))

ENCODER = ExpectedClass(
    methods={
        "__init__": ("vllm_config", "role"),
        "ensure_cache_available": ("request", "num_computed_tokens"),
        "has_cache_item": ("identifier",),
        "update_state_after_alloc": ("request", "index"),
        "build_connector_meta": ("scheduler_output",),
        "start_load_caches": ("encoder_cache", "kwargs"),
        "save_caches": ("encoder_cache", "mm_hash", "kwargs"),
        "shutdown": (),
    },
    attributes=("is_producer", "is_consumer", "_get_connector_metadata"),
    abstract=True,
)

_READ_BY_BOTH = {
    "vllm.v1.request.Request": REQUEST,
    "vllm.multimodal.inputs.MultiModalFeatureSpec": FEATURE,
    "vllm.v1.core.sched.output.SchedulerOutput": STEP,
}
_BASE, _CACHE = "vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.v1.kv_cache_interface"

CONNECTOR_INTERFACE: Mapping[str, ExpectedClass] = _READ_BY_BOTH | {
    f"{_BASE}.KVConnectorBase_V1": CONNECTOR,
    f"{_BASE}.SupportsHMA": GROUPS,
    f"{_BASE}.KVConnectorTransferResults": RESULTS,
    "vllm.v1.core.sched.output.KVConnectorBlockState": STEP_BLOCKS,
    "vllm.v1.outputs.KVConnectorOutput": OUTPUT,
    "vllm.v1.core.sched.output.NewRequestData": STEP_NEW,
    "vllm.v1.core.sched.output.CachedRequestData": STEP_CACHED,
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": BLOCKS,
    "vllm.v1.core.block_pool.BlockPool": POOL,
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue": FREE_PAGES,
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": PAGE,
    f"{_CACHE}.KVCacheConfig": CACHE,
    f"{_CACHE}.KVCacheGroupSpec": CACHE_GROUP,
    f"{_CACHE}.FullAttentionSpec": FULL,
    f"{_CACHE}.MLAAttentionSpec": FULL,
    f"{_CACHE}.SlidingWindowSpec": WINDOW,
    f"{_CACHE}.ChunkedLocalAttentionSpec": CHUNK,
    f"{_CACHE}.MambaSpec": STATE,
    f"{_CACHE}.UniformTypeKVCacheSpecs": UNIFORM,
}
"""What the connector of KV state uses of vLLM."""

ENCODER_INTERFACE: Mapping[str, ExpectedClass] = _READ_BY_BOTH | {
    "vllm.distributed.ec_transfer.ec_connector.base.ECConnectorBase": ENCODER,
}
"""What the connector of encoder outputs uses of vLLM."""

_log = logging.getLogger("vllm.holdfast")


def check_connector() -> None:
    """Raise InterfaceError if the installed vLLM has another interface of KV connectors."""
    _check(CONNECTOR_INTERFACE)


def check_encoder_connector() -> None:
    """Raise InterfaceError if the installed vLLM has another interface of encoder connectors."""
    _check(ENCODER_INTERFACE)


def _check(interface: Mapping[str, ExpectedClass]) -> None:
    import vllm

    check_version("vLLM", vllm.__version__, TESTED, differences_of(interface), _log)
