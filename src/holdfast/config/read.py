"""Read and validate a configuration: YAML, then environment, then flags, into the structs.

Unknown keys are errors. Every error starts with the key's path, and names the value, the limit and
the remedy.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any, cast

import msgspec

from holdfast.address import UNIX
from holdfast.config.check import check
from holdfast.config.defaults import (
    cache_folder,
    default_address,
    default_tiers,
    environment_options,
)
from holdfast.config.options import Config, HostOptions, TierOptions, tier_kind
from holdfast.config.sections import convert
from holdfast.errors import ConfigError
from holdfast.prepared import prepared
from holdfast.tiers.kind import BUILT_IN, TierSection, find_kind, installed_kinds
from holdfast.yaml_file import read_mapping

_LONE = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
"""Unpaired surrogates that no encoding of a file name produces."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")


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
    kinds = _installed(data)
    kind = config_with(kinds)
    config = _absolute(convert(data, kind, more_tags=installed_kinds), folder or Path.cwd())
    _check_text(config, "")
    check(config)
    return config


def _check_text(value: object, at: str) -> None:
    """Raise ConfigError for text that no program, address or file can be named by.

    Paths, made absolute before, may contain the surrogates that stand for bytes of a file's name.
    """
    if isinstance(value, str):
        if "\0" in value or (_SURROGATE if not value.startswith("/") else _LONE).search(value):
            raise ConfigError(
                f"{at}: {value!a:.60} contains a NUL or half a character (a surrogate); correct it"
            )
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check_text(getattr(value, name), f"{at}.{name}".lstrip("."))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _check_text(name, at)
            _check_text(each, f"{at}.{name}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _check_text(each, f"{at}.{number}")


def _installed(data: Mapping[str, Any]) -> dict[str, type[TierSection]]:
    """Return the kinds of other packages that the data names, with their options."""
    tiers = data.get("tiers")
    sections = [tier for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []
    kinds = [kind for section in sections if isinstance(kind := section.get("kind"), str)]
    names = {*kinds} - {"host", *BUILT_IN}
    return {name: kind.options for name in sorted(names) if (kind := find_kind(name)) is not None}


def config_with(kinds: Mapping[str, type[TierSection]]) -> type[Config]:
    """Return `Config`, with tiers that may also be of these kinds, given by name and options."""
    return _config_of(tuple(kinds.items())) if kinds else Config


@functools.cache
def _config_of(kinds: tuple[tuple[str, type[TierSection]], ...]) -> type[Config]:
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
            where, remedy = f"{here!r:.60}", "correct the name"
            if isinstance(here, list):
                where = f"a list of {len(here)}"
                remedy = f"name one of its entries by a number from 0, or add one with {len(here)}"
            raise ConfigError(f"{name}: {key!r} does not exist in {where}; {remedy}")
        else:
            place = int(key)
            if place == len(here):
                here.append(None)
        if not after:
            here[place] = value
        elif here[place] is None:
            here[place] = [] if after.isdecimal() else {}
        else:  # an alias of YAML may name it elsewhere too: change a copy
            here[place] = copy.copy(here[place])
        here = here[place]


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
        gates=resolved(config.gates),
        record=resolved(config.record),
        tls=tls
        and replace(tls, cert=resolved(tls.cert), key=resolved(tls.key), ca=resolved(tls.ca)),
        tokens=replace(
            tokens,
            key_file=resolved(tokens.key_file),
            second_key_file=resolved(tokens.second_key_file),
            file=resolved(tokens.file),
        ),
        http=replace(config.http, token_file=resolved(config.http.token_file)),
    )
