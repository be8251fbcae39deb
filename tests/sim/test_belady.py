"""The bound is that of a plain replay with knowledge of the future, and nothing beats it."""

import math
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.sim.belady import belady
from holdfast.sim.curve import curve
from holdfast.sim.trace import Trace


def replayed(trace: Trace, capacity: int) -> tuple[int, int]:
    """Hit blocks and tokens of a plain store that looks ahead."""
    chains = [trace.chain(request).tolist() for request in range(trace.requests)]
    store: set[int] = set()
    blocks = tokens = 0
    for request, chain in enumerate(chains):
        held = next((i for i, block in enumerate(chain) if block not in store), len(chain))
        blocks += held
        tokens += min(held * trace.block_tokens, int(trace.input_tokens[request]))
        wanted = []
        for block in store | set(chain):
            uses = (i for i in range(request + 1, len(chains)) if block in chains[i])
            again = next(uses, math.inf)
            if again < math.inf:
                wanted.append((again, chains[again].index(block), block))
        store = {block for _, _, block in sorted(wanted)[:capacity]}
    return blocks, tokens


@given(data=st.data())
def test_the_bound_at_every_capacity_equals_a_plain_replay(any_trace, data) -> None:
    trace = data.draw(any_trace)
    sizes = list(range(trace.unique + 1))
    inputs = int(trace.input_tokens.sum()) or 1
    for bound in belady(trace, sizes):
        blocks, tokens = replayed(trace, bound.capacity_blocks)
        assert bound.block_hit == blocks / (trace.blocks or 1)
        assert bound.token_hit == tokens / inputs


@given(data=st.data())
def test_the_bound_lies_between_lru_and_an_unbounded_store(any_trace, data) -> None:
    trace = data.draw(any_trace)
    lru = curve(trace)
    for bound in belady(trace, list(range(trace.unique + 1))):
        most = lru.block_hit(trace.unique)
        assert lru.block_hit(bound.capacity_blocks) <= bound.block_hit <= most


def best(trace: Trace, capacity: int) -> int:
    """The most hit blocks over every way to choose what stays after each request."""
    reached = {frozenset[int](): 0}
    for request in range(trace.requests):
        chain = trace.chain(request).tolist()
        after: dict[frozenset[int], int] = {}
        for store, hits in reached.items():
            held = next((i for i, block in enumerate(chain) if block not in store), len(chain))
            there = store | set(chain)
            for stays in combinations(sorted(there), min(capacity, len(there))):
                kept = frozenset(stays)
                after[kept] = max(after.get(kept, 0), hits + held)
        reached = after
    return max(reached.values())


@given(data=st.data(), capacity=st.integers(0, 3))
def test_no_eviction_choice_hits_more_blocks_than_the_bound(any_trace, data, capacity) -> None:
    trace = data.draw(any_trace)
    assume(trace.unique <= 12)
    (bound,) = belady(trace, [capacity])
    assert bound.block_hit == best(trace, capacity) / (trace.blocks or 1)


@pytest.mark.parametrize(
    ("trace", "hits"),
    [
        ("conversation", {1_000: 0.194, 5_860: 0.360, 10_000: 0.374}),
        ("synthetic", {5_860: 0.560, 19_532: 0.651}),
        ("airline", {30: 0.611, 60: 0.859}),
        ("claudecode", {12_500: 0.635, 25_000: 0.824, 50_000: 0.931, 100_000: 0.960}),
    ],
)
def test_the_bounds_of_shipped_traces_have_their_known_hit_ratios(shipped, trace, hits) -> None:
    found = belady(shipped(trace), list(hits))
    assert {bound.capacity_blocks: round(bound.token_hit, 3) for bound in found} == hits


def test_a_negative_capacity_is_refused(made) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        belady(made([[0]], [0], [0]), [-1])
