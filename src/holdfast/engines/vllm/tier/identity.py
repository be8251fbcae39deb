"""The fingerprint of the rows that vLLM offloads, and what must not be offloaded.

vLLM's hash of a page says which tokens, images, salt and adapter name it stands for. It says
nothing of the model, its weights, the layout of a page or the parallel sizes: all of these are in
the fingerprint.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout
from holdfast.client.model_meaning import canonical_json
from holdfast.engines.vllm.describe import ENGINE, digest_with_draft, resolved_positions
from holdfast.engines.vllm.draft import draft_of
from holdfast.engines.vllm.options import SAFE_HASHES, ConnectorSettings
from holdfast.engines.vllm.tier.options import TierSettings
from holdfast.engines.vllm.unsupported import UnsupportedError

CACHE_SETTINGS = (
    "cache_dtype",
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
)
"""Fields of vLLM's cache configuration that change what a page holds."""


def running_config() -> Any:
    """Return the configuration of the engine that constructs a tier; None if it is not found.

    vLLM's interface hands a tier no model configuration, and without it rows of two models, or of
    one model with two settings, cannot be told apart. The connector that constructs the tier has it
    as its argument `vllm_config`, so it is looked up in the frames of the callers.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001  # the documented way to the callers' frames
    while frame is not None:
        found = frame.f_locals.get("vllm_config")
        if hasattr(found, "model_config") and hasattr(found, "cache_config"):
            return found
        frame = frame.f_back
    return None


def check_settings(vllm_config: Any, setting: TierSettings) -> None:
    """Raise UnsupportedError for a setting under which vLLM's hashes do not name a content."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in SAFE_HASHES:
        raise UnsupportedError(
            f"--prefix-caching-hash-algo {algorithm} may collide; use {' or '.join(SAFE_HASHES)}"
        )
    if vllm_config.lora_config is not None and not setting.fixed_adapters:
        raise UnsupportedError(
            "vLLM's hashes name a LoRA adapter by its name and path, not by its content; if the "
            "files at a path never change, set fixed_adapters to true"
        )
    if _takes_media(vllm_config.model_config) and not setting.fixed_uuids:
        raise UnsupportedError(
            "vLLM's hashes name an image or sound by the uuid that a client gives it, and the tier "
            "does not see its content; start vLLM with --language-model-only, or, if no client "
            "gives one uuid to two contents, set fixed_uuids to true"
        )
    draft_of(vllm_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales computes scales that differ between runs")


def fingerprint_of_rows(
    offloading: Any, vllm_config: Any, row_bytes: int, setting: ConnectorSettings
) -> Fingerprint:
    """Return the fingerprint of rows of vLLM's host memory, of `row_bytes` each.

    `offloading`: vLLM's `OffloadingConfig`. Raises NoDigestError if the weights are unknown.
    """
    import vllm
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed

    cache = vllm_config.cache_config
    tokens = offloading.groups[0].tokens_per_block * offloading.cache.blocks_per_chunk
    layers = sum(len(group.layer_names) for group in offloading.groups)
    quantised = cache.cache_dtype != "auto"
    naming = {
        "engine": ENGINE,
        "hash": cache.prefix_caching_hash_algo,
        "seed": get_none_hash_seed(),
        "tokens_per_hash": offloading.cache.tokens_per_hash,
    }
    meaning = Meaning(
        model=digest_with_draft(vllm_config, setting),
        positions=resolved_positions(vllm_config),
        adapter="none" if vllm_config.lora_config is None else "named by the hash",
        kv_quantisation=cache.cache_dtype if quantised else "none",
        kv_scales="weights" if quantised else "none",
        naming=canonical_json(naming),
        block_tokens=tokens,
        kv_group=KvGroup.all_layers(layers),
    )
    layout = OpaqueLayout(
        dtype=offloading.model.dtype,
        block_tokens=tokens,
        layers=layers,
        nbytes=row_bytes,
        arrangement=canonical_json(_arrangement(offloading, vllm_config)),
        engine=ENGINE,
        engine_version=vllm.__version__,
    )
    return Fingerprint(meaning, layout)


def _takes_media(model_config: Any) -> bool:
    """Return whether requests of an engine may have images or sounds, or embeddings of them."""
    options = model_config.multimodal_config
    return options is not None and (not options.language_model_only or options.enable_mm_embeds)


def _arrangement(offloading: Any, vllm_config: Any) -> dict[str, Any]:
    """Return what decides where in a row each byte of which layer, head and token is."""
    from vllm import envs

    parallel, cache = offloading.parallel, vllm_config.cache_config
    free = offloading.canonical_layout and parallel.is_parallelism_agnostic
    return {
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in offloading.groups
        ],
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "page_bytes": 0 if free else offloading.worker_kv_bytes_per_block,
        "parallel": "any"
        if free
        else [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "replicated": offloading.replicated_layout,
        "canonical": offloading.canonical_layout,
        "layout": offloading.kv_cache_layout,
        "cache": {name: str(getattr(cache, name, None)) for name in CACHE_SETTINGS},
        "attention": str(getattr(vllm_config, "attention_config", None)),
        "states": str(envs.VLLM_SSM_CONV_STATE_LAYOUT),
        "device": _device(vllm_config),
    }


def _device(vllm_config: Any) -> str:
    """Return what the model runs on; of a CPU the instruction set, which decides the packing."""
    if vllm_config.device_config.device_type == "cpu":
        import torch

        tiles = torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # as vLLM asks
        return f"cpu {torch.backends.cpu.get_cpu_capability()} amx={tiles}"
    from vllm.platforms import current_platform

    runner = "v2" if vllm_config.use_v2_model_runner else "v1"
    return f"{current_platform.get_device_name()} runner {runner}"
