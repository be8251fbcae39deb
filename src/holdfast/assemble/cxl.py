"""CXL memory from its configuration."""

from __future__ import annotations

from holdfast.config import CxlOptions
from holdfast.tiers.cxl.medium import ANY_NODE, CxlConfig
from holdfast.tiers.cxl.tier import CxlTier


def cxl_memory(options: CxlOptions, at: str, name: str) -> CxlConfig:
    """Return where the memory is; `at` is the tier's key path."""
    node = options.node if isinstance(options.node, int) else ANY_NODE
    return CxlConfig(options.capacity, node, options.device, setting=at, name=name)


def open_cxl(options: CxlOptions, at: str, name: str) -> CxlTier:
    """Take the memory. Raises ConfigError where it is not there or not enough."""
    return CxlTier(cxl_memory(options, at, name))
