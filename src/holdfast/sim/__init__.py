"""The simulator: traces, exact capacity curves, and the serving code on a clock turned by hand."""

from holdfast.sim.trace import Trace

__all__ = ["Trace"]
