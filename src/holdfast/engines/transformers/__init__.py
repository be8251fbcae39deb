"""Hugging Face transformers: `holdfast.transformers.cache(model, ids, store)`."""

from holdfast.engines.transformers.interface import check_interface

check_interface()  # before the imports below, which another interface may fail

from holdfast.engines.transformers.prompt_cache import (  # noqa: E402
    Prefix,
    PromptCache,
    StaticPromptCache,
    cache,
    save,
)

__all__ = ["Prefix", "PromptCache", "StaticPromptCache", "cache", "save"]
