"""Where models share a store, a byte of one may save more than a byte of another."""

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.index.residency import Residency
from holdfast.policy.cost_aware import CostAware
from holdfast.store.block_value import BlockValue
from holdfast.store.estimates import EngineId, EngineStep, Estimates


def namespace(number, raw_bytes):
    return Namespace(bytes([number]) * 16, b"d" * 16, raw_bytes, 64)


@pytest.fixture
def estimates():
    return Estimates(["host"], ManualClock())


@pytest.fixture
def rows():
    index = Residency(1)
    namespaces = [namespace(1, 100_000), namespace(2, 100_000), namespace(3, 100_000)]
    return index, [index.add(each, bytes([i]) * 16, b"", 0) for i, each in enumerate(namespaces)]


def compute(estimates, number, token_s):
    steps = [EngineStep(new, 0.0, token_s * new) for new in (256.0, 512.0, 1024.0, 2048.0) * 8]
    estimates.computed(EngineId("e", (bytes([number]) * 16).hex()), steps)


def test_all_blocks_have_the_same_value_until_engines_report_prefill_times(estimates, rows):
    index, (first, second, third) = rows
    worth = BlockValue(index, estimates)
    worth.learn()
    assert worth(first) == worth(second) == worth(third) == 1.0


def test_a_block_of_a_slower_model_has_a_higher_value_per_byte(estimates, rows):
    index, (small, large, silent) = rows
    worth = BlockValue(index, estimates)
    compute(estimates, 1, 1e-4)
    compute(estimates, 2, 16e-4)
    worth.learn()
    assert worth(large) / worth(small) == pytest.approx(16, rel=0.05)
    assert worth(silent) == 1.0
    assert worth(small) * worth(large) == pytest.approx(1.0)


class WeighingPolicy(CostAware):
    """Notes the function that tells a block's worth."""

    def weigh_by(self, worth):
        self.told = worth
        super().weigh_by(worth)


def test_a_store_passes_block_values_to_a_policy_that_uses_them(harness):
    policy = WeighingPolicy()
    one = harness(make_eviction=lambda: policy)
    one.save(one.chain(1, 1))
    compute(one.store.estimates, ord("f"), 1e-4)
    one.store.housekeep()
    assert policy.told(0) > 0


def test_a_namespace_with_zero_tokens_per_block_has_the_mean_block_value(estimates):
    index = Residency(1)
    row = index.add(namespace(1, 100_000)._replace(block_tokens=0), b"k" * 16, b"", 0)
    worth = BlockValue(index, estimates)
    compute(estimates, 1, 1e-4)
    worth.learn()
    assert worth(row) == 1.0
