"""Stores of other makes from their configuration, as shared tiers."""

from __future__ import annotations

import msgspec

from holdfast.config import ValkeyOptions
from holdfast.errors import ConfigError
from holdfast.tiers.valkey.tier import ValkeyOptions as TierOptions
from holdfast.tiers.valkey.tier import ValkeyTier, ValkeyTls


def open_valkey(options: ValkeyOptions, at: str, name: str) -> ValkeyTier:
    """Open the tier, whether or not a server answers; `at` is the tier's key path."""
    tls = ValkeyTls(options.tls_ca, options.tls_cert, options.tls_key) if options.tls_ca else None
    known = {
        field: value
        for field, value in msgspec.structs.asdict(options).items()
        if field in TierOptions.__struct_fields__
    }
    try:
        return ValkeyTier(
            TierOptions(addresses=tuple(options.addresses), tls=tls, **known), name=name
        )
    except ConfigError as error:
        raise ConfigError(f"{at}.{error}") from error
