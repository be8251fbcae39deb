"""vLLM's encoder-cache connector: `HoldfastEncoderConnector`, named in `--ec-transfer-config`."""

from holdfast.engines.vllm.encoder.connector import HoldfastEncoderConnector

__all__ = ["HoldfastEncoderConnector"]
