"""Configuration sections of tiers and the kinds they name, of this package or of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.byte_size import Size
from holdfast.config.options import InstalledOptions, TierOptions, kind_of
from holdfast.errors import ConfigError
from holdfast.tiers.kind import TierKind, TierSection, built_in_kind, find_kind

_TAG = str(InstalledOptions.__struct_config__.tag)


def wrapped(data: Mapping[str, Any], known: Mapping[str, object]) -> dict[str, Any]:
    """Return the data with each section of an installed kind as that of an `InstalledOptions`.

    `known` are the kinds of this package.
    """
    tiers = data.get("tiers")
    if not isinstance(tiers, list):
        return dict(data)
    sections = []
    for tier in tiers:
        section = tier
        name = tier.get("kind") if isinstance(tier, dict) else None
        if isinstance(name, str) and name not in known and (kind := find_kind(name)) is not None:
            options = {key: value for key, value in tier.items() if key != "kind"}
            section = {"kind": _TAG, "name": name, "options": options, "shared": kind.shared}
        sections.append(section)
    return {**data, "tiers": sections}


def unwrapped(tier: dict[str, Any]) -> dict[str, Any]:
    """Return a section as it was before `wrapped`."""
    return {"kind": tier["name"], **tier["options"]} if tier.get("kind") == _TAG else tier


def kind_and_options(tier: TierOptions, at: str) -> tuple[TierKind, TierSection]:
    """Return the kind of a section below the host and the kind's options; raise ConfigError."""
    if not isinstance(tier, InstalledOptions):
        return built_in_kind(kind_of(tier)), tier
    kind = find_kind(tier.name)
    if kind is None:
        raise ConfigError(f"{at}.kind: {tier.name!r} is not installed; install its package")
    try:
        options = msgspec.convert(tier.options, kind.options, strict=False, dec_hook=convert_size)
    except msgspec.ValidationError as error:
        what = str(error).replace("`", "'").replace("Object ", "")
        raise ConfigError(
            f"{at}: {what}; options of kind {tier.name!r}: "
            f"{', '.join(kind.options.__struct_fields__)}"
        ) from error
    return kind, options


def convert_size(kind: type, value: object) -> object:
    """Convert a `Size`, as msgspec's hook for types that it does not know."""
    if kind is Size:
        return Size.of(value)
    raise NotImplementedError(f"no reader for {kind.__name__}")
