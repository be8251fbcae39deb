"""Rules of movement: which tiers are offered what another one evicts, or what is fetched."""

import pytest

from holdfast.policy.movement import (
    Intake,
    counts_uses,
    demotion_targets,
    promotion_targets,
    takes,
    takes_fetched,
)

ON_EVICTION = Intake(saves=False)


def test_what_a_tier_evicts_moves_only_to_slower_tiers():
    intakes = {1: Intake(), 2: Intake(evicted="never"), 3: Intake(), 4: ON_EVICTION}
    assert demotion_targets(1, intakes) == (3, 4)
    assert demotion_targets(4, intakes) == ()


def test_what_is_fetched_moves_only_to_faster_tiers():
    intakes = {1: Intake(), 2: Intake(fetched="never"), 3: Intake(), 4: ON_EVICTION}
    assert promotion_targets(4, intakes, ()) == (1, 3)
    assert promotion_targets(1, intakes, ()) == ()


def test_volatile_memory_is_offered_all_that_is_fetched():
    assert promotion_targets(2, {1: Intake(fetched="never"), 2: Intake()}, {1}) == (1,)
    assert takes_fetched(Intake(fetched="never"), 0, is_volatile=True)


def test_what_volatile_memory_had_is_offered_again_to_tiers_that_get_saves():
    intakes = {1: Intake(), 2: Intake(fetched="never"), 3: ON_EVICTION}
    assert promotion_targets(1, intakes, {1}) == (2,)


@pytest.mark.parametrize(
    ("take", "uses", "is_durable", "taken"),
    [
        ("never", 9, True, False),
        ("reused", 1, False, False),
        ("reused", 1, True, True),
        ("reused", 2, False, True),
        ("always", 0, False, True),
    ],
)
def test_a_tier_takes_blocks_by_their_uses(take, uses, is_durable, taken):
    assert takes(take, uses, is_durable=is_durable) is taken
    intake = Intake(fetched=take)
    assert takes_fetched(intake, uses, is_volatile=False, is_durable=is_durable) is taken


def test_uses_count_only_where_a_tier_could_take_a_block_for_them():
    assert not counts_uses({})
    assert not counts_uses({1: Intake()})
    assert counts_uses({1: Intake(), 2: Intake()})
    assert not counts_uses({1: Intake("never", "never", "never"), 2: Intake(evicted="always")})
