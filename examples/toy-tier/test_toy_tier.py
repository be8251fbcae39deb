"""The toy tiers keep every promise of their interfaces."""

import pytest
from holdfast_toy_tier import TOY, SharedToyOptions, ToyOptions, open_shared

from holdfast.config import Size
from holdfast.errors import ConfigError
from holdfast.testing.tier_contract import TierContract
from holdfast.tiers.kind import TierContext


class TestToyTier(TierContract):
    def make_tier(self, folder, capacity_bytes):
        options = ToyOptions(capacity=Size(capacity_bytes))
        return TOY.open(options, TierContext("tiers.1", "toy", 512))


def test_a_capacity_that_holds_nothing_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"tiers\.1\.capacity: 1 KiB is less than 1 MiB"):
        TOY.check(ToyOptions(capacity=Size(1024)), "tiers.1")


def test_stores_with_one_shelf_share_records():
    context = TierContext("tiers.1", "toy_shared", 512)
    one, same = (open_shared(SharedToyOptions(shelf="a"), context) for _ in range(2))
    other = open_shared(SharedToyOptions(shelf="b"), context)
    assert one.records is same.records is not other.records
