"""Which model an object of transformers is: its weights as they are in memory, and its settings.

A model whose tensors equal those of its folder is named by the folder's files, as other engines
name it, so they share its contexts. Any other model is named by its tensors: one without a folder,
or one that was trained, merged or converted after it was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from holdfast.client.local_model import CONFIG, local_source, weight_files
from holdfast.client.model_meaning import VOLATILE_FIELDS, ModelSource, canonical_json
from holdfast.client.weights_digest import NoDigestError
from holdfast.engines.compared_models import computed_by
from holdfast.engines.transformers.computation import (
    LENGTH_DEPENDENT,
    code_of,
    computation_of,
)
from holdfast.errors import BlockError

NAME_REMEDY = "pass model_digest=, a name that changes whenever the KV state would"

SAMPLES = 16
"""Elements of each tensor that `weights_state` compares."""

ENGINE = "transformers"

_MEDIA_TOKEN = re.compile(r"(image|video|audio|speech)_token_(id|index)")
"""Settings that name the token of which a prompt has one for each part of an image or sound."""

_HARMLESS = ("torch", "transformers", "accelerate")
"""Libraries whose forward hooks move or report values, and do not change them."""

_NOT_MEANING = (*VOLATILE_FIELDS, "architectures", "use_cache")


def source_of(model: Any, dtype: str, name: str) -> ModelSource:
    """Return the model as its files describe it, or as it is in memory if they do not.

    `name`: the caller's name of weights and adapters; empty: they are compared or hashed.
    """
    folder, computation = _folder_of(model), computation_of(model)
    if folder is not None and (name or _has_weights_of(model, folder)):
        overrides = _overrides(model, folder) | computation
        source = local_source(folder, dtype, name=name, overrides=overrides)
    else:
        weights = f"pinned:{name}" if name else f"tensors:{_tensors_digest(model.state_dict())}"
        config = _meaning_of(model.config.to_dict())
        source = ModelSource(weights, config, computation, dtype, "none", "none", ENGINE)
    alike = computed_by(ENGINE, source.config, source.overrides)
    return source._replace(computed_by=ENGINE if computation else alike)


def weights_state(model: Any) -> object:
    """Return a value that changes when the model's tensors or settings change.

    A change in place through `.data` is not counted by PyTorch, so a sample of each tensor is
    compared too.
    """
    tensors = [each.detach() for each in chain(model.parameters(), model.buffers())]
    samples: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in tensors:
        flat = each.reshape(-1)
        samples.setdefault(each.dtype, []).append(flat[:: max(1, flat.numel() // SAMPLES)])
    with torch.autocast(model.device.type, enabled=False):  # it would convert what is compared
        joined = {str(dtype): torch.cat(some) for dtype, some in samples.items()}
    sampled = _tensors_digest(joined)
    places = tuple((each.data_ptr(), _version(each)) for each in tensors)
    return places, sampled, canonical_json(model.config.to_dict())


def check_length(model: Any, tokens: int) -> None:
    """Raise BlockError for a prompt or a cache so long that keys depend on its length."""
    for settings, kind in _ropes(model):
        limit = settings.get("original_max_position_embeddings")
        if kind not in LENGTH_DEPENDENT:
            continue
        limit = limit or model.config.get_text_config(decoder=True).max_position_embeddings
        if kind == "dynamic":  # at the limit it keeps the frequencies of a longer prompt before
            limit -= 1
        if tokens > limit:
            raise BlockError(
                f"ids: {tokens} tokens; beyond {limit} the rope of this model ({kind}) rotates "
                "keys by the length of the prompt, so they are not those of a prefix; use "
                "generate without this cache, and do not save what it computed"
            )


def _ropes(model: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each section of the settings that describes a rope, and its kind."""
    for settings in _sections(model.config.get_text_config(decoder=True).to_dict()):
        kind = settings.get("rope_type", settings.get("type"))
        if isinstance(kind, str):
            yield settings, kind


def _sections(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings and all sections in them."""
    yield fields
    for value in fields.values():
        if isinstance(value, Mapping):
            yield from _sections(value)


def check_states(model: Any) -> None:
    """Raise BlockError for a model whose states of a prefix are not those of its tokens alone.

    Also for one of whose states this process has a part.
    """
    settings = model.config.get_text_config(decoder=True)
    if (processes := getattr(model, "tp_size", None) or 1) > 1:
        raise BlockError(
            f"the model is divided over {processes} processes, so each of their caches has a part "
            "of the heads; use generate without this cache"
        )
    if model.config.is_encoder_decoder:
        raise BlockError(
            "the model has an encoder, on whose input the states of its answers depend; use "
            "generate without this cache"
        )
    both_ways = getattr(settings, "use_bidirectional_attention", None)
    if both_ways not in {None, False, "vision"} or not getattr(settings, "is_causal", True):
        raise BlockError(
            "the model attends to later tokens, so the states of a prefix depend on what follows; "
            "use generate without this cache"
        )


def is_text_model(model: Any) -> bool:
    """Return whether a model has no other parts than the one that generates text."""
    return model.config.get_text_config(decoder=True) is model.config


def media_tokens(model: Any) -> set[int]:
    """Return the tokens that stand for parts of images and sounds in a model's prompts."""
    found = (
        value
        for settings in _sections(model.config.to_dict())
        for name, value in settings.items()
        if _MEDIA_TOKEN.fullmatch(str(name)) and isinstance(value, int)
    )
    return set(found)


def refuse_unknown_weights(model: Any) -> None:
    """Raise NoDigestError for weights that no digest of files or tensors identifies."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise NoDigestError(f"the model has adapters, which change its KV state; {NAME_REMEDY}")
    if getattr(model.config, "quantization_config", None):
        raise NoDigestError(
            f"the model's weights are quantised, which each engine does in its own way; "
            f"{NAME_REMEDY}"
        )
    hook = next(_foreign_hooks(model), None)
    if hook is not None:
        raise NoDigestError(
            f"the model has the forward hook {hook!r}, which may change its KV state; {NAME_REMEDY}"
        )
    if unknown := code_of(model).unknown:
        raise NoDigestError(
            f"the model is computed by code in {', '.join(unknown)}, which has no source file; "
            f"{NAME_REMEDY}"
        )
    if any(each.is_meta for each in model.parameters()):
        raise NoDigestError(f"some of the model's weights are not in memory; {NAME_REMEDY}")


def _foreign_hooks(model: Any) -> Iterator[Any]:
    """Yield the functions that are called with the input or output of a part of a model.

    Those of libraries that do not change it are left out.
    """
    for module in model.modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001  # the only list
        for hook in chain.from_iterable(each.values() for each in hooks):
            origin = getattr(hook, "__module__", None) or type(hook).__module__
            if origin.partition(".")[0] not in _HARMLESS:
                yield hook


def _folder_of(model: Any) -> Path | None:
    """Return the local folder that a model was loaded from, if there is one."""
    name = str(getattr(model.config, "_name_or_path", ""))
    if name and not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            revision = getattr(model.config, "_commit_hash", None)
            found = try_to_load_from_cache(name, CONFIG, revision=revision)
        except HFValidationError:
            return None
        return Path(found).parent if isinstance(found, str) else None
    return Path(name) if name and (Path(name) / CONFIG).is_file() else None


def _has_weights_of(model: Any, folder: Path) -> bool:
    """Whether each tensor of the model equals that of this name in the folder's files."""
    from safetensors import safe_open

    left: dict[str, torch.Tensor] = model.state_dict()
    equal: set[int] = set()
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a mapping
                tensor = left.pop(name, None)
                if tensor is None:
                    continue
                if not torch.equal(stored.get_tensor(name).to(tensor), tensor):
                    return False
                equal.add(tensor.data_ptr())
    return all(tied.data_ptr() in equal for tied in left.values())


def _overrides(model: Any, folder: Path) -> dict[str, Any]:
    """Return the settings in which the model differs from the folder's."""
    loaded = _meaning_of(type(model.config).from_pretrained(folder).to_dict())
    given = _meaning_of(model.config.to_dict())
    return {
        name: given.get(name)
        for name in sorted({*loaded, *given})
        if canonical_json(loaded.get(name)) != canonical_json(given.get(name))
    }


def _meaning_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that say nothing about KV state."""
    return {
        str(name): _meaning_of(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in _NOT_MEANING and not str(name).startswith("_")
    }


def _tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return 32 hex digits over names, data types, shapes and content of tensors."""
    import xxhash

    whole = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


def _version(tensor: torch.Tensor) -> int:
    """Return PyTorch's count of changes in place; 0 for tensors of inference mode, not counted."""
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001  # the only count
