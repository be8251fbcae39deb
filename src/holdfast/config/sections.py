"""Sections of YAML files as structs; an error names the key's path, the value and a remedy."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from holdfast.byte_size import convert_size
from holdfast.errors import ConfigError
from holdfast.yaml_file import INTEGER_BITS_MAX, value_at

_AT = re.compile(r" - at (`key` in )?`\$?(.*)`$")
_KEY = re.compile(r"[A-Za-z0-9_-]+|\.{3}")
_BOUND = re.compile(r"(?<!length )[<>]=? \S+$")
"""The end of msgspec's message for a number out of range."""
_Section = TypeVar("_Section", bound=msgspec.Struct)


class FileSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of a file; a key that it does not know is an error."""


def convert(
    data: object,
    kind: type[_Section],
    where: str = "",
    more_tags: Callable[[], Iterable[str]] = list,
) -> _Section:
    """Convert plain data to a struct. Raises ConfigError: key path, value, rule and remedy.

    `where` is the start of error messages, such as a file. `more_tags` is called for an unknown
    tag; it returns the tags that are possible besides those of `kind`.
    """
    _refuse_long_integers(data, where, "", set())
    try:
        return _converted(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, data, kind, where, more_tags)) from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where or 'file, environment or flags: '}{error.object!a:.60} is not UTF-8 text; "
            "correct it"
        ) from error


def _converted(data: object, kind: type[_Section]) -> _Section:
    return msgspec.convert(data, kind, strict=False, dec_hook=convert_size)


def _refuse_long_integers(data: object, where: str, at: str, seen: set[int]) -> None:
    """Raise ConfigError for an integer that Python refuses to print; `seen`: ids of containers."""
    if isinstance(data, int):
        if data.bit_length() > INTEGER_BITS_MAX:
            raise ConfigError(
                f"{where}{at}: an integer of more than {INTEGER_BITS_MAX} bits; give a smaller one"
            )
    elif isinstance(data, Mapping | list | tuple) and id(data) not in seen:
        seen.add(id(data))
        entries = data.items() if isinstance(data, Mapping) else enumerate(data)
        for name, each in entries:
            _refuse_long_integers(name, where, at, seen)
            _refuse_long_integers(each, where, f"{at}.{name!s:.80}".lstrip("."), seen)


def _explain(
    error: msgspec.ValidationError,
    data: object,
    kind: type[msgspec.Struct],
    where: str,
    more_tags: Callable[[], Iterable[str]],
) -> str:
    """Return the text of an error: the key's path, the value, the violated rule, the remedy."""
    found = _AT.search(str(error))
    keys = _named(_KEY.findall(found[2]), str(error), data, kind) if found else []
    value = value_at(data, keys)
    start = where + (f"{'.'.join(keys)}: " if keys else "") or "configuration: "
    if found and found[1]:
        name = next(key for key in value if not isinstance(key, str))
        return f"{start}{name!r:.80} is not text, as a name must be; put it in quotes"
    rule = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    remedy = "correct it"
    if rule.startswith("contains unknown field"):
        section = _section_of(_type_at(kind, data, keys), value)
        known = [section.__struct_config__.tag_field, *section.__struct_fields__] if section else []
        remedy = f"remove it; known here: {', '.join(filter(None, known))}"
    elif rule.startswith("missing required field"):
        remedy = "add it"
    elif rule.startswith("Invalid value"):
        sections = _sections_in(_type_at(kind, data, keys[:-1]))
        tags = [str(section.__struct_config__.tag) for section in sections]
        remedy = f"use one of: {', '.join(dict.fromkeys([*tags, *more_tags()]))}"
    elif rule.startswith("Invalid enum value"):
        remedy = f"use one of: {', '.join(_words(_type_at(kind, data, keys)))}"
    elif bound := _BOUND.search(rule):
        remedy = f"give a number {bound[0]}"
        section = _section_of(_type_at(kind, data, keys[:-1]), value_at(data, keys[:-1]))
        fields = msgspec.structs.fields(section) if section else ()
        if any(field.name == keys[-1] and not field.required for field in fields):
            remedy += ", or remove it"
    shown = f"{value!r:.80}: " if isinstance(value, str | int | float) and keys else ""
    return f"{start}{shown}{rule}; {remedy}"


def _named(
    keys: Sequence[str], message: str, data: object, kind: type[msgspec.Struct]
) -> list[str]:
    """Return a path with each `...`, msgspec's placeholder for a mapping's entry, replaced.

    The entry is the first one that causes the same error message if it is alone in its mapping.
    """
    here = copy.deepcopy(data)
    named: list[str] = []
    for key in keys:
        if key != "...":
            named.append(key)
            continue
        entries = value_at(here, named)
        every = dict(entries)
        for name, entry in every.items():
            entries.clear()
            entries[name] = entry
            try:
                _converted(here, kind)
            except (msgspec.ValidationError, UnicodeEncodeError) as error:
                if str(error) == message:
                    named.append(str(name))
                    break
        else:  # only several entries together cause the error, so none of them is named
            entries.update(every)
            named.append("*")
    return named


def _type_at(kind: object, data: object, keys: Sequence[str]) -> object:
    """Return the type of the value at a path in the data of a `kind`; None if it is unknown."""
    if not keys:
        return kind
    *above, key = keys
    hint = _type_at(kind, data, above)
    section = _section_of(hint, value_at(data, above))
    if section is not None:
        return get_type_hints(section).get(key)
    containers = [part for part in _parts(hint) if isinstance(get_origin(part), type)]
    return get_args(containers[0])[-1] if containers else None


def _section_of(hint: object, value: object) -> type[msgspec.Struct] | None:
    """Return the struct of a value's type; of a tagged union, the one with the value's tag."""
    for section in _sections_in(hint):
        tag, field = section.__struct_config__.tag, section.__struct_config__.tag_field
        if tag is None or (isinstance(value, Mapping) and value.get(field) == tag):
            return section
    return None


def _sections_in(hint: object) -> list[type[msgspec.Struct]]:
    return [
        part for part in _parts(hint) if isinstance(part, type) and issubclass(part, msgspec.Struct)
    ]


def _words(hint: object) -> list[str]:
    """Return the words of an enumeration, after "a number" if it also allows one."""
    parts = _parts(hint)
    words = [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return ["a number", *words] if int in parts or float in parts else words


def _parts(hint: object) -> tuple[Any, ...]:
    """Return the types in a union; of another type, the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
