"""What a store counts of its own work equals an independent count."""

import numpy as np
import pytest

import holdfast
from holdfast.clock import ManualClock
from holdfast.errors import NotFollowed, Outcome
from holdfast.plan.planner import Plan
from holdfast.status import HistogramStatus
from holdfast.store.activity import Activity, Histogram, PromptCounts
from holdfast.store.estimates import EngineId
from holdfast.store.plan_log import PlanEnding, PlanLog, PlanRecord
from holdfast.testing.embedded import fingerprint_for

LAYOUT = holdfast.Layout.portable(
    layers=1, kv_heads=1, head_size=16, dtype="float16", block_tokens=16
)
FINGERPRINT = fingerprint_for(LAYOUT)


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.status() == HistogramStatus([1.0, 2.0], [2, 2, 1], 8.0)


def test_each_token_is_counted_as_the_engines_own_loaded_or_computed():
    activity = Activity()
    activity.prompt(PromptCounts(100, 16, {"host": 32, "disk": 16}))
    activity.prompt(PromptCounts(50, 0, {}))
    told = activity.status()
    assert (told.prompts, told.tokens, told.engine_tokens) == (2, 150, 16)
    assert told.loaded_tokens == {"host": 32, "disk": 16}
    assert told.computed_tokens == 150 - 16 - 48


def test_calls_are_counted_by_outcome_and_bucket():
    activity = Activity()
    activity.call("fetch", Outcome.OK, 0.002, 3)
    activity.call("fetch", Outcome.LATE, 100.0, 1)
    told = activity.status()
    assert told.calls == {"fetch": {"ok": 1, "late": 1}}
    assert told.blocks == {"fetch": 4}
    counts = told.seconds["fetch"].counts
    assert (counts[2], counts[-1], sum(counts)) == (1, 1, 2)


@pytest.fixture
def planned():
    """A log of plans with its counters, and a function that adds a plan to fetch."""
    activity = Activity()
    log, engine = PlanLog(ManualClock(), activity), EngineId("engine", "f0")

    def plan(blocks=4):
        fetch = Plan(blocks, 0.1, 0.2, 0.9, 1.0, "why")
        return log.add(PlanRecord(engine, 512, 0, 4, fetch, 1_000))

    return log, engine, activity, plan


def test_a_followed_plan_saves_the_difference_to_the_recompute_time(planned):
    log, engine, activity, plan = planned
    number = plan()
    log.fetched(engine, number, 4, 0.1, "ok")
    for _ in range(2):  # it is told once for every rank
        log.ended(engine, PlanEnding(number, 0.1, 0.3))
    told = activity.status()
    assert told.plans == {"followed": 1}
    assert told.saved_s == pytest.approx(0.9 - 0.3)
    assert told.plan_error.sum == pytest.approx(abs(0.3 / 0.2 - 1))


def test_a_plan_that_was_not_followed_or_fetches_nothing_saves_nothing(planned):
    log, engine, activity, plan = planned
    log.not_followed(engine, plan(), NotFollowed.HAD, 0.1)
    log.ended(engine, PlanEnding(plan(blocks=0), 0.0, 0.8))
    told = activity.status()
    assert (told.plans, told.saved_s) == ({"engine_had_it": 1}, 0.0)


def test_a_session_counts_lookups_fetches_saves_and_prompts():
    with holdfast.open(host="16 MiB") as store:
        session = store.session(FINGERPRINT)
        size = LAYOUT.block_tokens
        tokens = list(range(3 * size + 1))
        blocks = np.arange(3 * session.namespace.raw_bytes, dtype="u4").astype("u1").reshape(3, -1)
        session.save(tokens, blocks)
        assert session.cover(tokens) == 3 * size
        assert session.fetch(tokens, np.empty_like(blocks)).blocks == 3
        assert session.fetch(list(range(7, 7 + size)), np.empty_like(blocks[:1])).blocks == 0
        told = store.status().activity
    assert told.calls == {
        "reserve": {"ok": 1},
        "save": {"ok": 1},
        "lookup": {"ok": 2, "miss": 1},
        "fetch": {"ok": 1, "miss": 1},
    }
    assert told.blocks == {"reserve": 3, "save": 3, "lookup": 6, "fetch": 3}
    assert (told.prompts, told.tokens) == (2, 4 * size)
    assert told.loaded_tokens == {"host": 3 * size}
    assert told.computed_tokens == size
