"""The caches of Hugging Face transformers that `holdfast.transformers` was written for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version

from holdfast.engines.interface import ExpectedClass, check_version, differences_of

TESTED = ("5.19", "5.20")
"""Versions of transformers, up to their second number."""

_KEYS = ("key_states", "value_states")

CACHE = ExpectedClass(attributes=("layers", "update", "get_seq_length"))
DYNAMIC = ExpectedClass(
    methods={"lazy_initialization": _KEYS, "get_seq_length": ()},
    attributes=("keys", "values", "update"),
)
WINDOW = ExpectedClass(
    methods={"activate_past_recording": (), "crop": ("tokens_to_remove",)},
    attributes=("sliding_window", "cumulative_length", "record_past", "update"),
)
RECURRENT = ExpectedClass(
    attributes=(
        *("conv_states", "recurrent_states", "has_previous_state"),
        *("update_conv_state", "update_recurrent_state"),
    )
)
STATIC_WINDOW = ExpectedClass(attributes=("cumulative_length_int", "max_cache_len", "update"))

_CACHES = "transformers.cache_utils"

INTERFACE: Mapping[str, ExpectedClass] = {
    f"{_CACHES}.Cache": CACHE,
    f"{_CACHES}.DynamicCache": CACHE,
    f"{_CACHES}.StaticCache": CACHE,
    f"{_CACHES}.DynamicLayer": DYNAMIC,
    f"{_CACHES}.DynamicSlidingWindowLayer": WINDOW,
    f"{_CACHES}.LinearAttentionLayer": RECURRENT,
    f"{_CACHES}.LinearAttentionAndFullAttentionLayer": RECURRENT,
    f"{_CACHES}.LinearAttentionAndSlidingWindowAttentionLayer": RECURRENT,
    f"{_CACHES}.StaticSlidingWindowLayer": STATIC_WINDOW,
}
"""What the binding uses of transformers."""

_log = logging.getLogger("holdfast.transformers")


def check_interface() -> None:
    """Raise InterfaceError if the installed transformers has other caches."""
    installed = version("transformers")
    check_version("transformers", installed, TESTED, differences_of(INTERFACE), _log)
