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
        "llama": _THREE,
        **dict.fromkeys(
            (
                "cohere",
                "ernie4_5",
                "gemma",
                "gemma3_text",
                "glm4",
                "gpt_oss",
                "granite",
                "hunyuan_v1_dense",
                "mistral",
                "mixtral",
                "olmo2",
                "phi3",
                "qwen2",
                "qwen3",
                "qwen3_moe",
                "smollm3",
                "starcoder2",
            ),
            _TWO,
        ),
    }
)
"""Engines that were compared, by `model_type` of the part of a model that generates text."""

COMPARED_ROPES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"default": _THREE, "linear": _THREE, "llama3": _THREE, "yarn": _TWO}
)
"""Engines that were compared, by kind of rope.

vLLM computes `dynamic` otherwise than the others, and SGLang ignores some settings of `yarn`.
"""


def computed_by(engine: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """Return `ANY` if the engine is one of those compared for such a model, else the engine.

    `config`: the content of `config.json`; `overrides`: what the user changed in it.
    """
    text = config.get("text_config")
    kind = (text if isinstance(text, Mapping) else config).get("model_type")
    ropes = {*_ropes(config), *_ropes(overrides)}
    alike = engine in COMPARED_TYPES.get(str(kind), ()) and all(
        engine in COMPARED_ROPES.get(rope, ()) for rope in ropes
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
