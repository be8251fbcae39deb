"""The fields of a model's config.json: asked for by name, and missed with a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigError

_NESTED = ("text_config", "language_config", "llm_config")


class Fields:
    """One config, read by name; the language part of a multimodal one comes first.

    Remembers what was asked for, so that a shipped config can be held to what is read of it.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        """Wrap the plain data of a config.json; `name` stands in messages."""
        inner: Mapping[str, Any] = next(
            (config[key] for key in _NESTED if isinstance(config.get(key), dict)), {}
        )
        self._data: dict[str, Any] = {**config, **inner}
        self.name = name
        self.asked: set[str] = set(_NESTED)

    def value(self, *names: str) -> Any:  # noqa: ANN401  # whatever JSON can hold
        """Return the first of the named fields that is there and not null, or None."""
        self.asked.update(names)
        return next((v for name in names if (v := self._data.get(name)) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of the named fields as a whole number of at least 0.

        Raises ConfigError where none is there and there is no default, or where it is no such
        number.
        """
        value = self.value(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.missing(" or ".join(names))
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"{self.name}: {names[0]}: {value!r:.40}: not a whole number of at least 0; "
                "correct the config"
            )
        return value

    def need(self, *names: str) -> None:
        """Raise ConfigError naming all of these fields that are missing."""
        absent = [name for name in names if self.value(name) is None]
        if absent:
            raise self.missing(", ".join(absent))

    def missing(self, what: str) -> ConfigError:
        """Return the error that says which field the arithmetic needs and the config lacks."""
        return ConfigError(
            f"{self.name}: has no {what}; give a complete config.json of a text model, or the "
            "name of a model that is shipped (holdfast size --models lists them)"
        )
