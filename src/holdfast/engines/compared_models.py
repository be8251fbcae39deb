"""Which engines were seen to compute the same keys and values for a type of model.

A fingerprint says which model a context is of, and not how an engine implements it: vLLM, for
example, keeps the keys of Llama 4 in an order of its own. So engines share the contexts of a type
of model only if a test has compared them with real weights; otherwise each engine has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from holdfast.client.model_meaning import ANY

_TWO = frozenset({"vllm", "transformers"})
_THREE = _TWO | {"sglang"}

COMPARED_TYPES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "cohere",
                "ernie4_5",
                "glm4",
                "granite",
                "llama",
                "mistral",
                "mixtral",
                "olmo2",
                "phi3",
                "qwen2",
                "qwen3",
                "qwen3_moe",
                "starcoder2",
            ),
            _THREE,
        ),
        **dict.fromkeys(("gemma", "gemma3_text", "gpt_oss", "hunyuan_v1_dense", "smollm3"), _TWO),
    }
)
"""Engines that were compared, by `model_type` of the part of a model that generates text."""

COMPARED_ROPES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"default": _THREE, "linear": _THREE, "llama3": _THREE, "yarn": _TWO}
)
"""Engines that were compared, by kind of rope.

vLLM computes `dynamic` otherwise than the others, and SGLang ignores some settings of `yarn`.
"""

DEFAULT_ROPE = "default"

DEFAULT_ROPE_IN_SGLANG = frozenset({"mixtral", "starcoder2"})
"""Types of models that SGLang computes with the default rope, whatever their settings are."""

COMPARED_WINDOWS = _TWO
"""Engines that were compared with layers that attend to a window of the context.

SGLang computes some models as if they had none.
"""

WINDOW_BY_DEFAULT = frozenset({"mistral"})
"""Types of models that have a window if `config.json` does not name `sliding_window`."""


def computed_by(engine: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """Return `ANY` if the engine is one of those compared for such a model, else the engine.

    `config`: the content of `config.json`; `overrides`: what the user changed in it.
    """
    text = config.get("text_config")
    kind = str((text if isinstance(text, Mapping) else config).get("model_type"))
    ropes = {*_ropes(config), *_ropes(overrides)}
    ignores_ropes = engine == "sglang" and kind in DEFAULT_ROPE_IN_SGLANG
    alike = (
        engine in COMPARED_TYPES.get(kind, ())
        and all(engine in COMPARED_ROPES.get(rope, ()) for rope in ropes)
        and not (ignores_ropes and ropes - {DEFAULT_ROPE})
        and (engine in COMPARED_WINDOWS or not _has_windows(kind, config, overrides))
    )
    return ANY if alike else engine


def _ropes(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of the ropes that settings and the sections in them name."""
    kind = fields.get("rope_type", fields.get("type"))
    if isinstance(kind, str):
        yield kind
    for value in fields.values():
        if isinstance(value, Mapping):
            yield from _ropes(value)


def _has_windows(kind: str, *sections: Mapping[str, Any]) -> bool:
    """Whether a model of a type, with these settings, has layers that attend to a window."""
    fields = [field for section in sections for field in _fields(section)]
    if kind in WINDOW_BY_DEFAULT and not any(name == "sliding_window" for name, _ in fields):
        return True
    if any(
        name == "layer_types" and {*(value or ())} - {"full_attention"} for name, value in fields
    ):
        return True
    switches = [value for name, value in fields if name == "use_sliding_window"]
    is_off = bool(switches) and not any(switches)
    return not is_off and any(name == "sliding_window" and value for name, value in fields)


def _fields(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of settings and of the sections in them."""
    for name, value in section.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _fields(value)
