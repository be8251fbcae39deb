"""The secondary tier of vLLM's own offloading: `HoldfastTier`, named by `module_path`."""

from __future__ import annotations

from typing import Any

from holdfast.engines.vllm.tier.interface import check_interface

__all__ = ["HoldfastTier"]


def __getattr__(name: str) -> Any:
    # Checked when vLLM asks for the class: another interface may fail the import of its module.
    if name == "HoldfastTier":
        check_interface()
        from holdfast.engines.vllm.tier.tier import HoldfastTier

        return HoldfastTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
