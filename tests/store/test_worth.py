"""Where models share a store, a byte of one may save more than a byte of another."""

import pytest

from holdfast.blocks.world import World
from holdfast.clock import ManualClock
from holdfast.index.residency import Residency
from holdfast.store.judgement import Engine, Judgement, Step
from holdfast.store.worth import Worth


def world(number, payload_bytes):
    return World(bytes([number]) * 16, b"d" * 16, payload_bytes, 64)


@pytest.fixture
def judgement():
    return Judgement(["host"], ManualClock())


@pytest.fixture
def rows():
    index = Residency(1)
    worlds = [world(1, 100_000), world(2, 100_000), world(3, 100_000)]
    return index, [index.add(each, bytes([i]) * 16, b"", 0) for i, each in enumerate(worlds)]


def compute(judgement, number, token_s):
    steps = [Step(new, 0.0, token_s * new) for new in (256.0, 512.0, 1024.0, 2048.0) * 8]
    judgement.computed(Engine("e", (bytes([number]) * 16).hex()), steps)


def test_everything_is_worth_the_same_until_engines_tell(judgement, rows):
    index, (first, second, third) = rows
    worth = Worth(index, judgement)
    worth.learn()
    assert worth(first) == worth(second) == worth(third) == 1.0


def test_a_dearer_token_is_worth_more_a_byte(judgement, rows):
    index, (small, large, silent) = rows
    worth = Worth(index, judgement)
    compute(judgement, 1, 1e-4)
    compute(judgement, 2, 16e-4)
    worth.learn()
    assert worth(large) / worth(small) == pytest.approx(16, rel=0.05)
    assert worth(silent) == 1.0
    assert worth(small) * worth(large) == pytest.approx(1.0)


def test_a_store_weighs_for_a_policy_that_can(rig):
    store = rig().store
    compute(store.judgement, ord("f"), 1e-4)
    store.keep_house()
    assert store.states.eviction._worth is not None


def test_a_world_whose_blocks_have_no_tokens_saves_nothing_and_harms_nobody(judgement):
    index = Residency(1)
    row = index.add(world(1, 100_000)._replace(block_tokens=0), b"k" * 16, b"", 0)
    worth = Worth(index, judgement)
    compute(judgement, 1, 1e-4)
    worth.learn()
    assert worth(row) == 1.0
