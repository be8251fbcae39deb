"""Model shapes by the name of a shipped model, or from the config.json of any other.

The shipped configs contain only the fields that the arithmetic reads, with the publishers' values
(data/models/README.md names source and licences).
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.regular_file import read_regular
from holdfast.sim.model.attention import states_of
from holdfast.sim.model.fields import Fields
from holdfast.sim.model.known_types import NOT_MODELLED
from holdfast.sim.model.layers import layers_of
from holdfast.sim.model.parameters import count, weights_bytes
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.model.unread import kv_dtype, refuse_unread, unread
from holdfast.sim.shipped import DATA

CONFIG_BYTES_MAX = 4 * 1024 * 1024
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@cache
def known_models() -> tuple[str, ...]:
    """Return the names of the shipped models, `publisher/model`, in alphabetical order."""
    names = (file.stem.replace("--", "/") for file in (DATA / "models").glob("*--*.json"))
    return tuple(sorted(names, key=str.lower))


def load_model(name: str) -> ModelShape:
    """Return the shape of a shipped model, such as Qwen3-8B, or of the config.json at a path.

    Raises ConfigError where `load_config` does, and for a config that lacks a needed field.
    """
    return read_model(load_config(name))


def load_config(name: str) -> Fields:
    """Return the fields of the config.json of a shipped model, or of the one at a path.

    A name may omit the publisher and "Meta-"; case does not matter. Raises ConfigError for an
    unknown name, with similar names, and for a file that is not such a config.
    """
    path = Path(name)
    if name.endswith(".json") or path.exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(read_regular(path, CONFIG_BYTES_MAX).decode())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: cannot be read as JSON: {error}; give a model's config.json"
            ) from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: holds {type(config).__name__}, not a model's config.json")
        return Fields(config, name)
    wanted = _plain(name)
    plain = {_plain(known): known for known in known_models()}
    holding = [known for short, known in plain.items() if wanted and wanted in short]
    if wanted in plain:
        full = plain[wanted]
    elif len(holding) == 1:
        full = holding[0]
    else:
        close = holding or [plain[s] for s in difflib.get_close_matches(wanted, plain, 5, 0.5)]
        hint = f"; close: {', '.join(close)}" if close else ""
        raise ConfigError(
            f"model {name!r}: not one of the {len(plain)} shipped models{hint}; "
            "`holdfast size --models` lists all, or give the path of its config.json"
        )
    file = DATA / "models" / f"{full.replace('/', '--')}.json"
    return Fields(json.loads(file.read_text(encoding="utf-8")), full)


def read_model(fields: Fields) -> ModelShape:
    """Return the shape of a model from the fields of its config.json.

    Raises ConfigError that names all missing basic fields, the first missing field of a layer, or a
    field that shapes the KV state and is not understood.
    """
    if fields.value("is_encoder_decoder"):
        raise fields.wrong(
            "is_encoder_decoder", "the KV state of encoders is not modelled", "name a decoder"
        )
    if (keeps := NOT_MODELLED.get(fields.type_name)) is not None:
        given = "".join(f", {name}" for name in unread(fields))
        raise ConfigError(
            f"{fields.name}: model_type {fields.type_name}{given}: keeps {keeps}; its KV state is "
            "not modelled; name another model"
        )
    fields.need(
        *(
            each
            for each in _REQUIRED
            if each != "num_hidden_layers" or not fields.given("layers_block_type")
        )
    )
    if not fields.number("num_attention_heads"):
        raise ConfigError(
            f"{fields.name}: num_attention_heads: 0; a model without any has no KV cache"
        )
    layers = layers_of(fields)
    shared = fields.number("num_kv_shared_layers", default=0)
    if shared >= len(layers):
        raise ConfigError(
            f"{fields.name}: num_kv_shared_layers: {shared} of {len(layers)} layers; at "
            "least one layer must keep its own KV state; correct the config"
        )
    states = states_of(layers, shared=shared)
    counted = count(fields, layers)
    shape = ModelShape(
        name=fields.model,
        attention=tuple(states),
        active_parameters=counted.active,
        parameters=counted.total,
        weights_bytes=weights_bytes(fields, counted),
        context_max=fields.number("max_position_embeddings", default=0),
        kv_dtype=kv_dtype(fields),
    )
    refuse_unread(fields)
    if not shape.context_bytes(1) or not counted.active:
        raise ConfigError(
            f"{fields.name}: its layers keep nothing, or compute nothing, because a size is 0; "
            "correct the config"
        )
    return shape


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-instruct")
