"""The L2 adapter of LMCache's server: `HoldfastL2Adapter`, named by `module_path`."""

from holdfast.engines.lmcache.adapter import HoldfastL2Adapter

__all__ = ["HoldfastL2Adapter"]
