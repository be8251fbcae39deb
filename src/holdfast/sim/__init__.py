"""The simulator: traces, exact capacity curves, and the serving code on a clock turned by hand."""

from holdfast.sim import belady, curve, retention, statistics
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.profile import Profile, load_profile
from holdfast.sim.trace import Trace

__all__ = [
    "ModelShape",
    "Profile",
    "Reading",
    "Trace",
    "belady",
    "curve",
    "load",
    "load_model",
    "load_profile",
    "retention",
    "statistics",
]
