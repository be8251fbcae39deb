"""All eviction policies by name, for configurations, simulations and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.policy.base import EvictionPolicy
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.leaf import LeafLru
from holdfast.policy.lirs import Lirs
from holdfast.policy.s3fifo import S3Fifo

BASELINE = "leaf_lru"
DEFAULT = "cost_aware"

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    BASELINE: LeafLru,
    DEFAULT: CostAware,
    "s3fifo": S3Fifo,
    "lirs": Lirs,
}
