"""Typed access to the fields of a model's config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError

NUMBER_MAX = 10**9
"""Largest size, count or length that is accepted; a larger one is a mistake in the config."""

_NESTED = ("text_config", "language_config", "llm_config")


class Fields:
    """The fields of one config; those of a multimodal config's language part take precedence.

    `asked` collects the names that were read: tests check that a shipped config has no others.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Wrap the plain data of a config.json; error messages contain `name`."""
        inner: Mapping[str, Any] = next(
            (config[key] for key in _NESTED if isinstance(config.get(key), dict)), {}
        )
        self._data: dict[str, Any] = {**config, **inner}
        self.name = name
        self.asked: set[str] = set(_NESTED)

    def value(self, *names: str) -> Any:  # noqa: ANN401  # whatever JSON can hold
        """Return the first of the named fields that exists and is not null, or None."""
        self.asked.update(names)
        return next((v for name in names if (v := self._data.get(name)) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return the first of the named fields as a whole number of at least `least`.

        Raises ConfigError if no field exists and there is no default, or for another value.
        """
        value = self.value(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.missing(" or ".join(names))
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not (least <= value <= NUMBER_MAX)
        ):
            raise self._wrong(names[0], value, f"a whole number from {least} to {NUMBER_MAX:,}")
        return value

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers of at least 0; empty if the field does not exist."""
        listed = self.listed(name) or []
        if not all(type(entry) is int and 0 <= entry <= NUMBER_MAX for entry in listed):
            raise self._wrong(name, listed, f"a list of whole numbers from 0 to {NUMBER_MAX:,}")
        return [int(entry) for entry in listed]

    def listed(self, name: str) -> Sequence[Any] | None:
        """Return a list field, or a string field as its letters; None if it does not exist."""
        value = self.value(name)
        if value is None or isinstance(value, list | str):
            return value
        raise self._wrong(name, value, "a list")

    def section(self, name: str) -> Fields | None:
        """Return the fields of a nested section; None if it does not exist."""
        value = self.value(name)
        if value is None or isinstance(value, dict):
            return None if value is None else Fields(value, f"{self.name}: {name}")
        raise self._wrong(name, value, "a section with fields of its own")

    def need(self, *names: str) -> None:
        """Raise ConfigError that names all of these fields that are missing."""
        absent = [name for name in names if self.value(name) is None]
        if absent:
            raise self.missing(", ".join(absent))

    def _wrong(self, name: str, value: object, kind: str) -> ConfigError:
        return ConfigError(f"{self.name}: {name}: {value!r:.40}: not {kind}; correct the config")

    def missing(self, what: str) -> ConfigError:
        """Return the error for a field that the arithmetic needs and the config lacks."""
        return ConfigError(
            f"{self.name}: has no {what}; give a complete config.json of a text model, or the "
            "name of a shipped model (holdfast size --models lists them)"
        )
