"""A trace keeps what its file said, in order of arrival, with dense ids."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.trace import Requests, Trace, arrange, dense


def requests(times: list[float], tokens: list[int]) -> Requests:
    number = len(times)
    return Requests(
        np.array(times),
        np.array(tokens),
        np.arange(number),
        np.full(number, -1, np.int32),
        np.full(number, np.nan),
    )


def made(times: list[float], chains: list[list[int]]) -> Trace:
    """A trace of these chains, whose blocks have four tokens."""
    counts = np.array([len(chain) for chain in chains], np.int64)
    ids = np.array([block for chain in chains for block in chain], np.int64)
    return arrange("made", 4, requests(times, [4 * int(n) for n in counts]), counts, ids)


def test_requests_are_sorted_by_arrival_and_start_at_zero() -> None:
    trace = made([7.0, 5.0, 5.0], [[10, 11], [20], [10, 11, 12]])
    assert trace.time_s.tolist() == [0.0, 0.0, 2.0]
    assert trace.output_tokens.tolist() == [1, 2, 0]
    assert [trace.chain(i).tolist() for i in range(3)] == [[0], [1, 2, 3], [1, 2]]
    assert (trace.requests, trace.unique, trace.blocks, trace.span_s) == (3, 4, 6, 2.0)


def test_the_parent_of_an_id_is_the_id_before_it_in_its_chain() -> None:
    trace = made([0, 1, 2, 3], [[5, 6, 7], [], [5, 6, 8], [9]])
    assert trace.parents().tolist() == [-1, 0, 1, 1, -1]


def test_a_trace_without_blocks_is_a_trace() -> None:
    trace = made([1.0, 2.0], [[], []])
    assert (trace.requests, trace.unique, trace.blocks) == (2, 0, 0)
    assert trace.parents().tolist() == []


def test_the_first_requests_of_a_trace_keep_their_columns_and_ids() -> None:
    trace = made([0, 1, 2], [[5, 6], [7], [5, 6, 8]]).first(2)
    assert (trace.requests, trace.unique, trace.blocks) == (2, 3, 3)
    assert [trace.chain(i).tolist() for i in range(2)] == [[0, 1], [2]]
    assert trace.first(9).requests == 2
    assert trace.first(0).blocks == 0


def test_a_coarse_trace_has_longer_blocks_and_no_request_without_one() -> None:
    trace = made([0, 1, 2, 3], [[5, 6, 7], [9], [5, 6, 8, 4], [5, 3]]).coarse(2)
    assert [trace.chain(i).tolist() for i in range(trace.requests)] == [[0], [0, 1], [2]]
    assert (trace.block_tokens, trace.time_s.tolist()) == (8, [0.0, 2.0, 3.0])
    assert trace.input_tokens.tolist() == [8, 16, 8]
    assert trace.coarse(9).requests == 0


@given(st.lists(st.one_of(st.integers(-9, 9), st.integers(-(2**62), 2**62)), max_size=40))
def test_dense_numbers_ids_by_first_appearance(ids: list[int]) -> None:
    names: dict[int, int] = {}
    expected = [names.setdefault(i, len(names)) for i in ids]
    assert dense(np.array(ids, np.int64)).tolist() == expected


def test_ids_of_single_blocks_are_chained() -> None:
    trace = made([0, 1, 2], [[5, 6, 5], [6, 5], [5, 6]])
    assert trace.ids.tolist() == [0, 1, 2, 3, 4, 0, 1]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8))
def test_an_id_names_a_whole_prefix(chains: list[list[int]]) -> None:
    trace = made([float(i) for i in range(len(chains))], chains)
    prefixes = [tuple(chain[: i + 1]) for chain in chains for i in range(len(chain))]
    ids = trace.ids.tolist()
    assert len(set(zip(prefixes, ids, strict=True))) == len(set(prefixes)) == trace.unique
