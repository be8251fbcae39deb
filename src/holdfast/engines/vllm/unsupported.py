"""The error for a model or setting of vLLM that is not cached: the connector is passive then."""

from __future__ import annotations

from holdfast.errors import HoldfastError


class UnsupportedError(HoldfastError):
    """The model or setting is not supported; the message states which and a remedy."""
