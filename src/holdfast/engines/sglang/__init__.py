"""The storage backend of SGLang's hierarchical cache: `HoldfastStorage`, for `dynamic`."""

from typing import Any

__all__ = ["HoldfastStorage"]


def __getattr__(name: str) -> Any:
    if name != "HoldfastStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.engines.sglang.storage import HoldfastStorage  # imports SGLang

    return HoldfastStorage
