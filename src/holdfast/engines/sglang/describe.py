"""Derive the fingerprint of the blocks of a host pool from SGLang's arguments, model and pool.

SGLang's own names of pages say which tokens they hold, and nothing else. Everything else that
changes the bytes or the meaning of a page is part of the fingerprint: weights and configuration,
the arguments that change the computation, adapters, data type, layout, rank, version and device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import OpaqueLayout, PortableLayout
from holdfast.client.local_model import (
    CONFIG,
    local_source,
    portable_fingerprint,
    weight_files,
)
from holdfast.client.model_meaning import ModelSource, canonical_json, model_digest, positions_of
from holdfast.client.weights_digest import (
    NoDigestError,
    check_unchanged,
    files_digest,
    process_start_ns,
)
from holdfast.engines.compared_models import computed_by
from holdfast.engines.sglang.options import EXTRA_CONFIG, StorageOptions
from holdfast.errors import ConfigError

ENGINE = "sglang"
"""The engine's name in a fingerprint."""

NAMING = "sglang page hashes: sha256 chain over tokens, seeded by extra key and salt"
"""`Meaning.naming` of pages that SGLang names."""

START_NS = 50_000_000
"""Added to the process start for comparisons with file times, because file system clocks tick."""

ARGUMENTS = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("c128_page_size", "context_length", "custom_weight_loader", "decrypted_config_file"),
    *("deepep_dispatcher_output_dtype", "disable_hybrid_swa_memory", "dllm_algorithm"),
    *("dllm_algorithm_config", "dsa_decode_backend", "dsa_prefill_backend", "dsv4_attn_backend"),
    *("dsv4_prefill_backend", "dtype", "enable_decoder_swa_bounded_replay"),
    *("enable_deepseek_v4_fp4_indexer", "enable_deterministic_inference"),
    *("enable_encoder_swa_bounded_replay", "enable_fused_qk_norm_rope"),
    *("enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding"),
    *("enable_multi_layer_eagle", "enable_multimodal", "enable_quant_communications"),
    *("enable_tf32_matmul", "enable_w4a4_mxfp4_megamoe", "flashinfer_a2a_dispatch_type"),
    *("flashinfer_mxfp4_moe_precision", "forward_hooks", "image_processor_backend", "kt_method"),
    *("kt_num_gpu_experts", "kt_weight_path", "kv_cache_dtype", "language_model_only"),
    *("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend"),
    *("load_format", "mamba_backend", "mamba_ssm_dtype", "mm_process_config"),
    *("model_config_parser", "model_impl", "model_loader_extra_config"),
    *("modelopt_checkpoint_restore_path", "modelopt_quant", "moe_runner_backend"),
    *("prefill_kv_cache_dequant_dtype", "qsa_indexer_dtype", "quantization"),
    *("quantize_and_serve", "rl_on_policy_target", "rl_quant_profile", "speculative_algorithm"),
    *("speculative_draft_kv_cache_dtype", "speculative_draft_model_quantization"),
    *("speculative_draft_sink_size", "speculative_draft_window_size"),
    *("triton_attention_reduce_in_fp32", "uno_lora_path"),
)
"""SGLang's arguments that may change the bytes of a page; their values are part of the name."""

POOL_FIELDS = (
    *("start_layer", "end_layer", "layer_num", "target_layer_num", "head_num", "head_dim"),
    *("v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "index_head_dim"),
    *("num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "temporal_state_elem_size"),
    *("conv_dtype", "temporal_dtype", "page_size", "layout", "storage_format_tag", "dtype"),
)
"""Fields of a host pool that describe its pages; a pool has some of them."""

REPLICATED = ("MLA", "DSA", "DeepSeekV4")
"""Parts of the names of the classes of pools of which all tensor-parallel ranks hold copies."""

TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
"""SGLang's variable for the implementation of its tree of contexts."""

ADAPTER_CONFIG = "adapter_config.json"

_LONG_ROPE = "long_factor"

FROM_FILES = (
    *("auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral"),
    *("npcache", "pt", "runai_streamer", "safetensors", "sharded_state"),
)
"""Values of `load_format` with which the weights are those of the model's files.

With the others they are random, copied from another server, or kept from an earlier start.
"""

WEIGHTS_OF_ANOTHER_PROCESS = "client"
"""Value of `weight_cache_mode` with which another process has the weights in memory."""

BESIDE_FILES = (
    *("decrypted_config_file", "forward_hooks", "kt_weight_path"),
    *("modelopt_checkpoint_restore_path", "rl_quant_profile"),
)
"""Arguments that name weights, settings or code beside the model's files."""

OTHER_COMPUTATION = (
    *("decrypted_config_file", "dllm_algorithm", "forward_hooks", "kt_weight_path"),
    *("modelopt_quant", "quantization", "quantize_and_serve", "rl_quant_profile"),
)
"""Arguments with which SGLang computes other KV than another engine with the same model."""


class ServedModel(NamedTuple):
    """What one SGLang server computes, as texts of a fingerprint; equal on all of its ranks."""

    model: str
    positions: str
    adapter: str
    kv_quantisation: str
    kv_scales: str
    version: str
    device: str


def served_model(arguments: Any, setting: StorageOptions, version: str, device: str) -> ServedModel:
    """Return what a server with these arguments computes; reads and hashes the weights.

    Raises NoDigestError if nothing identifies the weights, ConfigError for what SGLang's names of
    pages do not tell apart.
    """
    _refuse_long_rope(arguments)
    if not setting.model_digest:
        _refuse_beside_files(arguments)
    values = {name: str(getattr(arguments, name, None)) for name in ARGUMENTS}
    values["draft"] = _draft_source(arguments, setting)
    source = _source(
        arguments.model_path,
        arguments.revision,
        json.loads(arguments.json_model_override_args or "{}"),
        arguments,
        setting,
    )
    model = f"{model_digest(source)}\0{canonical_json(values)}"
    quantised = arguments.kv_cache_dtype not in (None, "auto")
    return ServedModel(
        model=hashlib.blake2b(model.encode(), digest_size=16).hexdigest(),
        positions=positions_of(source),
        adapter=_adapters(arguments),
        kv_quantisation=str(arguments.kv_cache_dtype) if quantised else "none",
        kv_scales=_scales(arguments) if quantised else "none",
        version=version,
        device=device,
    )


def _refuse_beside_files(arguments: Any) -> None:
    """Raise NoDigestError if the model's files do not say what the server computes with."""
    cached = getattr(arguments, "weight_cache_mode", None)
    reasons = {
        f"load_format is {arguments.load_format}": arguments.load_format not in FROM_FILES,
        f"weight_cache_mode is {cached}": cached == WEIGHTS_OF_ANOTHER_PROCESS,
        **{f"{name} is set": bool(getattr(arguments, name, None)) for name in BESIDE_FILES},
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise NoDigestError(
            f"{EXTRA_CONFIG}: {', '.join(found)}, so the files of the model do not identify what "
            "is computed; set model_digest to a name that changes whenever that does"
        )


def _refuse_long_rope(arguments: Any) -> None:
    """Raise ConfigError for LongRoPE with prompts beyond the trained length.

    SGLang chooses the factors of a whole batch by its longest position, so the keys of a page
    depend on which requests were computed beside it.
    """
    folder = model_folder(arguments.model_path, arguments.revision)
    if folder is None or not (folder / CONFIG).is_file():
        return  # nothing identifies such a model
    config = json.loads((folder / CONFIG).read_bytes())
    given = {**config, **json.loads(arguments.json_model_override_args or "{}")}
    if _LONG_ROPE not in canonical_json(given):
        return
    trained = int(_setting(given, "original_max_position_embeddings") or 0)
    served = getattr(arguments, "context_length", None)
    longest = int(served or _setting(given, "max_position_embeddings") or 0)
    if not 0 < longest <= trained:
        raise ConfigError(
            f"{EXTRA_CONFIG}: the model has LongRoPE, and SGLang rotates the keys of all requests "
            "of a batch by the longest of them, so the pages of one prompt differ from time to "
            f"time; start it with --context-length {trained or 'of the trained length'}, or "
            "without this storage"
        )


def _setting(fields: Mapping[str, Any], name: str) -> Any:
    """Return the first value of a setting in the sections of a configuration; None without one."""
    if name in fields:
        return fields[name]
    inner = (_setting(value, name) for value in fields.values() if isinstance(value, Mapping))
    return next((value for value in inner if value is not None), None)


def refuse_images(model_config: Any, setting: StorageOptions) -> None:
    """Raise ConfigError for a model with image inputs, unless the user accepts SGLang's names.

    `model_config`: SGLang's ModelConfig.
    """
    if model_config.is_multimodal and not setting.images:
        raise ConfigError(
            f"{EXTRA_CONFIG}: the model takes images, which SGLang names by 64 bits of a hash, so "
            'two images may have one name; serve text only (--language-model-only), or set "images"'
            ": true to accept it"
        )


class PoolDescription(NamedTuple):
    """A host pool's name, how the bytes of a page are arranged (see `pages`), and their number."""

    name: str
    arrangement: str
    page_bytes: int


def fingerprint_of(
    served: ServedModel, config: Any, pool: Any, described: PoolDescription
) -> Fingerprint:
    """Return the fingerprint of the pages of one host pool of one rank.

    `config`: SGLang's HiCacheStorageConfig.
    """
    arrangement = {
        "pool": described.name,
        "class": type(pool).__name__,
        "bytes": described.arrangement,
        "device": served.device,
        "slice": _slice(config, pool),
        **{name: str(getattr(pool, name)) for name in POOL_FIELDS if hasattr(pool, name)},
    }
    layers = max(1, int(getattr(pool, "layer_num", 1) or 1))
    page_tokens = int(config.logical_page_size or pool.page_size)
    layout = OpaqueLayout(
        dtype=str(getattr(pool, "dtype", "none")).removeprefix("torch."),
        block_tokens=page_tokens,
        layers=layers,
        nbytes=described.page_bytes,
        arrangement=canonical_json(arrangement),
        engine=ENGINE,
        engine_version=served.version,
    )
    meaning = Meaning(
        model=served.model,
        positions=served.positions,
        adapter=served.adapter,
        kv_quantisation=served.kv_quantisation,
        kv_scales=served.kv_scales,
        naming=NAMING,
        block_tokens=page_tokens,
        kv_group=KvGroup.all_layers(layers),
    )
    return Fingerprint(meaning, layout)


def refuse_portable(arguments: Any, config: Any, setting: StorageOptions) -> None:
    """Raise ConfigError if the pages of this server have no portable form.

    `config`: SGLang's HiCacheStorageConfig.
    """
    reasons = {
        "more than one rank": max(config.tp_size, config.pp_size, config.attn_cp_size) > 1,
        "latent KV (MLA)": config.is_mla_model,
        "a quantised KV cache": arguments.kv_cache_dtype not in (None, "auto"),
        "adapters": bool(getattr(arguments, "lora_paths", None)),
        "speculative decoding": getattr(arguments, "speculative_algorithm", None) is not None,
        "images, for which SGLang has numbers of 63 bits and no tokens": setting.images,
        "interface_v1 not set to 1": not (config.extra_config or {}).get("interface_v1"),
        **{name: bool(getattr(arguments, name, None)) for name in OTHER_COMPUTATION},
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(
            f"{EXTRA_CONFIG}: layout is portable, which is not possible with {', '.join(found)}; "
            "omit layout"
        )
    if _tree_core() != "python":
        raise ConfigError(
            f"{EXTRA_CONFIG}: layout is portable, but SGLang's tree of contexts names pages itself;"
            f" start it with {TREE_CORE}=python in its environment"
        )


def portable_fingerprint_of(
    arguments: Any, setting: StorageOptions, layout: PortableLayout
) -> Fingerprint:
    """Return the fingerprint of portable blocks of a server's model, as other engines derive it."""
    folder = model_folder(arguments.model_path, arguments.revision)
    overrides = json.loads(arguments.json_model_override_args or "{}")
    if folder is None:
        raise NoDigestError(_no_files(arguments.model_path))
    config = json.loads((folder / CONFIG).read_bytes())
    if _LONG_ROPE in canonical_json([config, overrides]):
        raise ConfigError(
            f"{EXTRA_CONFIG}: layout is portable, and the model has LongRoPE, whose keys depend on "
            "the length that each engine is started for; omit layout"
        )
    if not setting.model_digest:
        _check_unchanged(folder)
    own = str(getattr(arguments, "model_impl", "auto")).lower() != "transformers"
    by = computed_by(ENGINE if own else f"{ENGINE} with transformers", config, overrides)
    return portable_fingerprint(
        folder, layout, name=setting.model_digest, overrides=overrides, computed_by=by
    )


def _tree_core() -> str:
    """Return which implementation of its tree of contexts SGLang is told to use."""
    from sglang.srt.environ import envs

    return str(envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get())


def is_replicated(config: Any, pool: Any) -> bool:
    """Whether every tensor-parallel rank holds a copy of this pool's pages."""
    names = [one.__name__ for one in type(pool).__mro__]
    return bool(config.is_mla_model) and any(
        part in name for part in REPLICATED for name in names if name != "HostKVCache"
    )


def _slice(config: Any, pool: Any) -> dict[str, Any]:
    """Return which part of the model the pages of this rank hold."""
    part = {
        "pp_rank": config.pp_rank,
        "pp_size": config.pp_size,
        "cp_rank": config.attn_cp_rank,
        "cp_size": config.attn_cp_size,
        "dcp_rank": config.dcp_rank,
        "dcp_size": config.dcp_size,
    }
    if not is_replicated(config, pool):
        part |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
    return part


def _no_files(named: str) -> str:
    return (
        f"{EXTRA_CONFIG}: the files of {named!r} are neither in a folder nor in the Hugging Face "
        "cache, so nothing identifies the model; download it first"
    )


def model_folder(named: str, revision: str | None) -> Path | None:
    """Return the folder of a model's files: the named one, or that of the Hugging Face cache.

    None if there is neither.
    """
    if Path(named).is_dir():
        return Path(named)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(named, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _source(
    named: str,
    revision: str | None,
    overrides: Mapping[str, Any],
    arguments: Any,
    setting: StorageOptions,
) -> ModelSource:
    """Return a model as its files and SGLang's arguments describe it."""
    folder = model_folder(named, revision)
    if folder is None:
        raise NoDigestError(_no_files(named))
    name = setting.model_digest
    source = local_source(folder, str(arguments.dtype), name=name, overrides=overrides)
    if not name:
        _check_unchanged(folder)
    return source._replace(
        computed_by=ENGINE,
        quantised_on_load=str(arguments.quantization or "none"),
        code=str(revision) if arguments.trust_remote_code else "none",
    )


def _check_unchanged(folder: Path) -> None:
    """Raise NoDigestError if a file may differ from what this process has loaded."""
    files = [*weight_files(folder), folder / CONFIG]
    check_unchanged(folder, files, process_start_ns() + START_NS)


def _draft_source(arguments: Any, setting: StorageOptions) -> str:
    """Return the digest of the draft model, whose layers may be in the same pools, or `none`."""
    named = getattr(arguments, "speculative_draft_model_path", None)
    if not getattr(arguments, "speculative_algorithm", None) or not named:
        return "none"
    revision = getattr(arguments, "speculative_draft_model_revision", None)
    return model_digest(_source(named, revision, {}, arguments, setting))


def _adapters(arguments: Any) -> str:
    """Return a digest of the adapters that the server was started with, or `none`.

    SGLang names such an adapter by its name and path only, so its files count here. An adapter that
    is loaded later has a new random name each time.
    """
    found = getattr(arguments, "lora_paths", None)
    if not found:
        return "none"
    digests = []
    for one in found:
        folder = model_folder(str(one.lora_path), None)
        if folder is None:
            raise NoDigestError(
                f"{EXTRA_CONFIG}: the files of adapter {one.lora_name!r} are neither a folder nor "
                "in the Hugging Face cache, so nothing identifies it; name its folder in "
                "--lora-paths"
            )
        files = [*weight_files(folder), folder / ADAPTER_CONFIG]
        try:
            check_unchanged(folder, files, process_start_ns() + START_NS)
        except NoDigestError:
            raise NoDigestError(
                f"{EXTRA_CONFIG}: the files of adapter {one.lora_name!r} changed after this "
                "server's process started, so it may have loaded the earlier ones; start it again"
            ) from None
        digests.append([str(one.lora_name), files_digest("adapter", folder, files)])
    return hashlib.blake2b(canonical_json(sorted(digests)).encode(), digest_size=16).hexdigest()


def _scales(arguments: Any) -> str:
    named = getattr(arguments, "quantization_param_path", None)
    if not named:
        return "weights"
    return hashlib.blake2b(Path(named).read_bytes(), digest_size=16).hexdigest()
