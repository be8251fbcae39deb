"""`holdfast.transformers.cache`: the cache of a prompt, from the store as far as it is held there.

The cache holds the whole blocks of a prompt, at least one token less than the prompt: `generate`
computes the rest and goes on. What the store lacks is computed and saved before the cache is
returned. So the model always goes on in the same shapes, and its output is the same, bit for bit,
whether the blocks were held or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from holdfast.client.session import NodeStore
from holdfast.engines.transformers import identity, layer_states
from holdfast.engines.transformers.computation import forget_positions
from holdfast.engines.transformers.known_model import (
    KnownModel,
    cache_argument,
    known_model,
    parameters_of,
)
from holdfast.engines.transformers.prompt_blocks import PromptBlocks
from holdfast.errors import BlockError
from holdfast.limits import BLOCK_TOKENS
from holdfast.store.store import Store

_OF_TOKENS = ("input_ids", "attention_mask")
"""Inputs of a model that a prompt without padding determines."""

_KINDS_OF_TOKENS = "token_type_ids"
"""In models of images: which tokens are text (0)."""

STATE_TOKENS = 1024
"""Tokens between two saved states of a recurrent model; the last of a prompt is saved, too."""


class Prefix(NamedTuple):
    """What a cache holds of its prompt, in tokens: fetched from the store, and computed.

    `saved`: blocks that are new in the store. `sources`: blocks from each tier. `reason`: why no
    more was fetched or saved; empty if everything was.
    """

    fetched: int
    computed: int
    saved: int
    sources: Mapping[str, int]
    reason: str

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.fetched + self.computed


class _OfPrompt(Cache):
    """A cache of transformers that was made for one `prompt`, of which it holds a `prefix`.

    Its first use must compute the rest of the prompt. `generate` computes something else, without
    an error, if it is given another prompt or padding.
    """

    def __init__(
        self, layers: Sequence[Any], prefix: Prefix, prompt: Sequence[int], known: KnownModel
    ) -> None:
        Cache.__init__(self, layers=list(layers))  # theirs makes layers of its own
        self.prefix = prefix
        self._groups = known.groups
        self._prompt = prompt
        self._rest = len(prompt) - prefix.tokens

    def check_model(self, known: KnownModel) -> None:
        """Raise BlockError if the model's weights or settings changed since the cache was made."""
        if known.groups != self._groups:
            raise BlockError(
                "cache: the model's weights or settings, or the size of its blocks, changed since "
                "it was made, so its states belong to other blocks; make a new cache"
            )

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise BlockError if tokens do not begin with the prompt, or are not a part of it."""
        pairs = zip(tokens, self._prompt, strict=False)
        other = next((at for at, (one, ours) in enumerate(pairs) if one != ours), None)
        if other is not None:
            raise BlockError(
                f"ids: token {other} is not that of the prompt that the cache was made for, so its "
                "states are not those of these ids; pass what generate returned with this cache"
            )

    def update(self, key_states: Any, *args: Any, **more: Any) -> Any:
        given, self._rest = self._rest or key_states.shape[-2], 0
        if key_states.shape[-2] != given:
            raise BlockError(
                f"cache: made for a prompt of {self.prefix.tokens + given} tokens, of which it "
                f"holds {self.prefix.tokens}, so its first use computes {given}, not "
                f"{key_states.shape[-2]}; give generate the ids that the cache was made for, "
                "without padding, and make a new cache for each prompt"
            )
        return super().update(key_states, *args, **more)


class PromptCache(_OfPrompt, DynamicCache):
    """A `DynamicCache` of a prompt; see `cache`."""


class StaticPromptCache(_OfPrompt, StaticCache):
    """A `StaticCache` of a prompt; see `cache`."""


def cache(
    model: Any,
    ids: Any,
    store: Store | NodeStore,
    *,
    model_digest: str = "",
    max_cache_len: int = 0,
    block_tokens: int = BLOCK_TOKENS,
) -> PromptCache | StaticPromptCache:
    """Return a cache of the whole blocks of a prompt, for `generate(ids, past_key_values=...)`.

    Blocks that the store holds are fetched; the model computes the others, and they are saved. A
    store that fails costs time only: the model computes, and `prefix.reason` says why.

    `ids`: the prompt, one row without padding: a tensor, a sequence of integers, or what a
    tokenizer returns. `model_digest`: a name of weights and adapters; empty: they are compared
    with the model's files, or hashed. `max_cache_len`: tokens of a static cache; 0: a dynamic one.
    Raises BlockError for a prompt or a layer that is not cached, and NoDigestError for weights that
    need a name; both say what to pass.
    """
    known, tokens = known_model(model, model_digest, block_tokens), prompt_of(model, ids)
    identity.check_length(model, len(tokens))
    filled, prefix = _fill(model, tokens, store, known)
    if not max_cache_len:
        return PromptCache(filled.layers, prefix, tokens, known)
    if max_cache_len <= len(tokens):
        raise BlockError(
            f"max_cache_len: {max_cache_len} tokens, the prompt has {len(tokens)}; pass the "
            "prompt's and those to generate"
        )
    static = StaticCache(config=model.config, max_cache_len=max_cache_len)
    if prefix.tokens:
        layer_states.move(filled, static, prefix.tokens)
    return StaticPromptCache(static.layers, prefix, tokens, known)


def save(
    model: Any,
    ids: Any,
    cache: Any,
    store: Store | NodeStore,
    *,
    model_digest: str = "",
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Save the whole blocks of a prompt and its answer; return how many are new in the store.

    `ids`: what `generate` returned. `cache`: the cache that it used. If the model has layers that
    drop tokens, the answer's blocks are computed once more. Arguments and errors as in `cache`; it
    also raises BlockError for a cache of several sequences, and for one of another prompt or of the
    model's earlier weights.
    """
    known, tokens = known_model(model, model_digest, block_tokens), prompt_of(model, ids)
    identity.check_length(model, max(len(tokens), int(cache.get_seq_length())))
    if isinstance(cache, _OfPrompt):
        cache.check_model(known)
        cache.check_prompt(tokens)
    if [each.kv_group.attention for each in known.layers] != ["full"]:
        return _fill(model, tokens, store, known)[1].saved
    stop = min(len(tokens), int(cache.get_seq_length())) // block_tokens
    first = min(cache.prefix.tokens // block_tokens if isinstance(cache, _OfPrompt) else 0, stop)
    sequences = layer_states.sequences_of(cache)
    if sequences != 1:
        raise BlockError(
            f"cache: it holds {sequences} sequences, and nothing says which of them has these ids; "
            "generate each answer that is to be saved with a cache of its own"
        )
    blocks = PromptBlocks(store, known, tokens)
    with closing(blocks):
        blocks.save(cache, first, stop)
    return blocks.saved


def prompt_of(model: Any, ids: Any) -> list[int]:
    """Return the tokens of a prompt.

    Raises BlockError unless it is one row without padding, of tokens only: no images or sounds.
    """
    mask = None
    if isinstance(ids, Mapping):
        _refuse_other_inputs(model, ids)
        mask = ids.get("attention_mask")
        ids = ids["input_ids"]
    found = torch.as_tensor(ids)
    if tuple(found.shape[:-1]) == (1,):
        found = found[0]
    if found.ndim != 1 or found.is_floating_point() or not len(found):
        raise BlockError(
            f"ids: {found.dtype} of shape {tuple(found.shape)}; pass the token ids of one prompt, "
            "and call once for each row of a batch"
        )
    tokens: list[int] = found.tolist()
    settings = model.config.get_text_config(decoder=True)
    padding, begin = (getattr(settings, f"{name}_token_id", None) for name in ("pad", "bos"))
    padded = tokens[0] == padding != begin or tokens[-1] == padding != settings.eos_token_id
    if padded or (mask is not None and not torch.as_tensor(mask).all()):
        raise BlockError(
            "ids: the prompt is padded, so its tokens have other positions; pass it without "
            "padding and without an attention mask that hides tokens"
        )
    media = identity.media_tokens(model).intersection(tokens)
    if media:
        raise BlockError(
            f"ids: token {min(media)} stands for a part of an image or sound, and does not say of "
            "which; use generate without this cache"
        )
    return tokens


def _refuse_other_inputs(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise BlockError for inputs on which the states of a prompt depend besides its tokens."""
    of_text = identity.is_text_model(model)
    for name, value in inputs.items():
        if name in _OF_TOKENS or name not in parameters_of(model) or value is None:
            continue
        is_text = name.endswith(_KINDS_OF_TOKENS) and not torch.as_tensor(value).any()
        if of_text or not is_text:
            raise BlockError(
                f"ids: the model takes {name}, too, on which its states depend; pass the tokens of "
                "a text, or use generate without this cache"
            )


def _fill(
    model: Any, tokens: list[int], store: Store | NodeStore, known: KnownModel
) -> tuple[DynamicCache, Prefix]:
    """Return a dynamic cache of the whole blocks of a prompt, fetched or computed and saved."""
    forget_positions(model)  # `generate` does so only for a prompt without a cache
    size, filled = known.block_tokens, DynamicCache(config=model.config)
    held = (len(tokens) - 1) // size * size  # `generate` must compute at least one token
    blocks = PromptBlocks(store, known, tokens[: held + 1])
    with closing(blocks):
        at = fetched = blocks.fetch(filled, model.device)
        for stop in _stops(fetched, held, known):
            layer_states.start_recording(filled)
            _compute(model, tokens[at:stop], filled)
            blocks.save(filled, at // size, stop // size)
            layer_states.stop_recording(filled)
            at = stop
    return filled, Prefix(fetched, held - fetched, blocks.saved, blocks.sources, blocks.reason)


def _stops(fetched: int, held: int, known: KnownModel) -> list[int]:
    """Return after which tokens the model is to stop: at the end, and where states are saved."""
    if fetched == held:
        return []
    step = -(-STATE_TOKENS // known.block_tokens) * known.block_tokens
    return [*range((fetched // step + 1) * step, held, step)] * known.is_recurrent + [held]


def _compute(model: Any, tokens: Sequence[int], filled: DynamicCache) -> None:
    """Let the model compute tokens."""
    # The logits of the last token are as many as the model can be told to compute.
    last = {"logits_to_keep": 1} if "logits_to_keep" in parameters_of(model) else {}
    with torch.no_grad():
        ids = torch.tensor([tokens], device=model.device)
        model(input_ids=ids, use_cache=True, **last, **{cache_argument(model): filled})
