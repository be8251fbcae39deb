"""What is known of a model's object: its KV groups and their fingerprints, found once.

They are found again if the model's layers, tensors or settings have changed since.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from holdfast.blocks.fingerprint import TOKENS, Fingerprint, Meaning
from holdfast.client.engine import EngineGroup
from holdfast.client.model_meaning import model_digest, positions_of
from holdfast.engines.transformers.computation import mode_of
from holdfast.engines.transformers.identity import (
    check_states,
    refuse_unknown_weights,
    source_of,
    weights_state,
)
from holdfast.engines.transformers.layer_states import CacheLayers, groups_of
from holdfast.errors import BlockError


class KnownModel(NamedTuple):
    """The layers of a model's cache by KV group, and the groups as a store knows them."""

    block_tokens: int
    layers: tuple[CacheLayers, ...]
    groups: tuple[EngineGroup, ...]

    @property
    def is_recurrent(self) -> bool:
        """Whether the model keeps states of exact numbers of tokens."""
        return self.layers[-1].kv_group.attention == "recurrent"


_known: weakref.WeakKeyDictionary[Any, tuple[object, KnownModel]] = weakref.WeakKeyDictionary()


def known_model(model: Any, name: str, block_tokens: int) -> KnownModel:
    """Return what is known of a model; `name`: the caller's name of its weights, or empty.

    Raises BlockError for a model that trains, attends to later tokens or keeps unknown states,
    NoDigestError for weights that need a name.
    """
    if model.training:
        raise BlockError("model: it is in training mode, so dropout changes its KV; call eval()")
    check_states(model)
    if not name:
        refuse_unknown_weights(model)
    classes = tuple(map(type, model.modules()))  # a layer may be replaced by one of another class
    state = (name, block_tokens, mode_of(model), classes, weights_state(model))
    before = _known.get(model)
    if before is not None and before[0] == state:
        return before[1]
    found = _examine(model, name, block_tokens)
    _known[model] = (state, found)
    return found


def parameters_of(model: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward pass."""
    return inspect.signature(model.forward).parameters


def cache_argument(model: Any) -> str:
    """Return the parameter of the forward pass that takes a cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in parameters_of(model) else "past_key_values"


def _examine(model: Any, name: str, block_tokens: int) -> KnownModel:
    probe = DynamicCache(config=model.config)
    with torch.no_grad():
        first = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=first, use_cache=True, **{cache_argument(model): probe})
    layers = groups_of(probe, model.config, block_tokens)
    source = source_of(model, layers[0].layout.dtype, name)
    fingerprints = [
        Fingerprint(
            Meaning(
                model=model_digest(source),
                positions=positions_of(source),
                adapter="none",
                kv_quantisation="none",
                kv_scales="none",
                naming=TOKENS,
                block_tokens=block_tokens,
                kv_group=each.kv_group,
            ),
            each.layout,
        )
        for each in layers
    ]
    return KnownModel(block_tokens, tuple(layers), tuple(map(EngineGroup, fingerprints)))
