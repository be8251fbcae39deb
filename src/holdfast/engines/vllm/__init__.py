"""The connector of vLLM: `HoldfastConnector`, named in `--kv-transfer-config`."""

from holdfast.engines.vllm.connector import HoldfastConnector

__all__ = ["HoldfastConnector"]
