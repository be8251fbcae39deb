"""The disk tier keeps every promise of the tier contract, on a real file."""

import pytest

from holdfast.testing.tier_contract import TierContract
from holdfast.tiers.disk import DiskTier
from holdfast.tiers.disk_file import DiskConfig


class TestDiskTier(TierContract):
    durable = True

    def make_tier(self, folder, capacity_bytes):
        return DiskTier(DiskConfig(path=str(folder), capacity_bytes=capacity_bytes))
