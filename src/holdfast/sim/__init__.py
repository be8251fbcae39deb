"""The simulator: traces, exact capacity curves, and the serving code on a virtual clock."""

from holdfast.sim import belady, curve, retention, statistics
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.trace import Trace

__all__ = [
    "Reading",
    "Trace",
    "belady",
    "curve",
    "load",
    "retention",
    "statistics",
]
