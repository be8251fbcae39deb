"""The draft model of an engine with speculative decoding: its layers, and what its KV depends on.

Some speculative methods run layers of a draft model, and vLLM keeps their KV in the pages of the
model that they draft for (the target). The layers of the draft are KV groups of their own, so that
the target's blocks do not depend on the draft. The KV of a draft decides how many of its tokens
the target accepts, and never what the target answers.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from holdfast.engines.vllm.unsupported import UnsupportedError

DRAFTLESS = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Speculative methods that keep no draft KV in the cache."""

DRAFTING = ("draft_model", "eagle", "eagle3", "mtp")
"""Speculative methods whose draft KV is cached."""

_OWN_NAMES = ("draft_model", "mtp", "mtp_block", "mtp_layers")
"""Parts of a layer's name that only layers of a draft model have."""


class Draft(NamedTuple):
    """The draft model of an engine.

    `model` and `load`: vLLM's configurations of the model and of its loading. `cache_dtype`: the
    data type of its KV, if it has one of its own. `first_layer`: the number of its first layer, in
    names that count on after the target's. `lookahead`: how many tokens after a position its KV
    there depends on.
    """

    method: str
    model: Any
    load: Any
    cache_dtype: str
    first_layer: int
    lookahead: int

    def has(self, layer: str) -> bool:
        """Return whether a layer is one of the draft's, by its name."""
        parts = layer.split(".")
        if not {*parts}.isdisjoint(_OWN_NAMES):
            return True
        number = re.search(r"\d+", layer)
        return number is not None and int(number.group()) >= self.first_layer


def draft_of(vllm_config: Any) -> Draft | None:
    """Return the draft model of an engine; None if it keeps no draft KV.

    Raises UnsupportedError for a speculative method or setting whose KV is not cached.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in DRAFTLESS:
        return None
    method = speculative.method
    if method not in DRAFTING:
        raise UnsupportedError(
            f"speculative method {method!r} keeps KV whose layers or inputs are not known here; "
            f"supported are {', '.join((*DRAFTING, *DRAFTLESS))}"
        )
    for name in ("parallel_drafting", "use_heterogeneous_vocab"):
        if getattr(speculative, name, False):
            raise UnsupportedError(
                f"{name} of the speculative method {method!r} is not supported: no digest says "
                "what the draft's KV depends on"
            )
    stages = getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)
    if stages > 1:
        raise UnsupportedError(
            f"pipeline_parallel_size is {stages} with the speculative method {method!r}; draft "
            "layers are cached with 1 only"
        )
    return Draft(
        method=method,
        model=speculative.draft_model_config,
        load=getattr(speculative, "draft_load_config", None) or vllm_config.load_config,
        cache_dtype=getattr(speculative, "kv_cache_dtype", None) or "auto",
        first_layer=vllm_config.model_config.get_total_num_hidden_layers(),
        # vLLM's drafts take the target's hidden state at a position and the token after it. Each
        # further module of an MTP draft reads one token more.
        lookahead=vllm_config.num_prefill_lookahead_tokens,
    )
