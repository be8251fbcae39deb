"""A shared, tiered memory for the KV caches of LLM inference."""

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.version import __version__ as __version__  # exported, not used

if TYPE_CHECKING:
    from holdfast.blocks.fingerprint import Fingerprint, KvGroup, Meaning
    from holdfast.blocks.layout import (
        ExactLayout,
        HeadState,
        LatentState,
        Layout,
        LayoutSlice,
        PortableLayout,
        RankSlice,
    )
    from holdfast.client.engine import EngineGroup, GroupPages, LookupOptions
    from holdfast.client.engine_opening import open_engine
    from holdfast.client.local_model import portable_fingerprint
    from holdfast.client.opening import open_store as open  # noqa: A004  # as gzip.open
    from holdfast.client.session import NodeStore
    from holdfast.config import Config, load
    from holdfast.devices.context_tensors import blocks_to_tensors, tensors_to_blocks
    from holdfast.engines import transformers
    from holdfast.errors import HoldfastError, Outcome
    from holdfast.policy.retention import Retention
    from holdfast.session import KeyPage, Landed, Session
    from holdfast.store.store import Store


__all__ = [
    "Config",
    "EngineGroup",
    "ExactLayout",
    "Fingerprint",
    "GroupPages",
    "HeadState",
    "HoldfastError",
    "KeyPage",
    "KvGroup",
    "Landed",
    "LatentState",
    "Layout",
    "LayoutSlice",
    "LookupOptions",
    "Meaning",
    "NodeStore",
    "Outcome",
    "PortableLayout",
    "RankSlice",
    "Retention",
    "Session",
    "Store",
    "blocks_to_tensors",
    "load",
    "open",
    "open_engine",
    "portable_fingerprint",
    "tensors_to_blocks",
    "transformers",
]

_HOMES = {
    "Config": "holdfast.config",
    "EngineGroup": "holdfast.client.engine",
    "ExactLayout": "holdfast.blocks.layout",
    "Fingerprint": "holdfast.blocks.fingerprint",
    "GroupPages": "holdfast.client.engine",
    "HeadState": "holdfast.blocks.layout",
    "HoldfastError": "holdfast.errors",
    "KvGroup": "holdfast.blocks.fingerprint",
    "KeyPage": "holdfast.session",
    "Landed": "holdfast.session",
    "LatentState": "holdfast.blocks.layout",
    "Layout": "holdfast.blocks.layout",
    "LayoutSlice": "holdfast.blocks.layout",
    "LookupOptions": "holdfast.client.engine",
    "Meaning": "holdfast.blocks.fingerprint",
    "NodeStore": "holdfast.client.session",
    "Outcome": "holdfast.errors",
    "PortableLayout": "holdfast.blocks.layout",
    "RankSlice": "holdfast.blocks.layout",
    "Retention": "holdfast.policy.retention",
    "Session": "holdfast.session",
    "Store": "holdfast.store.store",
    "blocks_to_tensors": "holdfast.devices.context_tensors",
    "load": "holdfast.config",
    "open": "holdfast.client.opening",
    "open_engine": "holdfast.client.engine_opening",
    "portable_fingerprint": "holdfast.client.local_model",
    "tensors_to_blocks": "holdfast.devices.context_tensors",
    "transformers": "holdfast.engines.transformers",
}
"""Module of each public name, imported at the name's first use: `import holdfast` is fast."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name == "transformers":
        return import_module(home)
    return getattr(import_module(home), "open_store" if name == "open" else name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
