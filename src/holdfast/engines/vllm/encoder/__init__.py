"""vLLM's encoder-cache connector: `HoldfastEncoderConnector`, named in `--ec-transfer-config`."""

from __future__ import annotations

from typing import Any

from holdfast.engines.vllm.interface import check_encoder_connector

__all__ = ["HoldfastEncoderConnector"]


def __getattr__(name: str) -> Any:
    # Checked when vLLM asks for the class: another interface may fail the import of its module.
    if name == "HoldfastEncoderConnector":
        check_encoder_connector()
        from holdfast.engines.vllm.encoder.connector import HoldfastEncoderConnector

        return HoldfastEncoderConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
