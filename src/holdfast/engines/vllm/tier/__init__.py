"""The secondary tier of vLLM's own offloading: `HoldfastTier`, named by `module_path`."""

from holdfast.engines.vllm.tier.tier import HoldfastTier

__all__ = ["HoldfastTier"]
