"""Stores of other makes from their configuration, as shared tiers."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.config import MooncakeOptions, ValkeyOptions
from holdfast.errors import ConfigError
from holdfast.tiers.base import Shared


def open_valkey(options: ValkeyOptions, at: str, name: str, segment_blocks: int) -> Shared:
    """Open the tier, whether or not a server answers; `at` is the tier's key path."""
    from holdfast.tiers.valkey import tier

    tls = options.tls_ca
    known = {
        **_known(options, tier.ValkeyOptions),
        "addresses": tuple(options.addresses),
        "segment_blocks": segment_blocks,
        "tls": tier.ValkeyTls(tls, options.tls_cert, options.tls_key) if tls else None,
    }
    try:
        return tier.ValkeyTier(tier.ValkeyOptions(**known), name=name)
    except ConfigError as error:
        raise ConfigError(f"{at}.{error}") from error


def open_mooncake(options: MooncakeOptions, at: str, name: str) -> Shared:
    """Open the tier, whether or not a master answers; `at` is the tier's key path."""
    from holdfast.tiers.mooncake import tier

    known = {**_known(options, tier.MooncakeOptions), "lane_bytes": int(options.lane)}
    try:
        return tier.MooncakeTier(tier.MooncakeOptions(**known), name=name)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error


def _known(options: msgspec.Struct, wanted: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the options that both have by the same name."""
    given = msgspec.structs.asdict(options)
    return {name: given[name] for name in wanted.__struct_fields__ if name in given}
