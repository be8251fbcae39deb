"""The options of the encoder connector, in vLLM's `ec_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engines.vllm.options import EXTRA_CONFIG, ConnectorSettings, read_options
from holdfast.errors import ConfigError

WHERE = "ec_connector_extra_config"
"""Where vLLM's users write the options; the first part of every error."""

OPTIONS = ("holdfast", "domain", "model_digest")


def read_encoder_options(options: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings of the options; raise ConfigError naming an invalid value.

    `holdfast`, `domain` and `model_digest` are as the connector's; without `holdfast` the engine
    starts a private node for its encoder outputs.
    """
    for key in options:
        if key not in OPTIONS:
            raise ConfigError(f"{WHERE}.{key} is unknown; known are {', '.join(OPTIONS)}")
    try:
        return read_options(options)
    except ConfigError as error:
        raise ConfigError(str(error).replace(EXTRA_CONFIG, WHERE, 1)) from error
