"""The curve is what a store of each capacity, replayed block by block, would have hit."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.curve import Order, curve
from holdfast.sim.formats.load import load
from holdfast.sim.reuse import reuse
from holdfast.sim.trace import Requests, Trace, arrange

TRACES = Path(__file__).resolve().parents[2] / "traces"
BLOCK = 4


def small(chains: list[list[int]], short: list[int]) -> Trace:
    """A trace of these chains, a second apart; input `i` lacks `short[i]` tokens of its blocks."""
    number = len(chains)
    counts = np.array([len(chain) for chain in chains], np.int64)
    tokens = np.maximum(counts * BLOCK - np.array(short, np.int64), 0)
    requests = Requests(
        np.arange(number) * 1.0,
        tokens,
        np.zeros(number, np.int64),
        np.full(number, -1, np.int32),
        np.full(number, np.nan),
    )
    ids = np.array([block for chain in chains for block in chain], np.int64)
    return arrange("small", BLOCK, requests, counts, ids)


traces = st.integers(1, 12).flatmap(
    lambda n: st.builds(
        small,
        st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=n, max_size=n),
        st.lists(st.integers(0, BLOCK - 1), min_size=n, max_size=n),
    )
)


def replayed(trace: Trace, capacity: int, order: Order) -> tuple[int, int]:
    """Hit blocks and tokens of one plain LRU store."""
    store: OrderedDict[int, None] = OrderedDict()
    blocks = tokens = 0
    for request in range(trace.requests):
        chain = trace.chain(request).tolist()
        held = next((i for i, block in enumerate(chain) if block not in store), len(chain))
        blocks += held
        tokens += min(held * BLOCK, int(trace.input_tokens[request]))
        for block in chain[::-1] if order is Order.LEAF_FIRST else chain:
            store[block] = None
            store.move_to_end(block)
        while len(store) > capacity:
            store.popitem(last=False)
    return blocks, tokens


@given(traces, st.sampled_from(Order))
def test_every_capacity_equals_its_replay(trace: Trace, order: Order) -> None:
    found = curve(trace, order=order)
    hits = list(zip(found.hit_blocks.tolist(), found.hit_tokens.tolist(), strict=True))
    assert hits == [replayed(trace, size, order) for size in range(trace.unique + 1)]


def test_the_fewest_blocks_for_a_share_of_the_most() -> None:
    found = curve(small([[0, 1], [0, 1], [2], [0]], [0, 0, 0, 0]))
    assert found.token_hit(found.capacity_for(1.0)) == found.token_hit(10**9)
    assert found.capacity_for(0.0) == 0
    with pytest.raises(ValueError, match="give 0 or more"):
        found.token_hit(-1)


def test_a_trace_without_blocks_hits_nothing() -> None:
    assert curve(small([[], []], [0, 0])).token_hit(5) == 0.0


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return load(TRACES / "mooncake_conversation_trace.jsonl.gz")


@pytest.fixture(scope="module")
def synthetic() -> Trace:
    return load(TRACES / "mooncake_synthetic_trace.jsonl.gz")


SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)


def test_conversation_equals_an_independent_survey(conversation: Trace) -> None:
    found = curve(conversation)
    hits = [found.block_hit(round(share * conversation.unique)) for share in SHARES]
    assert hits == pytest.approx([0.052, 0.195, 0.278, 0.353, 0.363], abs=0.005)
    assert [round(hit, 4) for hit in hits] == [0.0525, 0.1958, 0.2789, 0.3535, 0.3631]


def test_synthetic_equals_an_independent_survey(synthetic: Trace) -> None:
    found = curve(synthetic)
    hits = [found.block_hit(round(share * synthetic.unique)) for share in SHARES]
    assert hits == pytest.approx([0.034, 0.155, 0.260, 0.443, 0.589], abs=0.005)


def test_token_hits_of_conversation(conversation: Trace) -> None:
    runs = reuse(conversation)
    found = curve(conversation, runs)
    sizes = {1_000: 0.0454, 5_860: 0.1388, 19_532: 0.2908, 97_657: 0.3707, 200_000: 0.3736}
    assert {size: round(found.token_hit(size), 4) for size in sizes} == sizes
    assert [found.capacity_for(s) for s in (0.5, 0.8, 0.95, 0.99)] == [8296, 20927, 37602, 85220]
    head_first = curve(conversation, runs, Order.HEAD_FIRST)
    sizes = {20: 0.0265, 5_860: 0.1382, 10_000: 0.2153}
    assert {size: round(head_first.token_hit(size), 4) for size in sizes} == sizes


def test_leaf_first_and_head_first_differ_most_on_shared_prompts() -> None:
    airline = load(TRACES / "taubench_gpt4o_airline_blk256B.jsonl.gz")
    assert round(curve(airline).token_hit(30), 3) == 0.611
    assert round(curve(airline, order=Order.HEAD_FIRST).token_hit(30), 4) == 0.1445


def test_a_day_of_agent_sessions() -> None:
    """42 million block accesses, composed over eight hours."""
    agents = load(TRACES / "agentic_claudecode_dev.jsonl.gz")
    found = curve(agents)
    sizes = {5_000: 0.1224, 12_500: 0.3293, 25_000: 0.6609, 50_000: 0.8844, 400_000: 0.9617}
    assert {size: round(found.token_hit(size), 4) for size in sizes} == sizes
    assert found.capacity_for(0.95) == 61_058
