"""The options of one entry of `secondary_tiers` in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.engines.vllm.options import EXTRA_CONFIG, ConnectorSettings, read_options
from holdfast.errors import ConfigError

WHERE = f"{EXTRA_CONFIG}.secondary_tiers"
"""Where vLLM's users write the options; the first part of every error."""

OPTIONS = ("holdfast", "domain", "model_digest", "fixed_adapters", "fixed_uuids")


class TierSettings(NamedTuple):
    """The options resolved.

    `node`: those that the connector has, too. `fixed_adapters`: the files of a LoRA adapter never
    change under one name and path. `fixed_uuids`: no `uuid` that a client gives to an image or
    sound is given to another one.
    """

    node: ConnectorSettings
    fixed_adapters: bool
    fixed_uuids: bool


def read_tier_options(options: Mapping[str, Any]) -> TierSettings:
    """Return the settings of a tier's options; raise ConfigError naming an invalid value.

    `holdfast`: address of a node or path of its YAML file; without it the engine starts a private
    node, which lives as long as the engine. `domain` and `model_digest`: as the connector's.
    `fixed_adapters` and `fixed_uuids`: see `TierSettings`; by default an engine with LoRA, or one
    that takes images or sounds, uses no tier.
    """
    for key in options:
        if key not in OPTIONS:
            raise ConfigError(f"{WHERE}: {key} is unknown; known are {', '.join(OPTIONS)}")
    fixed = {name: options.get(name, False) for name in ("fixed_adapters", "fixed_uuids")}
    for name, value in fixed.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{WHERE}: {name} is {value!r}; write true or false")
    rest = {key: value for key, value in options.items() if key not in fixed}
    try:
        return TierSettings(read_options(rest), **fixed)
    except ConfigError as error:
        raise ConfigError(str(error).replace(EXTRA_CONFIG, WHERE, 1)) from error
