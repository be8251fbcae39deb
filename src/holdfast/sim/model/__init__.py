"""Model arithmetic: from a config.json to bytes per token, bytes per sequence and prefill FLOP."""

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
