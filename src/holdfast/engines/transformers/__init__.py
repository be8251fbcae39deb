"""Hugging Face transformers: `holdfast.transformers.cache(model, ids, store)`."""

from holdfast.engines.transformers.prompt_cache import (
    Prefix,
    PromptCache,
    StaticPromptCache,
    cache,
    save,
)

__all__ = ["Prefix", "PromptCache", "StaticPromptCache", "cache", "save"]
