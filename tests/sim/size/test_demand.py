"""The hits of a load, against the curve of its trace and by hand; loads that make no sense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.sim.curve import curve
from holdfast.sim.formats.load import load
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.size.demand import Cut, of_trace, of_users


def test_hits_of_identical_users_are_proportional_to_capacity():
    demand = of_users(1000, 10_000, 500, 60.0)
    assert demand.unique_tokens == 1000 * 10_000
    for share in (0.0, 0.25, 0.5, 1.0):
        hit = demand.held(share * demand.unique_tokens).sum() / demand.input_tokens.sum()
        assert hit == pytest.approx(share * 0.95, abs=0.002)


@given(st.data())
def test_the_hits_of_a_trace_match_its_exact_curve(any_trace, data):
    trace = data.draw(any_trace)
    if not trace.blocks:
        return
    exact, demand = curve(trace), of_trace(trace)
    for blocks in range(trace.unique + 1):
        held = demand.held(blocks * trace.block_tokens).sum()
        # At least one token of a request is computed, which the curve does not ask for.
        assert exact.hit_tokens[blocks] - trace.requests <= held <= exact.hit_tokens[blocks]


def test_a_sample_of_requests_has_the_hit_ratios_of_the_whole_trace(shipped):
    demand = of_trace(shipped("conversation"))
    some = demand.sampled()
    assert len(some.input_tokens) == 2000
    for blocks, hit in ((10_000, 0.216), (50_000, 0.362)):
        for asked_of in (demand, some):
            held = asked_of.held(blocks * 512.0).sum() / asked_of.input_tokens.sum()
            assert held == pytest.approx(hit, abs=0.03 if asked_of is some else 0.002)
    assert demand.peak == pytest.approx(1.2, abs=0.05)
    assert some.sampled() is some


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


def test_a_trace_may_span_very_long_times(made):
    trace = made([[1, 2], [1, 2]], [0, 0], [0, 10**12])
    assert of_trace(trace).requests_per_s == pytest.approx(2e-12)


def test_a_trace_without_ids_can_not_be_sized(made):
    trace = made([[], []], [0, 0], [0, 1])
    with pytest.raises(ConfigError, match="no block ids"):
        of_trace(trace)


def hits_at_ends(trace, blocks):
    """Tokens of each request that an LRU store of so many blocks serves up to an earlier end."""
    recent, ended, hits = [], set(), []
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        chain = trace.chain(request).tolist()
        held = set(recent[:blocks])
        depth = 0
        for at, block in enumerate(chain):
            if block not in held:
                break
            depth = at + 1 if block in ended else depth
        hits.append(max(0, min(depth * trace.block_tokens, tokens - 1)))
        recent = chain + [block for block in recent if block not in chain]
        full = min(tokens // trace.block_tokens, len(chain))
        ended |= set(chain[full - 1 : full])
    return hits


@given(st.data())
def test_a_context_stored_at_its_end_only_hits_up_to_that_end(any_trace, data):
    trace = data.draw(any_trace)
    if not trace.blocks:
        return
    demand = of_trace(trace, cut=Cut.END)
    for blocks in range(trace.unique + 1):
        held = demand.held(blocks * trace.block_tokens)
        assert held.tolist() == hits_at_ends(trace, blocks)


def test_a_branch_inside_a_context_misses_if_contexts_are_cut_at_ends_only(made):
    branches = made([[1, 2, 3], [1, 2, 4], [1, 2, 4, 5]], [0, 0, 0], [0, 1, 1])
    assert of_trace(branches).held(1e9).tolist() == [0, 8, 12]
    demand = of_trace(branches, cut=Cut.END)
    assert demand.held(1e9).tolist() == [0, 0, 12]
    assert demand.held(11).tolist() == [0, 0, 0]  # all of it, or nothing
    assert demand.checkpoints == 3
    assert not of_trace(made([[1], [2]], [0, 0], [0, 1]), cut=Cut.END).held(1e9).any()


def test_a_half_held_context_misses_if_it_can_be_cut_at_its_end_only():
    demand = of_users(4, 1000, 100, 60.0, Cut.END)
    assert demand.held(1500).tolist() == [900, 0, 0, 0]
    assert of_users(4, 1000, 100, 60.0).held(1500).tolist() == [900, 500, 0, 0]


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        ("Llama-3.1-8B", Cut.BLOCK),
        ("DeepSeek-V3", Cut.BLOCK),
        ("gpt-oss-120b", Cut.END),
        ("Qwen3.5", Cut.END),
    ],
)
def test_windows_and_states_are_kept_at_ends_only(model, cut):
    assert Cut.of(load_model(model)) is cut


def test_the_description_of_a_demand_states_the_requested_rate(made):
    trace = made([[1, 2], [1, 2], [1, 3]], [0, 0, 0], [0, 1, 1])
    assert of_trace(trace, 20.0).about.endswith("average; sized for 20 per second")
    assert "sized for" not in of_trace(trace).about


def test_a_trace_of_lengths_without_content_is_refused(shipped):
    with pytest.raises(ConfigError, match="its reuse is unknown; use a trace with block ids"):
        of_trace(shipped("azure_llm_2023_code"))


def test_the_description_says_if_reuse_is_known_within_sessions_only(tmp_path):
    file = tmp_path / "burst.csv"
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"
    turns = "0,s,1,m,128,64,192,Conversation log\n60,s,1,m,256,64,320,Conversation log\n"
    file.write_text(f"{head},Log Type\n{turns}")
    demand = of_trace(load(file))
    assert demand.held(1e9).tolist() == [0, 128]
    assert demand.about.endswith("reuse is known within sessions only, hits may be higher")
