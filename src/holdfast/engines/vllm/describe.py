"""Derive the fingerprint, the layout and the device pages from vLLM's configuration and tensors.

Everything that changes the bytes or the meaning of a page is part of the fingerprint. For a model
or setting that this does not describe, UnsupportedError gives the reason, and the connector is
passive.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import ExactLayout, RankSlice
from holdfast.client.weights_digest import check_unchanged, files_digest, process_start_ns
from holdfast.devices.base import Pages
from holdfast.engines.cached_models import (
    FLAG,
    FLAG_COST,
    Caching,
    LayerKind,
    Mechanism,
    ModelKind,
    kind_of,
)
from holdfast.engines.vllm.checkpoint import checkpoint_of
from holdfast.engines.vllm.options import EXTRA_CONFIG, ConnectorSettings
from holdfast.errors import BlockError, ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS

SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""KV cache specs whose pages depend only on the tokens up to their end."""

FLAG_FIELD = "disable_hybrid_kv_cache_manager"
"""The field of vLLM's scheduler configuration that `FLAG` sets."""

_MECHANISMS: Mapping[str, Mechanism] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "recurrent",
    "SlidingWindowMLASpec": "sparse",
}

DRAFTLESS = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that keep no draft KV in the cache."""

START_NS = 50_000_000
"""Added to the process start for comparisons with file times, because file system clocks tick.

A process takes longer than this until its first read of weights.
"""

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_LONG_ROPE = "long_factor"
_POSITION_WORDS = ("rope", "rotary", "position", "sliding", "window", "alibi", "yarn")


class UnsupportedError(HoldfastError):
    """The model or setting is not supported; the message states which and a remedy."""


class KvGroup(NamedTuple):
    """The single KV cache group of a model: its layers in order, page size, and spec of vLLM."""

    layers: tuple[str, ...]
    page_tokens: int
    spec: Any


class CacheGeometry(NamedTuple):
    """Addresses and sizes of the pages of every layer; `order`: element order inside a page."""

    bases: tuple[int, ...]
    stride_bytes: int
    page_bytes: int
    pages: int
    order: str

    def pages_of(self, pages_per_block: int) -> Pages:
        """Return the pages as a device needs them."""
        sizes = (self.stride_bytes, self.page_bytes, self.pages, pages_per_block)
        return Pages.uniform(self.bases, *sizes)


def only_group(vllm_config: Any, kv_cache_config: Any) -> KvGroup:
    """Return the model's KV cache group; raise UnsupportedError for an unsupported model."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ not in SPECS:
        raise UnsupportedError(why_not_cached(vllm_config, groups))
    spec = groups[0].kv_cache_spec
    if getattr(spec, "non_causal", False):
        raise UnsupportedError(
            "the model attends to later tokens, so the KV of a prefix is not its own"
        )
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name} {getattr(parallel, name)} is not supported, only 1")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTLESS:
        raise UnsupportedError(
            f"speculative method {speculative.method!r} keeps KV that depends on later tokens; "
            f"supported are {', '.join(DRAFTLESS)}"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError("calculate_kv_scales computes scales that differ between runs")
    return KvGroup(tuple(groups[0].layer_names), spec.block_size, spec)


def model_kind(groups: Sequence[Any]) -> ModelKind:
    """Return the kind of a model from vLLM's KV cache groups."""
    layers: list[LayerKind] = []
    latent_sizes: set[float] = set()
    for spec in _specs_of(groups):
        name = type(spec).__name__
        mechanism = _MECHANISMS.get(name, "other")
        size = 0.0
        if mechanism not in ("recurrent", "other"):
            size = spec.unpadded_page_size_bytes / spec.block_size
        if name == "MLAAttentionSpec":
            latent_sizes.add(size)
        layers.append(LayerKind(mechanism, size))
    if len(latent_sizes) > 1:  # the latent of each token, and the keys of an index
        layers.append(LayerKind("sparse", 0.0))
    return kind_of(layers)


def why_not_cached(vllm_config: Any, groups: Sequence[Any]) -> str:
    """Return why the connector does not cache a model, and what helps, if anything does."""
    kind = model_kind(groups)
    names = Counter(type(spec).__name__ for spec in _specs_of(groups))
    listed = ", ".join(f"{count} of {name}" for name, count in names.items())
    text = f"the model has {kind.layers} ({len(groups)} KV cache groups; layers: {listed}), and "
    if kind.caching is Caching.YES:
        return f"{text}the connector saves the pages of one group only"
    settings = getattr(vllm_config, "scheduler_config", None)
    if kind.caching is Caching.NOT_YET or getattr(settings, FLAG_FIELD, False):
        return f"{text}such a model is not cached yet: {kind.why}"
    return f"{text}{kind.why}; start vLLM with {FLAG} to cache it: {FLAG_COST}"


def _specs_of(groups: Sequence[Any]) -> Iterator[Any]:
    """Yield the specification of each layer."""
    for group in groups:
        spec = group.kv_cache_spec
        each = getattr(spec, "kv_cache_specs", None)
        yield from (
            [each[name] for name in group.layer_names]
            if each
            else ([spec] * len(group.layer_names))
        )


def geometry_of(group: KvGroup, tensors: Mapping[str, Any], pages: int) -> CacheGeometry:
    """Measure the tensors that vLLM registered; raise UnsupportedError if a page has gaps."""
    missing = [name for name in group.layers if name not in tensors]
    if missing:
        raise UnsupportedError(f"vLLM registered no KV cache for layer {missing[0]!r}")
    layers = [tensors[name] for name in group.layers]
    shapes = {(tuple(t.shape), tuple(t.stride()), t.element_size(), str(t.device)) for t in layers}
    if len(shapes) != 1:
        raise UnsupportedError(f"layers differ in shape, stride, dtype or device: {sorted(shapes)}")
    (shape, strides, itemsize, _), *_ = shapes
    if shape[0] % pages:
        raise UnsupportedError(
            f"the KV cache has {shape[0]} rows, which is not a multiple of {pages} pages"
        )
    kernel_rows = shape[0] // pages
    inner = sorted(zip(strides[1:], shape[1:], range(1, len(shape)), strict=True), reverse=True)
    dense = 1
    for stride, length, _ in reversed(inner):
        if stride != dense and length > 1:
            raise UnsupportedError(f"a page is not contiguous: shape {shape}, strides {strides}")
        dense *= length
    if kernel_rows > 1 and strides[0] != dense:
        raise UnsupportedError(f"a page is {kernel_rows} rows with gaps: strides {strides}")
    page_bytes = kernel_rows * dense * itemsize
    spec_bytes = group.spec.page_size_bytes
    if page_bytes not in (spec_bytes, getattr(group.spec, "real_page_size_bytes", spec_bytes)):
        raise UnsupportedError(
            f"a page has {page_bytes} bytes, vLLM's configuration says {spec_bytes}"
        )
    lengths = ".".join(str(length) for length in shape[1:])
    order = f"{kernel_rows}x{lengths}:{''.join(str(axis) for *_, axis in inner)}"
    bases = tuple(layer.data_ptr() for layer in layers)
    return CacheGeometry(bases, kernel_rows * strides[0] * itemsize, page_bytes, pages, order)


def block_tokens_of(setting: ConnectorSettings, page_tokens: int) -> int:
    """Return the tokens per block; raise ConfigError for an option that the page rules out."""
    block_tokens = setting.block_tokens or -(-BLOCK_TOKENS // page_tokens) * page_tokens
    if block_tokens % page_tokens:
        raise ConfigError(
            f"{EXTRA_CONFIG}.block_tokens: {block_tokens} is not a multiple of vLLM's page of "
            f"{page_tokens} tokens; write {-(-block_tokens // page_tokens) * page_tokens}"
        )
    return block_tokens


def step_blocks_of(vllm_config: Any, block_tokens: int) -> int:
    """Return the most blocks that one step can fill: of its tokens, and of each running request."""
    scheduler = vllm_config.scheduler_config
    return int(scheduler.max_num_batched_tokens) // block_tokens + int(scheduler.max_num_seqs)


def fingerprint_of(
    vllm_config: Any, group: KvGroup, geometry: CacheGeometry, setting: ConnectorSettings, rank: int
) -> Fingerprint:
    """Return the fingerprint of the blocks of one tensor-parallel rank."""
    model, spec = vllm_config.model_config, group.spec
    block_tokens = block_tokens_of(setting, group.page_tokens)
    parts = RankSlice(
        tp_rank=rank,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        pp_rank=0,
        pp_size=1,
        group=0,
    )
    try:
        layout = ExactLayout(
            arrangement=arrangement(vllm_config, group, geometry),
            dtype=str(spec.dtype).removeprefix("torch."),
            layers=len(group.layers),
            kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            page_tokens=group.page_tokens,
            page_bytes=geometry.page_bytes,
            block_tokens=block_tokens,
            slice=parts,
        )
    except BlockError as error:
        if setting.block_tokens:
            raise ConfigError(f"{EXTRA_CONFIG}.block_tokens: {block_tokens}: {error}") from error
        raise
    weights = model_digest(vllm_config, setting)
    positions = {
        key: value
        for key, value in model.hf_text_config.to_dict().items()
        if any(word in key for word in _POSITION_WORDS)
    }
    # With LongRoPE vLLM uses the long factors for every token if `max_model_len` exceeds the
    # original training length (`phi3_long_rope_scaled_rope.py`).
    if _LONG_ROPE in _canonical(positions):
        positions["max_model_len"] = model.max_model_len
    cache = vllm_config.cache_config
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    kv_quantisation = "none"
    if cache.cache_dtype != "auto" or mode != "NONE":
        skipped: Sequence[str] = getattr(cache, "kv_cache_dtype_skip_layers", ())
        kv_quantisation = f"{cache.cache_dtype}:{mode}:{','.join(map(str, skipped))}"
    return Fingerprint(
        model=weights,
        layout=layout,
        positions=_canonical(positions),
        adapter="none",
        kv_quantisation=kv_quantisation,
    )


def arrangement(vllm_config: Any, group: KvGroup, geometry: CacheGeometry) -> str:
    """Return the name of the element order in a page, with the device, kernels and versions."""
    import vllm

    spec = group.spec
    if vllm_config.device_config.device_type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        isa = _get_attn_isa(dtype, group.page_tokens, spec.head_size, cache_dtype)
        kind = f"vllm-cpu:{isa}"
    else:
        from vllm.platforms import current_platform

        runner = "v2" if vllm_config.use_v2_model_runner else "v1"
        device = current_platform.get_device_name()
        layers = vllm_config.compilation_config.static_forward_context
        named = {layers[name].attn_backend.get_name() for name in group.layers if name in layers}
        if not named:
            raise UnsupportedError(
                "vLLM does not report the attention backend of the model's layers"
            )
        kind = f"vllm:{device}:{'+'.join(sorted(named))}:{runner}"
    names = hashlib.blake2b("\0".join(group.layers).encode(), digest_size=8).hexdigest()
    return f"{kind}:{vllm.__version__}:{type(spec).__name__}:{geometry.order}:{names}"


def model_digest(vllm_config: Any, setting: ConnectorSettings) -> str:
    """Return a digest of weights and settings; raise NoDigestError if unknown."""
    model = vllm_config.model_config
    if setting.model_digest:
        weights = f"pinned:{setting.model_digest}"
    else:
        checkpoint = checkpoint_of(vllm_config)
        weights = files_digest(*checkpoint)
        # Checked last: a later change affects neither the loaded weights nor the digest.
        check_unchanged(checkpoint.folder, checkpoint.files, process_start_ns() + START_NS)
    settings = {
        key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE
    }
    parts = (
        weights,
        _canonical(settings),
        str(model.dtype),
        str(model.quantization),
        _canonical(getattr(model, "quantization_config", None)),
        str(model.disable_sliding_window),
        str(getattr(model, "model_impl", "auto")),
        str(getattr(model, "code_revision", None)),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
