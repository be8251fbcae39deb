"""Small models with layers of each kind, generated locally with transformers: random weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import ConfigError
from holdfast.scratch import scratch_folder
from holdfast_bench.harness import model

REVISION = 1
"""Part of a folder's name: to be raised when a model of `KINDS` changes."""

VOCABULARY = 32_000
_BYTES = 2
"""Of an element of bfloat16."""

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_LAYERS: int = _SIZES["num_hidden_layers"]
_FIVE_WINDOWS = (["sliding_attention"] * 5 + ["full_attention"]) * _LAYERS
_HALF_WINDOWS = ["sliding_attention", "full_attention"] * _LAYERS
_CONVOLUTIONS = ["conv", "conv", "full_attention"] * _LAYERS


class KindModel(NamedTuple):
    """A kind of layers: a model that has them, and its configuration in transformers."""

    like: str
    config: str
    arguments: Mapping[str, Any]


KINDS: Mapping[str, KindModel] = {
    "full": KindModel("Llama", "LlamaConfig", {}),
    "window": KindModel(
        "Gemma 3",
        "Gemma3TextConfig",
        {
            "sliding_window": 512,
            "layer_types": _FIVE_WINDOWS[:_LAYERS],
            "query_pre_attn_scalar": 64,
        },
    ),
    "half_window": KindModel(
        "gpt-oss",
        "GptOssConfig",
        {
            "sliding_window": 128,
            "layer_types": _HALF_WINDOWS[:_LAYERS],
            "intermediate_size": 1408,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "recurrent": KindModel(
        "LFM2",
        "Lfm2Config",
        {
            "layer_types": _CONVOLUTIONS[:_LAYERS],
            "conv_dim": 1024,
            "conv_dim_out": 1024,
            "block_dim": 1024,
            "block_ff_dim": 2816,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
"""The kinds, by name. Full attention is what the others are compared with."""

FULL_TOKEN_BYTES = 2 * _LAYERS * _SIZES["num_key_value_heads"] * _SIZES["head_dim"] * _BYTES
"""KV bytes per token of as many layers with full attention."""


def make(kind: str) -> Path:
    """Return the Hugging Face folder of a kind's model; generate it on first use (seconds).

    Raises ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is not one that can be made: {', '.join(KINDS)}")
    target = model.default_folder(f"kind-{kind}-{REVISION}")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target.parent, f".{target.name}") as scratch:
            folder = scratch / target.name
            _write(folder, KINDS[kind])
            try:
                folder.rename(target)
            except OSError:
                if not target.exists():  # else another process has made it in the meantime
                    raise
    return target


def _write(folder: Path, kind: KindModel) -> None:
    import torch
    import transformers

    config = getattr(transformers, kind.config)(**{**_SIZES, **kind.arguments})
    torch.manual_seed(model.SEED)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    demo = model.make("demo")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)
