"""Replays are true to what is known of public traces, and to the exact curve on any trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.base import NEVER
from holdfast.policy.cost_aware import CostAware
from holdfast.policy.leaf import LeafLru
from holdfast.policy.lirs import Lirs
from holdfast.policy.s3fifo import S3Fifo
from holdfast.sim.belady import belady
from holdfast.sim.curve import curve
from holdfast.sim.replay import Hits, replay, returns
from holdfast.sim.trace import Requests, Trace, arrange

POLICIES = [LeafLru, CostAware, S3Fifo, Lirs]


@pytest.mark.parametrize("policy", [LeafLru, CostAware])
@pytest.mark.parametrize(
    ("trace", "blocks", "hit"),
    [
        ("conversation", 5_860, 0.1388),
        ("taubench_gpt4o", 30, 0.6114),
        ("taubench_gpt4o", 60, 0.8587),
    ],
)
def test_leaf_first_lru_has_the_hit_ratios_of_independent_computations(
    shipped, policy, trace, blocks, hit
):
    assert replay(shipped(trace), blocks, policy()).token_hit == pytest.approx(hit, abs=5e-4)


def test_lirs_and_s3fifo_have_the_hit_ratios_of_libcachesim(shipped):
    """libCacheSim 0.3.5 (object hits, not leaf-first): LIRS .160, S3-FIFO .158."""
    trace = shipped("conversation")
    assert replay(trace, 5_860, Lirs(), run_blocks=1).block_hit == pytest.approx(0.160, abs=0.005)
    assert replay(trace, 5_860, S3Fifo(), run_blocks=1).block_hit == pytest.approx(
        0.158, abs=0.0075
    )


@pytest.mark.parametrize("policy", [LeafLru, CostAware])
@given(data=st.data(), capacity=st.integers(1, 20), run_blocks=st.sampled_from([1, 2, 99]))
def test_lru_equals_the_exact_curve(any_trace, policy, data, capacity, run_blocks):
    trace = data.draw(any_trace)
    exact = curve(trace)
    hits = replay(trace, capacity, policy(), run_blocks=run_blocks)
    assert hits.token_hit == exact.token_hit(capacity)
    assert hits.block_hit == exact.block_hit(capacity)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data(), capacity=st.integers(1, 20))
def test_no_policy_hits_more_than_an_unbounded_store(any_trace, policy, data, capacity):
    trace = data.draw(any_trace)
    hits = replay(trace, capacity, policy(), np.full(trace.requests, NEVER))
    assert hits.hit_blocks <= belady(trace, [trace.unique])[0].block_hit * trace.blocks + 1e-9
    assert replay(trace, trace.unique + 1, policy()).block_hit == pytest.approx(
        belady(trace, [trace.unique])[0].block_hit
    )


def agents(sessions: int = 60, turns: int = 20) -> Trace:
    """Sessions of growing contexts with short and long pauses, started one after another."""
    random = np.random.default_rng(7)
    chains, times, session = [], [], []
    for number in range(sessions):
        now_s, blocks = float(random.uniform(0, 4_000)), 10
        for _ in range(turns):
            chains.append(np.arange(blocks) + 1_000 * number)
            times.append(now_s)
            session.append(number)
            blocks += int(random.integers(1, 8))
            now_s += float(random.choice([5.0, 20.0, 300.0], p=[0.6, 0.3, 0.1]))
    counts = np.array([len(chain) for chain in chains])
    columns = np.array(times), counts * 4, counts * 0, np.array(session, np.int32)
    requests = Requests(*columns, np.full(len(counts), np.nan))
    return arrange("agents", 4, requests, counts, np.concatenate(chains))


def test_hints_close_at_least_half_of_the_gap_to_the_oracle():
    trace = agents()
    hints = returns(trace)
    for capacity in (200, 400):
        bound = belady(trace, [capacity])[0].token_hit
        plain = replay(trace, capacity, CostAware()).token_hit
        hinted = replay(trace, capacity, CostAware(), hints).token_hit
        assert bound - plain > 0.05, "a gap worth closing"
        assert (hinted - plain) / (bound - plain) >= 0.5


def test_returns_are_the_next_use_of_a_sessions_own_chain(made):
    trace = made([[0], [5], [0, 1], [], [5, 6], [0]], [0] * 6, [0, 1, 1, 1, 1, 1])
    trace = trace._replace(session=np.array([0, 0, 0, 0, 0, 1], np.int32))
    assert returns(trace).tolist() == pytest.approx(
        [2, 4, NEVER, np.nan, NEVER, NEVER], nan_ok=True
    )
    assert np.isnan(returns(made([[0]], [0], [0]))).all()


def test_a_capacity_of_zero_blocks_is_refused(made):
    with pytest.raises(ValueError, match="capacity_blocks: 0: give 1 or more"):
        replay(made([[0]], [0], [0]), 0, LeafLru())


def test_a_trace_without_blocks_has_no_hits(made):
    assert replay(made([[]], [0], [0]), 1, LeafLru()) == Hits(0, 0, 0, 0)
    assert Hits(0, 0, 0, 0).token_hit == Hits(0, 0, 0, 0).block_hit == 0.0
