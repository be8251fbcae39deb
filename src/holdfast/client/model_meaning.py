"""The meaning of portable blocks, from a model's files and its user's overrides.

Every engine that serves the same files with the same overrides gets the same texts, whatever its
version. So the texts come from `config.json` as it is on the disk: a library's configuration
classes add defaults that differ between versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

VOLATILE_FIELDS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Fields of a `config.json` that do not shape KV state, or are given apart (the data type)."""

POSITION_WORDS = ("rope", "rotary", "position", "sliding", "window", "alibi", "yarn")
"""Words in the names of fields that say how positions enter keys, or which tokens are attended."""


ANY = "any"
"""`ModelSource.computed_by` of models that several engines were seen to compute alike."""


class ModelSource(NamedTuple):
    """A model as an engine was told to serve it.

    `weights`: digest of the files (`weights_digest`), or the user's name for them. `config`: the
    content of `config.json`. `overrides`: what the user changed in it. `dtype`: data type of the
    computation, such as `bfloat16`. `quantised_on_load`: scheme with which the engine quantises the
    weights while it loads them, or `none`. `code`: revision of code that the model brings, or
    `none`. `computed_by`: `ANY`, or the engine whose keys and values may differ from those of
    others.
    """

    weights: str
    config: Mapping[str, Any]
    overrides: Mapping[str, Any]
    dtype: str
    quantised_on_load: str
    code: str
    computed_by: str


def model_digest(source: ModelSource) -> str:
    """Return 32 hex digits over everything of a model that shapes KV state."""
    text = canonical_json(
        source._replace(
            config=_lasting(source.config), overrides=_lasting(source.overrides)
        )._asdict()
    )
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"holdfast-model").hexdigest()


def positions_of(source: ModelSource) -> str:
    """Return the position settings of a model and their overrides, as canonical JSON.

    Fields of inner sections have paths such as `text_config.rope_theta`.
    """
    return canonical_json(
        {
            "config": dict(_position_fields("", source.config)),
            "overrides": dict(_position_fields("", source.overrides)),
        }
    )


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and without white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _lasting(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in VOLATILE_FIELDS}


def _position_fields(path: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if any(word in name for word in POSITION_WORDS):
            yield path + name, value
        elif isinstance(value, Mapping):
            yield from _position_fields(f"{path}{name}.", value)
