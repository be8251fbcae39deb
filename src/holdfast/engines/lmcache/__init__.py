"""The L2 adapter of LMCache's server: `HoldfastL2Adapter`, named by `module_path`."""

from __future__ import annotations

from typing import Any

__all__ = ["HoldfastL2Adapter"]


def __getattr__(name: str) -> Any:
    # Imported when LMCache asks for it, so that options can be checked without LMCache.
    if name == "HoldfastL2Adapter":
        from holdfast.engines.lmcache.adapter import HoldfastL2Adapter

        return HoldfastL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
