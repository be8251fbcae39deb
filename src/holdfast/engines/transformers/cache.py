"""`holdfast.transformers.cache`: the cache of a prompt, from the store as far as it is held there.

The cache holds the whole blocks of a prompt, at least one token less than the prompt: `generate`
computes the rest and goes on. What the store lacks is computed and saved before the cache is
returned. So the model always goes on in the same shapes, and its output is the same, bit for bit,
whether the blocks were held or not.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from holdfast.client.session import NodeStore
from holdfast.devices.context_tensors import blocks_to_tensors, tensors_to_blocks
from holdfast.engines.transformers import identity, layer_states
from holdfast.engines.transformers.known_model import KnownModel, known_model
from holdfast.errors import BlockError, HoldfastError, StoreClosedError
from holdfast.limits import BLOCK_TOKENS
from holdfast.session import Session
from holdfast.store.store import Store

_Rows: TypeAlias = npt.NDArray[np.uint8]

_log = logging.getLogger("holdfast.transformers")


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
    """A cache of transformers that was made for one prompt, of which it holds a `prefix`.

    Its first use must compute the `rest` of the prompt. `generate` computes something else, without
    an error, if it is given another prompt or padding.
    """

    def __init__(self, layers: Sequence[Any], prefix: Prefix, rest: int) -> None:
        Cache.__init__(self, layers=list(layers))  # theirs makes layers of its own
        self.prefix = prefix
        self._rest = rest

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
    rest = len(tokens) - prefix.tokens
    if not max_cache_len:
        return PromptCache(filled.layers, prefix, rest)
    if max_cache_len <= len(tokens):
        raise BlockError(
            f"max_cache_len: {max_cache_len} tokens, the prompt has {len(tokens)}; pass the "
            "prompt's and those to generate"
        )
    static = StaticCache(config=model.config, max_cache_len=max_cache_len)
    if prefix.tokens:
        layer_states.move(filled, static, prefix.tokens)
    return StaticPromptCache(static.layers, prefix, rest)


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
    drop tokens, the answer's blocks are computed once more. Arguments and errors as in `cache`.
    """
    known, tokens = known_model(model, model_digest, block_tokens), prompt_of(model, ids)
    held = min(len(tokens), int(cache.get_seq_length())) // block_tokens * block_tokens
    if any(group.kv_group.attention != "full" for group in known.groups):
        return _fill(model, tokens, store, known)[1].saved
    layers = cache.layers
    rows = []
    for group in known.groups:
        states = [
            (layers[p].keys[0, :, :held], layers[p].values[0, :, :held]) for p in group.places
        ]
        rows.append(tensors_to_blocks(group.layout, [(k.cpu(), v.cpu()) for k, v in states]))
    sessions = [store.session(fingerprint) for fingerprint in known.fingerprints]
    return _save(sessions, tokens[:held], rows)


def prompt_of(model: Any, ids: Any) -> list[int]:
    """Return the tokens of a prompt; raise BlockError unless it is one row without padding."""
    mask = None
    if isinstance(ids, Mapping):
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
    return tokens


def _fill(
    model: Any, tokens: list[int], store: Store | NodeStore, known: KnownModel
) -> tuple[DynamicCache, Prefix]:
    """Return a dynamic cache of the whole blocks of a prompt, fetched or computed and saved."""
    size = known.block_tokens
    held = (len(tokens) - 1) // size * size  # `generate` must compute at least one token
    filled = DynamicCache(config=model.config)
    rows = [np.empty((held // size, group.layout.raw_bytes), np.uint8) for group in known.groups]
    sessions: list[Session] = []
    fetched, saved, sources, reason = 0, 0, dict[str, int](), ""
    try:
        sessions += [store.session(fingerprint) for fingerprint in known.fingerprints]
        fetched, sources, reason = _fetch(sessions, tokens[:held], rows)
    except StoreClosedError:
        raise
    except HoldfastError as error:
        reason = str(error)
        _log.warning("the store was not asked, so the model computes: %s", reason)
    if fetched:
        for group, blocks in zip(known.groups, rows, strict=True):
            states = layer_states.empty_states(group, fetched)
            blocks_to_tensors(group.layout, blocks[: fetched // size], states)
            layer_states.restore(group, filled, states, fetched, model.device)
    if fetched < held:
        _compute(model, tokens[fetched:held], filled)
        for group, blocks in zip(known.groups, rows, strict=True):
            states = layer_states.last_states(group, filled, held - fetched)
            blocks[fetched // size :] = tensors_to_blocks(group.layout, states)
        layer_states.stop_recording(filled)
        try:
            saved = _save(sessions, tokens[:held], rows) if sessions else 0
        except StoreClosedError:
            raise
        except HoldfastError as error:
            reason = str(error)
            _log.warning("the computed blocks were not saved: %s", reason)
    return filled, Prefix(fetched, held - fetched, saved, sources, reason)


def _fetch(
    sessions: Sequence[Session], tokens: Sequence[int], rows: Sequence[_Rows]
) -> tuple[int, dict[str, int], str]:
    """Fetch the longest prefix that all groups hold; return its tokens, their tiers, and why."""
    size = sessions[0].namespace.block_tokens
    held = min(session.cover(tokens) for session in sessions)
    found, sources, reason = held, dict[str, int](), "" if held else "nothing is held here"
    for session, blocks in zip(sessions, rows, strict=True):
        if found:
            landed = session.fetch(tokens[:found], into=blocks[: found // size])
            found, reason = landed.tokens, landed.reason
            for tier, count in landed.sources.items():
                sources[tier] = sources.get(tier, 0) + count
    return found, sources, reason


def _save(sessions: Sequence[Session], tokens: Sequence[int], rows: Sequence[_Rows]) -> int:
    return sum(session.save(tokens, each) for session, each in zip(sessions, rows, strict=True))


def _compute(model: Any, tokens: Sequence[int], filled: DynamicCache) -> None:
    """Let the model compute tokens; window layers keep all of them until `stop_recording`."""
    layer_states.start_recording(filled)
    # The logits of the last token are as many as the model can be told to compute.
    last = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(model) else {}
    with torch.no_grad():
        ids = torch.tensor([tokens], device=model.device)
        model(input_ids=ids, past_key_values=filled, use_cache=True, **last)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters
