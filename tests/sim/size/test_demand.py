"""The hits of a load, against the curve of its trace and by hand; loads that make no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.sim.curve import curve
from holdfast.sim.size import of_trace, of_users


def test_users_who_are_alike_hit_in_proportion_to_the_space():
    demand = of_users(1000, 10_000, 500, 60.0)
    assert demand.unique_tokens == 1000 * 10_000
    for share in (0.0, 0.25, 0.5, 1.0):
        hit = demand.held(share * demand.unique_tokens).sum() / demand.input_tokens.sum()
        assert hit == pytest.approx(share * 0.95, abs=0.002)


@given(st.data())
def test_a_traces_hits_are_those_of_its_curve(any_trace, data):
    trace = data.draw(any_trace)
    if not trace.blocks:
        return
    exact, demand = curve(trace), of_trace(trace)
    for blocks in range(trace.unique + 1):
        held = demand.held(blocks * trace.block_tokens).sum()
        # At least one token of a request is computed, which the curve does not ask for.
        assert exact.hit_tokens[blocks] - trace.requests <= held <= exact.hit_tokens[blocks]


def test_some_requests_stand_for_all_of_a_real_trace(shipped):
    demand = of_trace(shipped("conversation"))
    some = demand.thinned()
    assert len(some.input_tokens) == 2000
    for blocks, hit in ((10_000, 0.216), (50_000, 0.362)):
        for load in (demand, some):
            held = load.held(blocks * 512.0).sum() / load.input_tokens.sum()
            assert held == pytest.approx(hit, abs=0.03 if load is some else 0.002)
    assert demand.peak == pytest.approx(1.2, abs=0.05)
    assert some.thinned() is some


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ((0, 10, 1, 1.0), "--users: 0"),
        ((1, 10, 11, 1.0), "--new: 11: give 1 to the context of 10"),
        ((1, 10, 0, 1.0), "--new: 0"),
        ((1, 0, 1, 1.0), "--context: 0: give 1 to 2,147,483,648 tokens"),
        ((1, 10, 1, 0.0), "--every: 0"),
        ((1, 10, 1, 1e-300), "--every: 1e-300: give 0.001 to"),
        ((1, 10, 1, float("nan")), "--every: nan"),
        ((1, 10, 1, float("inf")), "--every: inf"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(load, message):
    with pytest.raises(ConfigError, match=message):
        of_users(*load)


def test_a_trace_can_come_at_another_rate(made):
    trace = made([[1, 2], [1, 2], [1, 3]], [0, 0, 0], [0, 1, 1])
    assert of_trace(trace).requests_per_s == pytest.approx(1.5)
    faster = of_trace(trace, 20.0)
    assert (faster.requests_per_s, faster.peak) == (20.0, of_trace(trace).peak)
    for rate in (0.0, 1e300, float("nan")):
        with pytest.raises(ConfigError, match=r"--rate: .*: give 1e-09 to 1e\+09 requests"):
            of_trace(trace, rate)


def test_a_trace_may_be_as_long_as_its_times(made):
    trace = made([[1, 2], [1, 2]], [0, 0], [0, 10**12])
    assert of_trace(trace).requests_per_s == pytest.approx(2e-12)


def test_a_trace_without_ids_can_not_be_sized(made):
    trace = made([[], []], [0, 0], [0, 1])
    with pytest.raises(ConfigError, match="no block ids"):
        of_trace(trace)
