"""Read a configuration: YAML, then environment, then flags, into the structs, checked.

Unknown keys are refused; every error starts with the key's path and names the value, the limit and
the remedy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from holdfast.config.check import check
from holdfast.config.defaults import (
    cache_folder,
    default_address,
    embedded_config,
    said_in_environment,
)
from holdfast.config.options import (
    Config,
    CxlOptions,
    DiskOptions,
    DomainOptions,
    EngineOptions,
    HostOptions,
    MooncakeOptions,
    PoolOptions,
    RegisterOptions,
    ScrubOptions,
    Size,
    TierOptions,
    TlsOptions,
    TokenOptions,
    ValkeyOptions,
)
from holdfast.errors import ConfigError
from holdfast.wire.address import UNIX
from holdfast.yaml_file import read_mapping

S = TypeVar("S", bound=msgspec.Struct)

_AT = re.compile(r" - at (`key` in )?`\$?(.*)`$")
_LONE = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
"""Halves of characters that no file's name has, in whatever encoding."""
_KEY = re.compile(r"[A-Za-z0-9_-]+|\.{3}")

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "": Config,
    "tiers": DiskOptions,
    "domains": DomainOptions,
    "engine": EngineOptions,
    "tls": TlsOptions,
    "tokens": TokenOptions,
    "register": RegisterOptions,
    "scrub": ScrubOptions,
}

_KINDS: dict[str, type[msgspec.Struct]] = {
    "host": HostOptions,
    "cxl": CxlOptions,
    "disk": DiskOptions,
    "pool": PoolOptions,
    "valkey": ValkeyOptions,
    "mooncake": MooncakeOptions,
}


def load(
    file: str = "",
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    private: str = "",
) -> Config:
    """Read the file, put environment and flags (`{"tiers.1.capacity": "8 GiB"}`) over it, check.

    What the file does not say is as this machine suggests; `private` names the folder of a node
    that listens and stores there. Raises ConfigError.
    """
    data = read_mapping(file) if file else {}
    if private:
        data["listen"] = f"{UNIX}{private}/node.sock"
    if "tiers" not in data:
        data["tiers"] = as_data(embedded_config(private or cache_folder()))["tiers"]
    for name, keys, value in said_in_environment(environment):
        _put(data, keys, value, name)
    for path, value in (flags or {}).items():
        _put(data, path.split("."), value, path)
    data.setdefault("listen", default_address(environment))
    return parse(data, Path(file).parent if file else Path.cwd())


def parse(data: Mapping[str, Any], folder: Path | None = None) -> Config:
    """Turn plain data into a checked Config; relative paths count from `folder`."""
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
    return msgspec.convert(data, Config, strict=False, dec_hook=_custom)


def as_data(config: Config) -> dict[str, Any]:
    """Return a configuration as plain data that `parse` accepts; sizes are bytes."""
    data: dict[str, Any] = msgspec.to_builtins(config, enc_hook=int)
    return data


def _put(data: dict[str, Any], keys: list[str], value: str, name: str) -> None:
    """Set one value deep inside plain data, making what is missing on the way."""
    here: dict[str, Any] | list[Any] = data
    for key, after in zip(keys, [*keys[1:], ""], strict=True):
        place: Any = _place(here, key, name)
        if not after:
            here[place] = value
        elif here[place] is None:
            here[place] = [] if after.isdecimal() else {}
        here = here[place]


def _place(here: object, key: str, name: str) -> str | int:
    """Return where `key` is in `here`, after making room for it."""
    if isinstance(here, dict):
        here.setdefault(key, None)
        return key
    if not isinstance(here, list) or not key.isdecimal() or int(key) > len(here):
        raise ConfigError(f"{name}: {key!r} is no place in {here!r:.60}; correct the name")
    if int(key) == len(here):
        here.append(None)
    return int(key)


def _custom(kind: type, value: object) -> object:
    if kind is Size:
        return Size.of(value)
    raise NotImplementedError(f"no reader for {kind.__name__}")


def _explain(error: msgspec.ValidationError, data: Mapping[str, Any]) -> str:
    """Put the key's path first, then the value, what is wrong with it, and the remedy."""
    found = _AT.search(str(error))
    keys = [] if found is None else _named(_KEY.findall(found[2]), str(error), data)
    value = _at(data, keys)
    what = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    path = ".".join(keys) or "configuration"
    if found is not None and found[1]:
        name = next(key for key in value if not isinstance(key, str))
        return f"{path}: {name!r:.80} is no text, and a name is; put it in quotes"
    plain = isinstance(value, str | int | float) and keys
    shown = f"{value!r:.80}: " if plain else ""
    return f"{path}: {shown}{what}; {_remedy(what, keys, value)}"


def _named(keys: Sequence[str], said: str, data: Mapping[str, Any]) -> list[str]:
    """Return keys with the name of an entry for each `...`, which is all that we are told.

    It is the first entry with which alone the same is said.
    """
    here: dict[str, Any] = copy.deepcopy(dict(data))
    named: list[str] = []
    for key in keys:
        if key != "...":
            named.append(key)
            continue
        entries = _at(here, named)
        every = dict(entries)
        for name, entry in every.items():
            entries.clear()
            entries[name] = entry
            if _said_of(here) == said:
                named.append(str(name))
                break
        else:  # it takes several entries together, so none of them is named
            entries.update(every)
            named.append("*")
    return named


def _said_of(data: Mapping[str, Any]) -> str:
    try:
        _converted(data)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        return str(error)
    return ""


def _at(data: object, keys: Sequence[str]) -> Any:  # noqa: ANN401  # whatever was written there
    """Return what is at a path; None where nothing is."""
    for key in keys:
        if isinstance(data, list):
            data = data[int(key)]
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return data


def _remedy(what: str, keys: list[str], value: object) -> str:
    if "unknown field" in what:
        section: type[msgspec.Struct] = _SECTIONS[keys[0] if keys else ""]
        if keys and keys[0] == "tiers" and isinstance(value, dict):
            section = _KINDS.get(str(value.get("kind")), section)
        return f"remove it; known here: {', '.join(_keys(section))}"
    if "Invalid value" in what:
        return f"use one of: {', '.join(_KINDS)}"
    if "Invalid enum value" in what:
        return f"use one of: {', '.join(_choices()[keys[-1]])}"
    return "add it" if "missing" in what else "correct it"


def _choices() -> dict[str, tuple[str, ...]]:
    """Return what may be said, for every option that takes one of some words."""
    sections = [*_SECTIONS.values(), *_KINDS.values()]
    hints = [hint for section in sections for hint in get_type_hints(section).items()]
    return {name: words for name, kind in hints if (words := _words(kind))}


def _words(kind: object) -> tuple[str, ...]:
    """Return the words of an option that takes one of some, or a number instead."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    words = [
        word for part in get_args(kind) if get_origin(part) is Literal for word in _words(part)
    ]
    return ("a number", *words) if words else ()


def _keys(section: type[msgspec.Struct]) -> tuple[str, ...]:
    tag = section.__struct_config__.tag_field
    return (*([tag] if tag else []), *section.__struct_fields__)


def _absolute(config: Config, folder: Path) -> Config:
    def resolved(path: str) -> str:
        if "\0" in path or _LONE.search(path):
            raise ConfigError(f"configuration: {path!a:.60} can not name a file; correct it")
        return str((folder / Path(path).expanduser()).absolute())

    replace = msgspec.structs.replace
    return replace(
        config,
        tiers=[_absolute_tier(tier, resolved) for tier in config.tiers],
        domains={
            name: replace(
                domain,
                key_file=domain.key_file and resolved(domain.key_file),
                publish_file=domain.publish_file and resolved(domain.publish_file),
            )
            for name, domain in config.domains.items()
        },
        keyring=config.keyring and resolved(config.keyring),
        audit=config.audit and resolved(config.audit),
        record=config.record and resolved(config.record),
        tls=config.tls and _resolved(config.tls, resolved),
        tokens=_resolved(config.tokens, resolved),
    )


def _absolute_tier(tier: TierOptions, resolved: Callable[[str], str]) -> TierOptions:
    match tier:
        case DiskOptions() if tier.path:
            return msgspec.structs.replace(tier, path=resolved(tier.path))
        case PoolOptions() if "://" not in tier.members:
            return msgspec.structs.replace(tier, members=resolved(tier.members))
        case ValkeyOptions():
            files = ("password_file", "tls_ca", "tls_cert", "tls_key")
            given = {name: getattr(tier, name) for name in files if getattr(tier, name)}
            absolute = {name: resolved(file) for name, file in given.items()}
            return msgspec.structs.replace(tier, **absolute)
        case _:
            return tier


def _resolved(section: S, resolved: Callable[[str], str]) -> S:
    """Return a section of nothing but paths with those that are given made absolute."""
    paths = {name: path for name, path in msgspec.structs.asdict(section).items() if path}
    return msgspec.structs.replace(section, **{k: resolved(v) for k, v in paths.items()})
