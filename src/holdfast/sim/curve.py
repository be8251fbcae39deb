"""The exact hit curve of an LRU store for a trace: the code of the live curve (`plan.curve`)."""

from holdfast.plan.curve import HitCurve, ReuseOrder, curve

__all__ = ["HitCurve", "ReuseOrder", "curve"]
