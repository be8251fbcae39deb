"""The curve is what a store of each capacity, replayed block by block, would have hit."""

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.curve import ReuseOrder, curve
from holdfast.sim.formats.load import load
from holdfast.sim.formats.rows import Reading
from holdfast.sim.reuse import reuse
from holdfast.sim.trace import Trace

BLOCK = 4
TRACES = Path(__file__).resolve().parents[2] / "traces"


def replayed(trace: Trace, capacity: int, order: ReuseOrder) -> tuple[int, int]:
    """Hit blocks and tokens of one plain LRU store."""
    store: OrderedDict[int, None] = OrderedDict()
    blocks = tokens = 0
    for request in range(trace.requests):
        chain = trace.chain(request).tolist()
        held = next((i for i, block in enumerate(chain) if block not in store), len(chain))
        blocks += held
        tokens += min(held * BLOCK, int(trace.input_tokens[request]))
        for block in chain[::-1] if order is ReuseOrder.LEAF_FIRST else chain:
            store[block] = None
            store.move_to_end(block)
        while len(store) > capacity:
            store.popitem(last=False)
    return blocks, tokens


@given(data=st.data(), order=st.sampled_from(ReuseOrder))
def test_the_curve_at_every_capacity_equals_a_plain_replay(any_trace, data, order) -> None:
    trace = data.draw(any_trace)
    found = curve(trace, order=order)
    hits = list(zip(found.hit_blocks.tolist(), found.hit_tokens.tolist(), strict=True))
    assert hits == [replayed(trace, size, order) for size in range(trace.unique + 1)]


def test_capacity_for_returns_the_fewest_blocks_for_a_share_of_the_most_hits(made) -> None:
    found = curve(made([[0, 1], [0, 1], [2], [0]], [0] * 4, [1] * 4))
    assert found.hit_tokens.tolist() == [0, 4, 12, 12]
    assert found.token_hit(found.capacity_for(1.0)) == found.token_hit(10**9)
    assert found.capacity_for(0.0) == 0
    with pytest.raises(ValueError, match="give 0 or more"):
        found.token_hit(-1)


def test_a_trace_without_blocks_hits_nothing(made) -> None:
    assert curve(made([[], []], [0, 0], [1, 1])).token_hit(5) == 0.0


SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)


def test_conversation_equals_an_independent_survey(shipped) -> None:
    conversation = shipped("conversation")
    found = curve(conversation)
    hits = [found.block_hit(round(share * conversation.unique)) for share in SHARES]
    assert hits == pytest.approx([0.052, 0.195, 0.278, 0.353, 0.363], abs=0.005)
    assert [round(hit, 4) for hit in hits] == [0.0525, 0.1958, 0.2789, 0.3535, 0.3631]


def test_synthetic_equals_an_independent_survey(shipped) -> None:
    synthetic = shipped("synthetic")
    found = curve(synthetic)
    hits = [found.block_hit(round(share * synthetic.unique)) for share in SHARES]
    assert hits == pytest.approx([0.034, 0.155, 0.260, 0.443, 0.589], abs=0.005)


def test_the_conversation_curve_has_its_known_token_hit_ratios(shipped) -> None:
    conversation = shipped("conversation")
    runs = reuse(conversation)
    found = curve(conversation, runs)
    sizes = {1_000: 0.0454, 5_860: 0.1388, 19_532: 0.2908, 97_657: 0.3707, 200_000: 0.3736}
    assert {size: round(found.token_hit(size), 4) for size in sizes} == sizes
    assert [found.capacity_for(s) for s in (0.5, 0.8, 0.95, 0.99)] == [8296, 20927, 37602, 85220]
    head_first = curve(conversation, runs, ReuseOrder.HEAD_FIRST)
    sizes = {20: 0.0265, 5_860: 0.1382, 10_000: 0.2153}
    assert {size: round(head_first.token_hit(size), 4) for size in sizes} == sizes


def test_leaf_first_and_head_first_differ_most_on_shared_prompts(shipped) -> None:
    airline = shipped("airline")
    assert round(curve(airline).token_hit(30), 3) == 0.611
    assert round(curve(airline, order=ReuseOrder.HEAD_FIRST).token_hit(30), 4) == 0.1445


def test_the_curve_of_a_day_of_agent_sessions_has_its_known_values(shipped) -> None:
    """42 million block accesses, composed over eight hours."""
    found = curve(shipped("claudecode"))
    sizes = {5_000: 0.1224, 12_500: 0.3293, 25_000: 0.6609, 50_000: 0.8844, 400_000: 0.9617}
    assert {size: round(found.token_hit(size), 4) for size in sizes} == sizes
    assert found.capacity_for(0.95) == 61_058


def test_agent_sessions_that_start_within_an_hour_need_more_space() -> None:
    trace = load(TRACES / "agentic_claudecode_dev.jsonl.gz", Reading(window_s=3_600.0))
    found = curve(trace)
    sizes = {5_000: 0.0990, 25_000: 0.3162, 100_000: 0.8105, 400_000: 0.9545}
    assert {size: round(found.token_hit(size), 4) for size in sizes} == sizes
    assert found.capacity_for(0.95) == 178_545
