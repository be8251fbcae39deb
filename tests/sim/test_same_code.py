"""The simulator uses the decision code of the store: the same objects, imported, not copied."""

from importlib import import_module

import pytest

SHARED = {
    ("holdfast.plan.planner", "BestCut"): ("holdfast.assemble", "holdfast.cli.sim"),
    ("holdfast.plan.planner", "PlanQuestion"): ("holdfast.store.lookup", "holdfast.sim.run"),
    ("holdfast.plan.prestage", "begin_in_s"): ("holdfast.store.hints", "holdfast.sim.run"),
    ("holdfast.plan.prestage", "in_order"): (
        "holdfast.store.pending_hints",
        "holdfast.sim.prestages",
    ),
    ("holdfast.policy.movement", "promotion_targets"): (
        "holdfast.store.movement",
        "holdfast.sim.movement",
    ),
    ("holdfast.policy.movement", "demotion_targets"): (
        "holdfast.store.movement",
        "holdfast.sim.movement",
    ),
    ("holdfast.policy.movement", "takes"): ("holdfast.store.movement", "holdfast.sim.movement"),
    ("holdfast.policy.movement", "takes_fetched"): (
        "holdfast.store.movement",
        "holdfast.sim.movement",
    ),
    ("holdfast.policy.choice", "POLICIES"): ("holdfast.assemble", "holdfast.sim.rules"),
    ("holdfast.index.residency", "Residency"): (
        "holdfast.store.block_table",
        "holdfast.sim.memory",
    ),
}


@pytest.mark.parametrize(("home", "name"), SHARED)
def test_store_and_simulator_use_one_object(home, name):
    one = getattr(import_module(home), name)
    assert [getattr(import_module(user), name) for user in SHARED[home, name]] == [one, one]
