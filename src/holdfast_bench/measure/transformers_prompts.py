"""Measure the first token of Hugging Face transformers: computed, missed in a store, and fetched.

Models are made in memory with random weights, of about the same size and of three kinds. Each round
has a context of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import holdfast
from holdfast.errors import HoldfastError
from holdfast.limits import GIB
from holdfast_bench.harness.hardware_limits import SEED

TAIL_TOKENS = 100
"""Tokens behind the last whole block, which are computed in each case."""

VOCABULARY = 32_000
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
}
_WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaConfig", {}),
    "window": (
        "Gemma3TextConfig",
        {"sliding_window": 512, "layer_types": (_WINDOWS * 3)[:14], "query_pre_attn_scalar": 64},
    ),
    "recurrent": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "conv", "full_attention"] * 4 + ["conv"] * 2,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
"""Configuration class of transformers and its arguments, by the kind of layers."""


class PromptTimes(NamedTuple):
    """Seconds to the first token in each round: without a store, with a miss, and fetched."""

    computed: list[float]
    missed: list[float]
    fetched: list[float]


def measure(kind: str, tokens: int, rounds: int, tell: Callable[[str], None]) -> PromptTimes:
    """Return the times of a model; raise HoldfastError if a context was not fetched whole."""
    import torch

    model, times = _model(kind), PromptTimes([], [], [])
    with holdfast.open(host=4 * GIB) as store:
        for number, ids in enumerate(_prompts(tokens + TAIL_TOKENS, rounds + 1)):
            tell(f"{kind} layers, round {number} of {rounds}")
            found, answers = [], []
            for use in (None, store, store):
                start_s = time.perf_counter()
                cache = None if use is None else holdfast.transformers.cache(model, ids, use)
                answers.append(
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        past_key_values=cache,
                        max_new_tokens=1,
                        do_sample=False,
                    )
                )
                found.append(time.perf_counter() - start_s)
            if cache is None or cache.prefix.fetched != tokens:
                raise HoldfastError(f"{kind}: a context of {tokens} tokens was not fetched whole")
            if number:  # the first round also examines the model
                for each, seconds in zip(times, found, strict=True):
                    each.append(seconds)
    return times


def _model(kind: str) -> Any:  # noqa: ANN401  # of transformers
    import torch
    import transformers

    name, arguments = MODELS[kind]
    torch.manual_seed(SEED)
    config = getattr(transformers, name)(**_SIZES | arguments)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _prompts(tokens: int, count: int) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    for _ in range(count):
        yield torch.randint(10, VOCABULARY, (1, tokens), generator=generator)
