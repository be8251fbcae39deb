"""Derive the fingerprint, the layout and the device pages from vLLM's configuration and tensors.

Everything that changes the bytes or the meaning of a page is part of the fingerprint. For a model
or setting that this does not describe, UnsupportedError gives the reason, and the connector is
passive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import TOKENS, Fingerprint, KvGroup, Meaning
from holdfast.blocks.layout import ExactLayout, PortableLayout, RankSlice
from holdfast.client.model_meaning import (
    POSITION_WORDS,
    VOLATILE_FIELDS,
    ModelSource,
    canonical_json,
    model_digest,
    positions_of,
)
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
from holdfast.engines.vllm.checkpoint import CONFIG, checkpoint_of
from holdfast.engines.vllm.options import EXTRA_CONFIG, ConnectorSettings
from holdfast.errors import BlockError, ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS

ENGINE = "vllm"
"""The engine's name in a fingerprint."""

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

_LONG_ROPE = "long_factor"


class UnsupportedError(HoldfastError):
    """The model or setting is not supported; the message states which and a remedy."""


class PagedGroup(NamedTuple):
    """The single KV cache group of a model: its layers in order, page size, and spec of vLLM."""

    layers: tuple[str, ...]
    page_tokens: int
    spec: Any


class CacheGeometry(NamedTuple):
    """Addresses and sizes of the pages of every layer; `order`: element order inside a page.

    `device`: where they are, as PyTorch names it.
    """

    bases: tuple[int, ...]
    stride_bytes: int
    page_bytes: int
    pages: int
    order: str
    device: str = "cpu"

    def pages_of(self, pages_per_block: int) -> Pages:
        """Return the pages as a device needs them."""
        sizes = (self.stride_bytes, self.page_bytes, self.pages, pages_per_block)
        return Pages.uniform(self.bases, *sizes)


def only_group(vllm_config: Any, kv_cache_config: Any) -> PagedGroup:
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
    return PagedGroup(tuple(groups[0].layer_names), spec.block_size, spec)


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


def geometry_of(group: PagedGroup, tensors: Mapping[str, Any], pages: int) -> CacheGeometry:
    """Measure the tensors that vLLM registered; raise UnsupportedError if a page has gaps."""
    missing = [name for name in group.layers if name not in tensors]
    if missing:
        raise UnsupportedError(f"vLLM registered no KV cache for layer {missing[0]!r}")
    layers = [tensors[name] for name in group.layers]
    shapes = {(tuple(t.shape), tuple(t.stride()), t.element_size(), str(t.device)) for t in layers}
    if len(shapes) != 1:
        raise UnsupportedError(f"layers differ in shape, stride, dtype or device: {sorted(shapes)}")
    (shape, strides, itemsize, device), *_ = shapes
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
    stride_bytes = kernel_rows * strides[0] * itemsize
    return CacheGeometry(bases, stride_bytes, page_bytes, pages, order, device)


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
    vllm_config: Any,
    group: PagedGroup,
    geometry: CacheGeometry,
    setting: ConnectorSettings,
    rank: int,
) -> Fingerprint:
    """Return the fingerprint of exact blocks, the pages of one tensor-parallel rank."""
    model, spec = vllm_config.model_config, group.spec
    block_tokens = block_tokens_of(setting, group.page_tokens)
    kernels = _kernels(vllm_config, group)
    names = hashlib.blake2b("\0".join(group.layers).encode(), digest_size=8).hexdigest()
    with _naming_the_option(setting, block_tokens):
        layout = ExactLayout(
            dtype=str(spec.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            layers=len(group.layers),
            kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            page_tokens=group.page_tokens,
            page_bytes=geometry.page_bytes,
            packing=f"{kernels.packing}:{type(spec).__name__}:{geometry.order}:{names}",
            engine=ENGINE,
            engine_version=kernels.version,
            backend=kernels.backend,
            device=kernels.device,
            slice=RankSlice(
                tp_rank=rank,
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
                pp_rank=0,
                pp_size=1,
            ),
        )
    positions = {
        key: value
        for key, value in model.hf_text_config.to_dict().items()
        if any(word in key for word in POSITION_WORDS)
    }
    # With LongRoPE vLLM uses the long factors for every token if `max_model_len` exceeds the
    # original training length (`phi3_long_rope_scaled_rope.py`).
    if _LONG_ROPE in canonical_json(positions):
        positions["max_model_len"] = model.max_model_len
    weights, positions_text = resolved_digest(vllm_config, setting), canonical_json(positions)
    return Fingerprint(_meaning(vllm_config, group, weights, positions_text, block_tokens), layout)


def portable_fingerprint_of(
    vllm_config: Any, group: PagedGroup, layout: PortableLayout, setting: ConnectorSettings
) -> Fingerprint:
    """Return the fingerprint of portable blocks of the whole model, equal on every rank.

    Raises UnsupportedError for a model or setting whose meaning its files do not say.
    """
    source = _model_source(vllm_config, setting)
    digest, positions = model_digest(source), positions_of(source)
    return Fingerprint(_meaning(vllm_config, group, digest, positions, layout.block_tokens), layout)


def _meaning(
    vllm_config: Any, group: PagedGroup, model: str, positions: str, block_tokens: int
) -> Meaning:
    cache = vllm_config.cache_config
    mode = quantisation_mode(group.spec)
    quantised = cache.cache_dtype != "auto" or mode != "NONE"
    skipped: Sequence[str] = getattr(cache, "kv_cache_dtype_skip_layers", ())
    scheme = f"{cache.cache_dtype}:{mode}:{','.join(map(str, skipped))}"
    return Meaning(
        model=model,
        positions=positions,
        adapter="none",  # requests with an adapter are declined
        kv_quantisation=scheme if quantised else "none",
        kv_scales="weights" if quantised else "none",  # `only_group` refuses computed scales
        naming=TOKENS,
        block_tokens=block_tokens,
        kv_group=KvGroup.all_layers(len(group.layers)),
    )


def quantisation_mode(spec: Any) -> str:
    """Return the name of vLLM's mode of KV quantisation; `NONE` for a spec without one."""
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))


@contextlib.contextmanager
def _naming_the_option(setting: ConnectorSettings, block_tokens: int) -> Iterator[None]:
    """Turn a BlockError into a ConfigError of `block_tokens`, if the user set this option."""
    try:
        yield
    except BlockError as error:
        if setting.block_tokens:
            raise ConfigError(f"{EXTRA_CONFIG}.block_tokens: {block_tokens}: {error}") from error
        raise


class _Kernels(NamedTuple):
    """What arranges the elements in a page: vLLM's version, device, backend and packing."""

    version: str
    device: str
    backend: str
    packing: str


def _kernels(vllm_config: Any, group: PagedGroup) -> _Kernels:
    import vllm

    spec = group.spec
    if vllm_config.device_config.device_type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        isa = _get_attn_isa(dtype, group.page_tokens, spec.head_size, cache_dtype)
        return _Kernels(vllm.__version__, "cpu", "CPU_ATTN", isa)
    from vllm.platforms import current_platform

    named = backends_of(vllm_config, group)
    if not named:
        raise UnsupportedError("vLLM does not report the attention backend of the model's layers")
    runner = "v2" if vllm_config.use_v2_model_runner else "v1"
    device, backend = current_platform.get_device_name(), "+".join(sorted(named))
    return _Kernels(vllm.__version__, device, backend, runner)


def backends_of(vllm_config: Any, group: PagedGroup) -> set[str]:
    """Return the names of the attention backends of a group's layers, as far as vLLM has them."""
    layers = vllm_config.compilation_config.static_forward_context
    return {layers[name].attn_backend.get_name() for name in group.layers if name in layers}


def _weights(vllm_config: Any, setting: ConnectorSettings) -> str:
    """Return the digest or the user's name of the weights; raise NoDigestError if unknown."""
    if setting.model_digest:
        return f"pinned:{setting.model_digest}"
    checkpoint = checkpoint_of(vllm_config)
    weights = files_digest(*checkpoint)
    # Checked last: a later change affects neither the loaded weights nor the digest.
    check_unchanged(checkpoint.folder, checkpoint.files, process_start_ns() + START_NS)
    return weights


def resolved_digest(vllm_config: Any, setting: ConnectorSettings) -> str:
    """Return a digest of weights and of settings as vLLM resolved them, for exact blocks.

    Raises NoDigestError if the weights are unknown.
    """
    model = vllm_config.model_config
    settings = {
        key: value for key, value in model.hf_config.to_dict().items() if key not in VOLATILE_FIELDS
    }
    parts = (
        _weights(vllm_config, setting),
        canonical_json(settings),
        str(model.dtype),
        str(model.quantization),
        canonical_json(getattr(model, "quantization_config", None)),
        str(model.disable_sliding_window),
        str(getattr(model, "model_impl", "auto")),
        str(getattr(model, "code_revision", None)),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _model_source(vllm_config: Any, setting: ConnectorSettings) -> ModelSource:
    """Return the model as its files and vLLM's options describe it."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    model = vllm_config.model_config
    overrides = model.hf_overrides
    if callable(overrides):
        raise UnsupportedError(
            "hf_overrides is a function, so no digest describes it; portable contexts need a "
            "dictionary"
        )
    if model.disable_sliding_window:
        overrides = {**overrides, "disable_sliding_window": True}
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    config = get_hf_file_to_dict(CONFIG, model.hf_config_path or model.model, revision)
    if config is None:
        raise UnsupportedError(f"{model.model!r} has no {CONFIG}; portable contexts need it")
    if _LONG_ROPE in canonical_json([config, overrides]):  # as in `fingerprint_of`
        overrides = {**overrides, "max_model_len": model.max_model_len}
    on_load = model.quantization if "quantization_config" not in config else None
    return ModelSource(
        weights=_weights(vllm_config, setting),
        config=config,
        overrides=overrides,
        dtype=str(model.dtype).removeprefix("torch."),
        quantised_on_load=str(on_load or "none"),
        code=str(model.code_revision or "none"),
    )
