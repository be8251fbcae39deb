"""Reuse of blocks in a trace: the code that a node uses for its recent requests (`plan.reuse`)."""

from holdfast.plan.reuse import Reuse, reuse

__all__ = ["Reuse", "reuse"]
