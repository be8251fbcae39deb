"""JSON Schema of the configuration file, for editors and for checks before a deployment."""

from __future__ import annotations

import inspect
import re
from typing import Any

from msgspec import NODEFAULT, to_builtins
from msgspec import inspect as types

from holdfast.byte_size import Size
from holdfast.config.read import config_with
from holdfast.errors import ConfigError
from holdfast.tiers.kind import find_kind, installed_kinds

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SIZE = {
    "description": 'Bytes, or a number and a unit such as "64 GiB".',
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTPkmgtp][Ii]?)?[Bb]?\s*$"},
    ],
}
_PLAIN = {
    types.BoolType: "boolean",
    types.FloatType: "number",
    types.IntType: "integer",
    types.NoneType: "null",
    types.StrType: "string",
}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "max_length": "maxLength",
    "min_length": "minLength",
    "pattern": "pattern",
}
_FIELD = re.compile(r"`(\w+)`: (.+?)(?= `\w+`: |$)")
"""A field's meaning in the docstring of its section."""


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, with the tier kinds installed here.

    It has each key, its type and its bounds; no first-level key is required, because all have
    defaults. Rules that relate keys are not part of it: `holdfast doctor` checks them. Raises
    ConfigError if an installed kind cannot be loaded.
    """
    kinds = {name: kind.options for name in installed_kinds() if (kind := find_kind(name))}
    sections: dict[str, dict[str, Any]] = {}
    reference = _schema(types.type_info(config_with(kinds)), sections)
    whole = sections.pop(reference["$ref"].rpartition("/")[2])
    del whole["required"]
    return {"$schema": DIALECT, "title": "Holdfast configuration", **whole, "$defs": sections}


# msgspec.json.schema fails on defaults of types that only a hook can encode, such as `Size`.
def _schema(kind: types.Type, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a type; the schemas of structs are added to `sections`."""
    if plain := _PLAIN.get(type(kind)):
        bounds = {name: getattr(kind, field, None) for field, name in _BOUNDS.items()}
        return {"type": plain, **{name: value for name, value in bounds.items() if value != None}}  # noqa: E711
    match kind:
        case types.Metadata(type=inner):
            return _schema(inner, sections)
        case types.CustomType(cls=cls) if cls is Size:
            return _SIZE
        case types.LiteralType(values=values):
            return {"enum": sorted(values, key=str)}
        case types.UnionType(types=members):
            return {"anyOf": [_schema(member, sections) for member in members]}
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return {"type": "array", "items": _schema(item, sections)}
        case types.DictType(value_type=value):
            return {"type": "object", "additionalProperties": _schema(value, sections)}
        case types.StructType():
            return _reference(kind, sections)
    raise ConfigError(f"no schema for an option of type {kind}; use a type of docs/how-to/tier.md")


def _reference(kind: types.StructType, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = str(kind.tag) if kind.tag is not None else kind.cls.__name__
    if name not in sections:
        sections[name] = {}  # a struct may contain itself
        meanings = dict(_FIELD.findall(" ".join(inspect.cleandoc(kind.cls.__doc__ or "").split())))
        keys: dict[str, dict[str, Any]] = {}
        if kind.tag_field is not None:
            keys[kind.tag_field] = {"const": kind.tag}
        for field in kind.fields:
            about: dict[str, Any] = {}
            if field.name in meanings:
                about["description"] = meanings[field.name]
            if field.default is not NODEFAULT:
                about["default"] = to_builtins(field.default, enc_hook=int)
            keys[field.encode_name] = _schema(field.type, sections) | about
        required = [field.encode_name for field in kind.fields if field.required]
        sections[name] = {
            "type": "object",
            "properties": keys,
            "required": [*filter(None, [kind.tag_field]), *required],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}
