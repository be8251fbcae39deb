"""Runs cut chains where they part or end, and lose no block."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.runs import runs_of
from holdfast.sim.trace import Requests, arrange


def trace_of(chains, block_tokens=4):
    n = len(chains)
    counts = np.array([len(chain) for chain in chains], np.int64)
    tokens = counts * block_tokens
    unknown = np.full(n, -1, np.int32)
    requests = Requests(
        np.arange(n, dtype=np.float64), tokens, np.ones(n, np.int64), unknown, np.full(n, np.nan)
    )
    ids = np.array([i for chain in chains for i in chain], np.int64)
    return arrange("made", block_tokens, requests, counts, ids)


def blocks(runs, request):
    first = np.concatenate(([0], np.cumsum(runs.lengths)))
    return [b for run in runs.chain(request) for b in range(first[run], first[run + 1])]


def test_runs_end_where_chains_part_and_where_requests_end():
    runs = runs_of(trace_of([[0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 2]]))
    assert runs.lengths.tolist() == [2, 1, 2, 1]
    assert [runs.chain(i) for i in range(3)] == [[0, 1, 2], [0, 3], [0, 1]]


def test_a_long_run_is_cut():
    runs = runs_of(trace_of([list(range(10))]), longest=4)
    assert runs.lengths.tolist() == [4, 4, 2]
    assert runs_of(trace_of([list(range(3))]), longest=1).lengths.tolist() == [1, 1, 1]


def test_a_request_without_blocks_has_no_runs():
    assert runs_of(trace_of([[0, 1], [], [0, 1]])).chain(1) == []


@st.composite
def grown(draw):
    """Chains that share prefixes: each starts with a part of an earlier one."""
    chains, fresh = [], 0
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from(chains)) if chains and draw(st.booleans()) else []
        kept = parent[: draw(st.integers(0, len(parent)))]
        more = draw(st.integers(0 if kept else 1, 6))
        chains.append([*kept, *range(fresh, fresh + more)])
        fresh += more
    return chains


@given(grown(), st.integers(1, 5))
def test_the_runs_of_a_request_concatenate_to_its_chain(chains, longest):
    trace = trace_of(chains)
    runs = runs_of(trace, longest)
    assert runs.lengths.sum() == trace.unique
    assert runs.lengths.max() <= longest
    for request in range(trace.requests):
        assert blocks(runs, request) == trace.chain(request).tolist()


@given(grown(), st.integers(1, 5))
def test_the_parent_of_a_run_is_the_run_before_it(chains, longest):
    runs = runs_of(trace_of([*chains, [], chains[0]]), longest)
    parents = runs.parents().tolist()
    for request in range(len(chains) + 2):
        chain = runs.chain(request)
        assert [parents[run] for run in chain] == [-1, *chain][: len(chain)]
    assert all(parent < run for run, parent in enumerate(parents))
