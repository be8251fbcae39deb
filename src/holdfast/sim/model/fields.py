"""Typed access to the fields of a model's config.json, with errors that name the field.

A field may have another name, depending on the model type, and an absent field may have a default
of the model's class; `holdfast.sim.model.known_types` has both. Multimodal configs describe several
models: only the fields of the language part count, and no other part fills its gaps.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError
from holdfast.sim.model.known_types import ALIASES, ModelType, find_type

NUMBER_MAX = 10**9
"""Largest size, count or length that is accepted; a larger one is a mistake in the config."""

_TEXT_PARTS = (
    *("text_config", "language_config", "llm_config", "thinker_config"),
    *("language_model", "language_model_config", "lm_config", "text_model_config"),
)
"""Sections with the language part; that of `thinker_config` is in its own `text_config`."""

_OTHER_PARTS = re.compile(
    r"vision|visual|image|video|audio|speech|vit|encoder|talker|codec|dit_|mtp|draft|projector"
)
"""Parts of names of sections with layers that are not the language part."""

QUANTIZATION = ("quantization_config", "compression_config")
"""Sections that say how weights and KV state are quantised; the second name is an older one."""

_OF_THE_WHOLE = ("dtype", "torch_dtype", *QUANTIZATION, "tie_word_embeddings", "vocab_size")
"""Fields of a multimodal config's root that hold for its language part too."""

_AMBIGUOUS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    "per_layer_config",
)
"""Fields that a language part may leave to its class, unless the root has one of that name."""


class Section:
    """The fields of one section of a config; `asked` collects the names that were read."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        """Wrap plain data; error messages contain `name`."""
        self.data = data
        self.name = name
        self.asked: set[str] = set()
        self.sections: dict[str, Section] = {}

    def value(self, *names: str) -> Any:  # noqa: ANN401  # whatever JSON can hold
        """Return the first of the named fields that exists and is not null, or None."""
        self.asked.update(names)
        return next((v for name in names if (v := self.data.get(name)) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return the first of the named fields as a whole number of at least `least`.

        Raises ConfigError if no field exists and there is no default, or for another value.
        """
        value = self.value(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.missing(" or ".join(names))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not (least <= value <= NUMBER_MAX)
        ):
            raise self.wrong(
                self.written(*names), f"not a whole number from {least} to {NUMBER_MAX:,}"
            )
        return value

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers of at least 0; empty if the field does not exist."""
        listed = self.listed(name) or []
        if not all(type(entry) is int and 0 <= entry <= NUMBER_MAX for entry in listed):
            raise self.wrong(name, f"not a list of whole numbers from 0 to {NUMBER_MAX:,}")
        return [int(entry) for entry in listed]

    def listed(self, name: str) -> Sequence[Any] | None:
        """Return a list field, or a string field as its letters; None if it does not exist."""
        value = self.value(name)
        if value is None or isinstance(value, list | str):
            return value
        raise self.wrong(name, "not a list")

    def section(self, name: str) -> Section | None:
        """Return the fields of a nested section; None if it does not exist."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "not a section with fields of its own")
        if name not in self.sections:
            self.sections[name] = Section(value, f"{self.name}: {name}")
        return self.sections[name]

    def written(self, *names: str) -> str:
        """Return the first of the named fields that the config has, or the first name."""
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def wrong(self, name: str, why: str, remedy: str = "correct the config") -> ConfigError:
        """Return the error for a field whose value cannot be used."""
        return ConfigError(f"{self.name}: {name}: {self.value(name)!r:.40}: {why}; {remedy}")

    def missing(self, what: str) -> ConfigError:
        """Return the error for a field that the arithmetic needs and the config lacks."""
        return ConfigError(
            f"{self.name}: has no {what}; give a complete config.json of a text model, or the "
            "name of a shipped model (holdfast size --models lists them)"
        )


class Fields(Section):
    """The fields of a model's language part, by the standard names of transformers.

    `model` is the name that the model was asked for by; `name` also has the path to the language
    part. `type_name` and `type` are its model type and what is known of that type.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Find the language part in the plain data of a config.json.

        Raises ConfigError if a field could belong to the language part or to another part.
        """
        part, path, kind = config, list[str](), config.get("model_type")
        while inner := next((key for key in _TEXT_PARTS if _is_part(part, key, kind)), ""):
            part = part[inner]
            path.append(inner)
            kind = part.get("model_type") or _part_type(kind)
        super().__init__(part, ": ".join((name, *path)))
        if path:
            self.data = {**{k: config[k] for k in _OF_THE_WHOLE if k in config}, **part}
        self.asked.update((*_TEXT_PARTS, "model_type"))
        self.model = name
        self.type_name = str(kind or "")
        known = find_type(self.type_name)
        if known and known.text:  # the fields of its language part are at the root
            known = find_type(known.text)
        self.type: ModelType = known or ModelType()
        self.known = known is not None
        self.layer_index: int | None = None
        self._overrides: Mapping[str, Any] = {}
        self._found: dict[tuple[str, ...], Any] = {}
        for field in _AMBIGUOUS if path else ():
            if config.get(field) is not None and not any(n in part for n in self._names(field)):
                raise ConfigError(
                    f"{self.name}: has no {field}; {field} {config[field]!r:.20} at the root may "
                    f"be that of another part; write {field} into {path[-1]}"
                )
        for field, inner_part in part.items():
            if _has_layers(inner_part) and _has_layers(part) and not _OTHER_PARTS.search(field):
                raise ConfigError(
                    f"{self.name}: {field}: has layers of its own, beside those of the model; name "
                    "it text_config if it is the language part, or remove it"
                )

    def layer(self, index: int, overrides: Mapping[str, Any]) -> Fields:
        """Return these fields as one layer has them: `overrides` replace fields of this name.

        A number that the config lists for each layer is that of the layer.
        """
        view = copy.copy(self)
        view.__dict__.update(layer_index=index, _overrides=overrides)
        return view

    def value(self, *names: str) -> Any:  # noqa: ANN401  # whatever JSON can hold
        """Return the first of the named fields that exists and is not null.

        If there is none: the default of the model's class, unless a field is null. Else None.
        """
        if self._overrides:
            return self._find(names)
        if names not in self._found:  # the same in all layers without overrides
            self._found[names] = self._find(names)
        return self._found[names]

    def _find(self, names: tuple[str, ...]) -> Any:  # noqa: ANN401  # whatever JSON can hold
        every = [name for given in names for name in self._names(given)]
        self.asked.update(every)
        for data in (self._overrides, self.data):
            for name in every:
                if data.get(name) is not None:
                    return data[name]
            if any(name in data for name in every):
                return None
        return next((d for name in names if (d := self.type.defaults.get(name)) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return the first of the named fields as a whole number; see Section.number."""
        listed = self.value(*names)
        if isinstance(listed, list) and self.layer_index is not None:
            if self.layer_index >= len(listed):
                raise self.wrong(self.written(*names), f"has no entry for layer {self.layer_index}")
            alone = Section({names[0]: listed[self.layer_index]}, self.name)
            return alone.number(names[0], default=default, least=least)
        return super().number(*names, default=default, least=least)

    def written(self, *names: str) -> str:
        """Return the name, as the config has it, of the first of the named fields that exists."""
        return super().written(*(name for given in names for name in self._names(given)))

    def given(self, name: str) -> bool:
        """Return whether the config itself has the field, and not null."""
        return any(self.data.get(each) is not None for each in self._names(name))

    def need(self, *names: str) -> None:
        """Raise ConfigError that names all of these fields that are missing."""
        absent = [name for name in names if self.value(name) is None]
        if absent:
            there = [name for name, value in self.data.items() if _may_be_meant(name, value)]
            given = f" (given: {', '.join(there)})" if there else ""
            raise self.missing(", ".join(absent) + given)

    def one_of(self, name: str) -> str:
        """Return the field's name in this config. Raises ConfigError if two names disagree."""
        given = [each for each in self._names(name) if self.data.get(each) is not None]
        if len({str(self.data[each]) for each in given}) > 1:
            both = " and ".join(f"{each} {self.data[each]!r:.20}" for each in given)
            raise ConfigError(f"{self.name}: {both}: two names of one field disagree; remove one")
        return given[0] if given else ""

    def _names(self, name: str) -> tuple[str, ...]:
        written = self.type.names.get(name)
        return (name, written) if written else (name, *ALIASES.get(name, ()))


def _may_be_meant(name: str, value: object) -> bool:
    """Return whether a field could be a size of layers, or a part of the model, by another name."""
    if isinstance(value, dict):
        return len(value) > 1 and not name.endswith(("2id", "2label"))
    size = re.search(r"layers|dim|head|embd|hidden|size|kv|config", name)
    return bool(size) and isinstance(value, int | list | str) and not isinstance(value, bool)


def _has_layers(data: object) -> bool:
    return isinstance(data, Mapping) and {"hidden_size", "num_hidden_layers"} <= {*data}


def quantization(fields: Fields) -> Section:
    """Return the section that says how a model is quantised; empty if it is not."""
    found = [section for name in QUANTIZATION if (section := fields.section(name)) is not None]
    return found[0] if found else Section({}, fields.name)


def _is_part(config: Mapping[str, Any], key: str, kind: object) -> bool:
    """Return whether the section `key` holds the language part; an empty one is its defaults."""
    inner = config.get(key)
    return isinstance(inner, dict) and bool(inner or _part_type(kind))


def _part_type(kind: object) -> str:
    """Return the model type of the language part of a multimodal type; empty if not known."""
    known = find_type(str(kind))
    return known.text if known else ""
