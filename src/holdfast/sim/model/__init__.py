"""Model arithmetic: KV bytes per token and per sequence, and prefill FLOP, from a config.json."""

from holdfast.sim.model.catalogue import known_models, load_model, read_model
from holdfast.sim.model.shape import DTYPE_BYTES, Attention, ModelShape, dtype_bytes

__all__ = [
    "DTYPE_BYTES",
    "Attention",
    "ModelShape",
    "dtype_bytes",
    "known_models",
    "load_model",
    "read_model",
]
