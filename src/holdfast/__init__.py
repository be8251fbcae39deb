"""A shared, tiered memory for the KV caches of LLM inference."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.assemble import open_here as open  # noqa: A004  # as gzip.open
    from holdfast.blocks.fingerprint import Fingerprint
    from holdfast.blocks.layout import Layout, Slice
    from holdfast.config import Config, load
    from holdfast.errors import HoldfastError, Outcome
    from holdfast.store.session import Landed, Session
    from holdfast.store.store import Store

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Fingerprint",
    "HoldfastError",
    "Landed",
    "Layout",
    "Outcome",
    "Session",
    "Slice",
    "Store",
    "load",
    "open",
]

_HOMES = {
    "Config": "holdfast.config",
    "Fingerprint": "holdfast.blocks.fingerprint",
    "HoldfastError": "holdfast.errors",
    "Landed": "holdfast.store.session",
    "Layout": "holdfast.blocks.layout",
    "Outcome": "holdfast.errors",
    "Session": "holdfast.store.session",
    "Slice": "holdfast.blocks.layout",
    "Store": "holdfast.store.store",
    "load": "holdfast.config",
    "open": "holdfast.assemble",
}
"""Where each public name lives; loaded at its first use, so that importing holdfast is cheap."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(home), "open_here" if name == "open" else name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
