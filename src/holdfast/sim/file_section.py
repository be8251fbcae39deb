"""Sections of YAML files as structs; an error names the key's path, the value and a remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from holdfast.byte_size import convert_size
from holdfast.errors import ConfigError
from holdfast.yaml_file import value_at

_AT = re.compile(r" - at `\$?\.?(.*)`$")
_BOUND = re.compile(r"[<>]=? \S+$")
"""What ends msgspec's message for a number out of range."""
_Section = TypeVar("_Section", bound=msgspec.Struct)


class FileSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of a file; a key that it does not know is an error."""


def read_section(data: object, kind: type[_Section], file: str, path: str = "") -> _Section:
    """Convert plain data, which stands at `path` in its file. Raises ConfigError."""
    try:
        return msgspec.convert(data, kind, strict=False, dec_hook=convert_size)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_describe(error, data, kind, path)}") from error


def _describe(
    error: msgspec.ValidationError, data: object, kind: type[msgspec.Struct], path: str
) -> str:
    """Return the message for an error in converting `data`, which stands at `path` in its file."""
    found = _AT.search(str(error))
    keys = re.findall(r"[A-Za-z0-9_-]+", found[1]) if found else []
    value = value_at(data, keys)
    fault = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    shown = f"{value!r}: " if isinstance(value, str | int | float) else ""
    remedy = "correct it"
    if "unknown field" in fault:
        remedy = f"remove it; known here: {', '.join(_section_at(kind, keys).__struct_fields__)}"
    elif "Invalid enum value" in fault:
        hint = get_type_hints(_section_at(kind, keys))[keys[-1]]  # a `Literal` may be in a union
        literals = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
        choices = [str(choice) for each in literals for choice in get_args(each)]
        remedy = f"use one of: {', '.join(choices)}"
    elif "missing" in fault:
        remedy = "add it"
    elif bound := _BOUND.search(fault):
        remedy = f"give a number {bound[0]}"
        fields = msgspec.structs.fields(_section_at(kind, keys))
        if any(field.name == keys[-1] and not field.required for field in fields):
            remedy += ", or remove it"
    where = ".".join(filter(None, [path, *keys]))
    return f"{where + ': ' if where else ''}{shown}{fault}; {remedy}"


def _section_at(kind: type[msgspec.Struct], keys: Sequence[str]) -> type[msgspec.Struct]:
    """Return the innermost struct on a path of keys and indices that starts in a `kind`."""
    for key in keys:
        hint = get_type_hints(kind).get(key)
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                kind = part
    return kind
