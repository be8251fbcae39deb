"""Messages for YAML files that do not match their structs: key path, value, fault and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import msgspec

_AT = re.compile(r" - at `\$?\.?(.*)`$")


def describe(
    error: msgspec.ValidationError,
    data: object,
    file_kind: str,
    section_of: Callable[[Sequence[str]], type[msgspec.Struct]],
    path: str = "",
) -> str:
    """Return the message for an error in converting `data`, which stands at `path` in its file.

    `section_of` returns the struct that a list of keys below `path` leads to. `file_kind` takes the
    place of an empty path.
    """
    found = _AT.search(str(error))
    keys = re.findall(r"[A-Za-z0-9_-]+", found[1]) if found else []
    value: Any = data
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    fault = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    shown = f"{value!r}: " if isinstance(value, str | int | float) else ""
    remedy = "correct it"
    if "unknown field" in fault:
        remedy = f"remove it; known here: {', '.join(section_of(keys).__struct_fields__)}"
    elif "Invalid enum value" in fault:
        hint = get_type_hints(section_of(keys[:-1]))[keys[-1]]  # a `Literal` may be in a union
        literals = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
        choices = [str(choice) for each in literals for choice in get_args(each)]
        remedy = f"use one of: {', '.join(choices)}"
    elif "missing" in fault:
        remedy = "add it"
    elif ">= 0.0" in fault:
        remedy = "give 0 or more"
    where = ".".join(filter(None, [path, *keys])) or file_kind
    return f"{where}: {shown}{fault}; {remedy}"
