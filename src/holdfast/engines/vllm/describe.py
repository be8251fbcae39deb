"""Derive the fingerprint and the layout of a KV group from vLLM's configuration.

Everything that changes the bytes or the meaning of a page is part of the fingerprint. For a model
or setting that this does not describe, UnsupportedError gives the reason, and the connector is
passive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.blocks.fingerprint import TOKENS, Fingerprint, Meaning
from holdfast.blocks.layout import ExactLayout, PortableLayout
from holdfast.client.model_meaning import (
    POSITION_WORDS,
    VOLATILE_FIELDS,
    ModelSource,
    canonical_json,
    model_digest,
    positions_of,
)
from holdfast.client.weights_digest import (
    NoDigestError,
    check_unchanged,
    files_digest,
    process_start_ns,
)
from holdfast.engines.compared_models import computed_by
from holdfast.engines.vllm.checkpoint import CONFIG, checkpoint_of
from holdfast.engines.vllm.draft import Draft, draft_of
from holdfast.engines.vllm.kv_groups import CacheGeometry, PagedGroup
from holdfast.engines.vllm.options import EXTRA_CONFIG, ConnectorSettings
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.errors import BlockError, ConfigError
from holdfast.limits import BLOCK_TOKENS

ENGINE = "vllm"
"""The engine's name in a fingerprint."""

START_NS = 50_000_000
"""Added to the process start for comparisons with file times, because file system clocks tick.

A process takes longer than this until its first read of weights.
"""

LLAMA_4_UNTUNED_TOKENS = 32_768
"""The largest `max_model_len` for which vLLM computes Llama 4 without temperature tuning."""

MISTRAL_CONFIG = "params.json"
"""File with a model's settings in the format `mistral`."""

_LONG_ROPE = "long_factor"
_LLAMA_4 = "llama4_text"
_TUNING = "attn_temperature_tuning"
_SOURCE_FIELDS = ("_name_or_path", "transformers_version")


def block_tokens_of(setting: ConnectorSettings, group: PagedGroup) -> int:
    """Return the tokens per block; raise ConfigError for an option that the page rules out.

    A block of recurrent state is one page, and so is a block of a group whose page is a multiple of
    the option: groups of one model may have pages of different sizes.
    """
    page_tokens = group.page_tokens
    if group.attention == "recurrent":
        return page_tokens
    block_tokens = setting.block_tokens or -(-BLOCK_TOKENS // page_tokens) * page_tokens
    if page_tokens % block_tokens == 0:
        return page_tokens
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
    rank: WorkerRank,
) -> Fingerprint:
    """Return the fingerprint of exact blocks, the pages of one rank."""
    spec, block_tokens = group.spec, block_tokens_of(setting, group)
    kernels = _kernels(vllm_config, group)
    names = hashlib.blake2b("\0".join(group.layers).encode(), digest_size=8).hexdigest()
    order = geometry.order if geometry.tables == 1 else f"{geometry.order}x{geometry.tables}"
    with _naming_the_option(setting, block_tokens):
        layout = ExactLayout(
            dtype=dtype_of(spec),
            block_tokens=block_tokens,
            layers=len(group.layers),
            kv_heads=getattr(spec, "num_kv_heads", 1),
            head_size=getattr(spec, "head_size", geometry.page_bytes),
            page_tokens=group.page_tokens,
            page_bytes=geometry.page_bytes,
            packing=f"{kernels.packing}:{type(spec).__name__}:{order}:{names}",
            engine=ENGINE,
            engine_version=kernels.version,
            backend=kernels.backend,
            device=kernels.device,
            slice=rank.slice_of(spec),
        )
    digest, positions = resolved_digest(vllm_config, setting), resolved_positions(vllm_config)
    if group.draft is not None:
        digest = _draft_digest(digest, group.draft, setting)
        positions = _positions_of(group.draft.model)
    return Fingerprint(_meaning(vllm_config, group, digest, positions, block_tokens), layout)


def _draft_digest(target: str, draft: Draft, setting: ConnectorSettings) -> str:
    """Return the digest of a draft model, which computes from the target's hidden states.

    `target`: the target's digest.
    """
    own = _resolved(draft.model, draft.load, setting)
    parts = (target, own, draft.method, draft.cache_dtype, str(draft.lookahead))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def digest_with_draft(vllm_config: Any, setting: ConnectorSettings) -> str:
    """Return the digest of an engine's model and of its draft model, if it has one.

    Raises NoDigestError if the weights of one are unknown, UnsupportedError for a draft whose KV is
    not cached.
    """
    digest, draft = resolved_digest(vllm_config, setting), draft_of(vllm_config)
    return digest if draft is None else _draft_digest(digest, draft, setting)


def resolved_positions(vllm_config: Any) -> str:
    """Return the settings of positions as vLLM resolved them, for exact blocks."""
    return _positions_of(vllm_config.model_config)


def _positions_of(model: Any) -> str:
    positions = {
        key: value
        for key, value in model.hf_text_config.to_dict().items()
        if any(word in key for word in POSITION_WORDS)
    }
    return canonical_json(positions | _decided_late(model, positions))


def _decided_late(model: Any, settings: Any) -> dict[str, Any]:
    """Return settings of positions that vLLM decides while it constructs a model's layers.

    `settings`: those that its configuration has before, which say whether this concerns the model.
    """
    found = {}
    # With LongRoPE vLLM uses the long factors for every token if `max_model_len` exceeds the
    # original training length (`phi3_long_rope_scaled_rope.py`).
    if _LONG_ROPE in canonical_json(settings):
        found["max_model_len"] = model.max_model_len
    # vLLM replaces this setting of Llama 4, on a copy of the configuration that nothing else sees
    # (`Llama4ForCausalLM`). It scales queries, and so the KV of later layers.
    if getattr(model.hf_text_config, "model_type", "") == _LLAMA_4:
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        by_length = model.max_model_len > LLAMA_4_UNTUNED_TOKENS
        found[_TUNING] = generation.get(_TUNING, by_length)
    return found


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
        kv_scales="weights" if quantised else "none",  # computed scales are refused
        naming=TOKENS,
        block_tokens=block_tokens,
        kv_group=group.kv_group,
    )


def dtype_of(spec: Any) -> str:
    """Return the data type of a KV cache spec; a recurrent state has one for each of its parts."""
    types = getattr(spec, "dtypes", None) or (spec.dtype,)
    return "+".join(str(each).removeprefix("torch.") for each in types)


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
    if group.attention == "recurrent":
        return _state_kernels(vllm_config, spec, vllm.__version__)
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


def _state_kernels(vllm_config: Any, spec: Any, version: str) -> _Kernels:
    """Return what arranges a recurrent state: its kind, and the shapes of its parts."""
    shapes = ",".join("x".join(map(str, shape)) for shape in spec.shapes)
    backend = str(getattr(spec.mamba_type, "name", spec.mamba_type))
    device = vllm_config.device_config.device_type
    if device != "cpu":
        from vllm.platforms import current_platform

        device = current_platform.get_device_name()
    return _Kernels(version, device, backend, f"state:{spec.mamba_cache_mode}:{shapes}")


def backends_of(vllm_config: Any, group: PagedGroup) -> set[str]:
    """Return the names of the attention backends of a group's layers, as far as vLLM has them."""
    layers = vllm_config.compilation_config.static_forward_context
    return {layers[name].attn_backend.get_name() for name in group.layers if name in layers}


def _weights(model: Any, load: Any, setting: ConnectorSettings) -> str:
    """Return the digest or the user's name of the weights; raise NoDigestError if unknown."""
    if setting.model_digest:
        return f"pinned:{setting.model_digest}"
    checkpoint = checkpoint_of(model, load)
    weights = files_digest(*checkpoint)
    # Checked last: a later change affects neither the loaded weights nor the digest.
    check_unchanged(checkpoint.folder, checkpoint.files, process_start_ns() + START_NS)
    return weights


def resolved_digest(vllm_config: Any, setting: ConnectorSettings) -> str:
    """Return a digest of weights and of settings as vLLM resolved them, for exact blocks.

    Raises NoDigestError if the weights are unknown.
    """
    return _resolved(vllm_config.model_config, vllm_config.load_config, setting)


def _resolved(model: Any, load: Any, setting: ConnectorSettings) -> str:
    """Return the same for a model and its loading, as vLLM's configurations describe them."""
    settings = {
        key: _without_source(value)
        for key, value in model.hf_config.to_dict().items()
        if key not in VOLATILE_FIELDS
    }
    parts = [
        _weights(model, load, setting),
        canonical_json(settings),
        str(model.dtype),
        str(model.quantization),
        canonical_json(getattr(model, "quantization_config", None)),
        str(model.disable_sliding_window),
        str(getattr(model, "model_impl", "auto")),
        str(getattr(model, "code_revision", None)),
    ]
    options = _computing_options(model)
    if options:  # the digests of engines without them stay the same
        parts.append(canonical_json(options))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _computing_options(model: Any) -> dict[str, Any]:
    """Return vLLM's options that change what a model computes and that its settings do not show.

    Empty if none is set. Raises NoDigestError for a file of scales without a digest.
    """
    found = _encoder_options(model)
    if classes := getattr(model, "model_class_overrides", None):
        found["model_class_overrides"] = classes
    return found


def _encoder_options(model: Any) -> dict[str, Any]:
    """Return vLLM's options that change the outputs of a model's encoders, and so its KV.

    Empty if none is set. The digest of an item's content does not cover them. Raises NoDigestError
    for a file of scales that vLLM may have loaded with another content.
    """
    found: dict[str, Any] = {}
    options = getattr(model, "multimodal_config", None)
    if rate := getattr(options, "video_pruning_rate", None):
        found["video_pruning"] = [getattr(options, "video_pruning_method", "evs"), rate]
    if dtype := getattr(options, "mm_encoder_attn_dtype", None):
        scales = getattr(options, "mm_encoder_fp8_scale_path", None)
        found["encoder_attention"] = [str(dtype), _scales_digest(scales) if scales else "computed"]
    return found


def _scales_digest(path: str) -> str:
    """Return the digest of a file of scales that vLLM has loaded since this process started."""
    option, file = f"mm_encoder_fp8_scale_path: {path!r}", Path(path)
    try:
        digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        check_unchanged(file, (file,), process_start_ns() + START_NS)
    except NoDigestError as error:
        raise NoDigestError(
            f"{option} changed after this engine's process started, so it may have loaded the "
            "earlier content; start the engine again"
        ) from error
    except OSError as error:
        raise NoDigestError(
            f"{option} cannot be read ({error}); restore the file, and start the engine again"
        ) from error
    return digest


def _without_source(value: Any) -> Any:
    """Return a setting without the folders and versions that a configuration inside it notes.

    vLLM puts the whole configuration of an EAGLE head, its folder included, into a new one.
    """
    if not isinstance(value, dict):
        return value
    return {key: _without_source(each) for key, each in value.items() if key not in _SOURCE_FIELDS}


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
    if classes := getattr(model, "model_class_overrides", None):
        raise UnsupportedError(
            f"model_class_overrides is {classes}, and no file says what these classes compute; "
            "portable contexts need vLLM's own"
        )
    if model.disable_sliding_window:
        overrides = {**overrides, "disable_sliding_window": True}
    revision = getattr(model, "_hf_config_revision", None) or model.revision
    folder = model.hf_config_path or model.model
    config = get_hf_file_to_dict(CONFIG, folder, revision)
    if config is None:
        raise UnsupportedError(f"{model.model!r} has no {CONFIG}; portable contexts need it")
    _check_config_format(getattr(model, "config_format", "auto"), folder, revision)
    overrides = {
        **overrides,
        **_decided_late(model, [config, overrides]),
        **_encoder_options(model),
    }
    on_load = model.quantization if "quantization_config" not in config else None
    own = getattr(model, "model_impl", "auto") != "transformers"
    engine = ENGINE if own else "vllm with transformers"
    return ModelSource(
        weights=_weights(model, vllm_config.load_config, setting),
        config=config,
        overrides=overrides,
        dtype=str(model.dtype).removeprefix("torch."),
        quantised_on_load=str(on_load or "none"),
        code=str(model.code_revision or "none"),
        computed_by=computed_by(engine, config, overrides),
    )


def _check_config_format(config_format: str, folder: str, revision: str | None) -> None:
    """Raise UnsupportedError unless vLLM takes a model's settings from its `config.json`.

    The format `auto` is `mistral` if the folder has `params.json` and weights in that format. The
    weights are not looked for: vLLM has a list of files of its own process, from an earlier time.
    """
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    remedy = "start vLLM with --config-format hf, so that it does"
    if config_format == "auto":
        try:
            has_other = file_or_path_exists(folder, MISTRAL_CONFIG, revision)
        except Exception as error:  # of any kind: a remote repository may be asked
            raise UnsupportedError(
                f"whether {folder!r} has {MISTRAL_CONFIG}, so that vLLM does not read the model's "
                f"settings from {CONFIG}, is unknown ({error}); {remedy}"
            ) from error
        if has_other:
            raise UnsupportedError(
                f"{folder!r} has {MISTRAL_CONFIG}, so vLLM may not read the model's settings from "
                f"{CONFIG}, by which portable contexts are named; {remedy}"
            )
    elif config_format != "hf":
        raise UnsupportedError(
            f"config_format is {config_format!r}, so vLLM does not read the model's settings from "
            f"{CONFIG}, by which portable contexts are named; {remedy}"
        )
