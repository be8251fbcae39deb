"""The connector of vLLM: `HoldfastConnector`, named in `--kv-transfer-config`."""

from __future__ import annotations

from typing import Any

from holdfast.engines.vllm.interface import check_connector

__all__ = ["HoldfastConnector"]


def __getattr__(name: str) -> Any:
    # Checked when vLLM asks for the class: another interface may fail the import of its module.
    if name == "HoldfastConnector":
        check_connector()
        from holdfast.engines.vllm.connector import HoldfastConnector

        return HoldfastConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
