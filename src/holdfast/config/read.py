"""Read and validate a configuration: YAML, then environment, then flags, into the structs.

Unknown keys are errors. Every error starts with the key's path, and names the value, the limit and
the remedy.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec

from holdfast.byte_size import convert_size
from holdfast.config.check import check
from holdfast.config.defaults import (
    cache_folder,
    default_address,
    default_tiers,
    environment_options,
)
from holdfast.config.options import Config, HostOptions, TierOptions, tier_kind
from holdfast.errors import ConfigError
from holdfast.prepared import prepared
from holdfast.tiers.disk.kind import DiskOptions
from holdfast.tiers.kind import BUILT_IN, TierSection, built_in_kind, find_kind, installed_kinds
from holdfast.wire.address import UNIX
from holdfast.yaml_file import read_mapping, value_at

_AT = re.compile(r" - at (`key` in )?`\$?(.*)`$")
_LONE = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
"""Unpaired surrogates that no encoding of a file name produces."""
_KEY = re.compile(r"[A-Za-z0-9_-]+|\.{3}")


def _sections() -> dict[str, type[msgspec.Struct]]:
    """Return the options of each section of a configuration; "" stands for the top level."""
    sections: dict[str, type[msgspec.Struct]] = {"": Config}
    for name, hint in get_type_hints(Config).items():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                sections[name] = part
    return sections | {"tiers": DiskOptions}


_SECTIONS = _sections()

_KINDS: dict[str, type[msgspec.Struct]] = {
    "host": HostOptions,
    **{name: built_in_kind(name).options for name in BUILT_IN},
}


def load(
    file: str = "",
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    private: str = "",
) -> Config:
    """Read the file, apply environment and flags (`{"tiers.1.capacity": "8 GiB"}`), and validate.

    Missing options get defaults for this machine. `private` is the folder of a private node, for
    its socket and its disk tier. Raises ConfigError.
    """
    data = read_mapping(file) if file else {}
    if private:
        data["listen"] = f"{UNIX}{private}/node.sock"
    if "tiers" not in data:
        data["tiers"] = default_tiers(private or cache_folder())
    for name, keys, value in environment_options(environment):
        _put(data, keys, value, name)
    for path, value in (flags or {}).items():
        _put(data, path.split("."), value, path)
    data.setdefault("listen", default_address(environment))
    return parse(data, Path(file).parent if file else Path.cwd())


def parse(data: Mapping[str, Any], folder: Path | None = None) -> Config:
    """Convert plain data into a validated Config; relative paths are resolved from `folder`."""
    try:
        config = _converted(data)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, data)) from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"configuration: {error.object!a:.60} is not UTF-8 text; correct it in the file, the "
            "environment or the flags"
        ) from error
    config = _absolute(config, folder or Path.cwd())
    check(config)
    return config


def _converted(data: Mapping[str, Any]) -> Config:
    kinds = _installed(data)
    kind = _config_of(tuple(kinds.items())) if kinds else Config
    return msgspec.convert(data, kind, strict=False, dec_hook=convert_size)


def _installed(data: Mapping[str, Any]) -> dict[str, type[TierSection]]:
    """Return the kinds of other packages that the data names, with their options."""
    tiers = data.get("tiers")
    sections = [tier for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []
    names = {str(section.get("kind")) for section in sections} - _KINDS.keys()
    return {name: kind.options for name in sorted(names) if (kind := find_kind(name)) is not None}


@functools.cache
def _config_of(kinds: tuple[tuple[str, type[TierSection]], ...]) -> type[Config]:
    """Return a `Config` whose tiers may also be of these kinds, each a name and its options."""
    sections = [
        msgspec.defstruct(
            options.__name__, [], bases=(options,), frozen=True, tag=name, tag_field="kind"
        )
        for name, options in kinds
    ]
    tiers = GenericAlias(list, (functools.reduce(operator.or_, sections, TierOptions),))
    config = msgspec.defstruct(
        "Config", [("tiers", tiers)], bases=(Config,), frozen=True, kw_only=True
    )
    return prepared(cast("type[Config]", config))


def as_data(config: Config) -> dict[str, Any]:
    """Return a configuration as plain data that `parse` accepts; sizes are bytes."""
    data: dict[str, Any] = msgspec.to_builtins(config, enc_hook=int)
    return data


def _put(data: dict[str, Any], keys: list[str], value: str, name: str) -> None:
    """Set one nested value of plain data, creating missing lists and mappings."""
    here: Any = data
    for key, after in zip(keys, [*keys[1:], ""], strict=True):
        place: Any = key
        if isinstance(here, dict):
            here.setdefault(key, None)
        elif not isinstance(here, list) or not key.isdecimal() or int(key) > len(here):
            raise ConfigError(f"{name}: {key!r} does not exist in {here!r:.60}; correct the name")
        else:
            place = int(key)
            if place == len(here):
                here.append(None)
        if not after:
            here[place] = value
        elif here[place] is None:
            here[place] = [] if after.isdecimal() else {}
        here = here[place]


def _explain(error: msgspec.ValidationError, data: Mapping[str, Any]) -> str:
    """Return the text of an error: the key's path, the value, the violated rule, the remedy."""
    found = _AT.search(str(error))
    keys = [] if found is None else _named(_KEY.findall(found[2]), str(error), data)
    value = value_at(data, keys)
    what = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    path = ".".join(keys) or "configuration"
    if found is not None and found[1]:
        name = next(key for key in value if not isinstance(key, str))
        return f"{path}: {name!r:.80} is not text, as a name must be; put it in quotes"
    remedy = "add it" if "missing" in what else "correct it"
    if "unknown field" in what:
        section: type[msgspec.Struct] = _SECTIONS[keys[0] if keys else ""]
        if keys and keys[0] == "tiers" and isinstance(value, dict):
            section = {**_KINDS, **_installed(data)}.get(str(value.get("kind")), section)
        tag = ["kind"] if issubclass(section, TierSection) else []
        known = [*tag, *section.__struct_fields__]
        remedy = f"remove it; known here: {', '.join(known)}"
    elif "Invalid value" in what:
        remedy = f"use one of: {', '.join([*_KINDS, *installed_kinds()])}"
    elif "Invalid enum value" in what:
        structs = (*_SECTIONS.values(), *_KINDS.values())
        hints = [hint for struct in structs for hint in get_type_hints(struct).items()]
        choices = {option: words for option, kind in hints if (words := _words(kind))}
        remedy = f"use one of: {', '.join(choices[keys[-1]])}"
    plain = isinstance(value, str | int | float) and keys
    shown = f"{value!r:.80}: " if plain else ""
    return f"{path}: {shown}{what}; {remedy}"


def _named(keys: Sequence[str], message: str, data: Mapping[str, Any]) -> list[str]:
    """Return a path with each `...`, msgspec's placeholder for a mapping's entry, replaced.

    The entry is the first one that causes the same error message if it is alone in its mapping.
    """
    here: dict[str, Any] = copy.deepcopy(dict(data))
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
                _converted(here)
            except (msgspec.ValidationError, UnicodeEncodeError) as error:
                if str(error) == message:
                    named.append(str(name))
                    break
        else:  # only several entries together cause the error, so none of them is named
            entries.update(every)
            named.append("*")
    return named


def _words(kind: object) -> tuple[str, ...]:
    """Return the words of an enumeration, which may also allow a number; empty for other types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    words = [
        word for part in get_args(kind) if get_origin(part) is Literal for word in _words(part)
    ]
    return ("a number", *words) if words else ()


def _absolute(config: Config, folder: Path) -> Config:
    """Return a configuration with the paths of files made absolute; empty ones stay."""

    def resolved(path: str) -> str:
        if not path:
            return path
        if "\0" in path or _LONE.search(path):
            raise ConfigError(f"configuration: {path!a:.60} cannot name a file; correct it")
        return str((folder / Path(path).expanduser()).absolute())

    def resolved_or_address(path: Any) -> Any:  # noqa: ANN401  # not converted yet
        return resolved(path) if isinstance(path, str) and "://" not in path else path

    replace, tls, tokens = msgspec.structs.replace, config.tls, config.tokens
    tiers = list[TierOptions]()
    for tier in config.tiers:
        paths = [] if isinstance(tier, HostOptions) else tier_kind(tier).paths
        absolute = {name: resolved_or_address(getattr(tier, name)) for name in paths}
        tiers.append(replace(tier, **absolute))
    return replace(
        config,
        tiers=tiers,
        domains={
            name: replace(
                domain,
                key_file=resolved(domain.key_file),
                publish_file=resolved(domain.publish_file),
            )
            for name, domain in config.domains.items()
        },
        keyring=resolved(config.keyring),
        audit=resolved(config.audit),
        record=resolved(config.record),
        tls=tls
        and replace(tls, cert=resolved(tls.cert), key=resolved(tls.key), ca=resolved(tls.ca)),
        tokens=replace(tokens, key_file=resolved(tokens.key_file), file=resolved(tokens.file)),
        http=replace(config.http, token_file=resolved(config.http.token_file)),
    )
