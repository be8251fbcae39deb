"""Sessions of agents: whose times are whose, and which sessions share ids."""

import pytest

from holdfast.errors import TraceError


def request(at_s, *ids, **more):
    return {"t": at_s, "in": 64 * len(ids), "out": 5, "hash_ids": list(ids), **more}


def session(*requests, **more):
    return {"block_size": 64, "requests": list(requests), **more}


def sub_agent(start_s, *times_s, first=50):
    requests = [request(at_s, *range(first, first + n + 1)) for n, at_s in enumerate(times_s)]
    return {"t": start_s, "type": "subagent", "requests": requests}


@pytest.mark.parametrize(
    ("start_s", "inner_s", "expected_s"),
    [
        (100, [0, 5, 10], [0, 100, 105, 110]),
        (100, [3, 8], [0, 103, 108]),
        (100, [100, 105], [0, 100, 105]),
        (100, [100.2, 105], [0, 100.2, 105]),
        (100, [99.9, 105], [0, 99.9, 105]),
        (100, [250, 260], [0, 250, 260]),
        (0, [0, 5], [0, 0, 5]),
        (1, [1, 2], [0, 1, 2]),
    ],
)
def test_times_of_sub_agents_are_relative_or_absolute(loaded, start_s, inner_s, expected_s):
    trace = loaded([session(request(0, 1), sub_agent(start_s, *inner_s))], window_s=0.0)
    assert trace.time_s.tolist() == expected_s
    absolute = bool(start_s) and inner_s[0] >= start_s - 1
    assert any("absolute in 1 of its sessions" in remark for remark in trace.remarks) is absolute


@pytest.mark.parametrize("starts_s", [(0, 4, 0, 0), (20, 24, 24, 60)])
def test_nested_and_listed_sub_agents_use_the_time_basis_of_their_session(loaded, starts_s):
    first_s, inner_s, inner_first_s, listed_s = starts_s
    inner = {"t": inner_s, "requests": [request(inner_first_s, 1, 2)]}
    outer = {"t": 20, "requests": [request(first_s, 1), inner]}
    listed = request(listed_s, 3, sub=0)
    one = session(request(0, 7), outer, listed, subagents=[{"t": 60}])
    assert loaded([one], window_s=0.0).time_s.tolist() == [0, 20, 24, 60]


def test_a_session_that_mixes_relative_and_absolute_sub_agent_times_is_refused(loaded):
    with pytest.raises(TraceError, match=r"jsonl:1: .* one entry is relative, one absolute"):
        loaded([session(request(0, 1), sub_agent(100, 0, 5), sub_agent(300, 300, first=70))])


@pytest.mark.parametrize("ids", [(1, 2, 3), (2**63 - 1, 7), (2**64 - 1, 2**64 - 2), (2**32, 5)])
@pytest.mark.parametrize(
    ("scopes", "hit"),
    [
        (["global", "global"], 1 / 2),
        (["local", "global"], 0.0),
        (["global", "local"], 0.0),
        (["local", "local"], 0.0),
        (["global", "local", "global"], 1 / 3),
        (["local", "global", None, "global"], 1 / 4),
    ],
)
def test_only_sessions_with_global_ids_share_blocks_in_any_line_order(
    loaded, token_hit, ids, scopes, hit
):
    rows = [session(request(0, *ids), hash_id_scope=scope) for scope in scopes]
    trace = loaded(rows, window_s=0.0)
    assert token_hit(trace) == pytest.approx(hit)
    assert trace.unique == round(len(ids) * len(scopes) * (1 - hit))


def test_a_run_that_crosses_32_bits_gives_the_same_ids_as_a_list(loaded, token_hit):
    runs = {"t": 1, "in": 64 * 4, "out": 1, "runs": [[2**32 - 2, 4]]}
    ids = request(0, 2**32 - 2, 2**32 - 1, 2**32, 2**32 + 1)
    assert token_hit(loaded([session(ids, runs)])) == 0.5


def test_an_unknown_scope_and_an_id_of_more_than_64_bits_are_refused(loaded):
    with pytest.raises(TraceError, match="jsonl:1: Invalid enum value 'world'"):
        loaded([session(request(0, 1), hash_id_scope="world")])
    with pytest.raises(TraceError, match=r"jsonl:1: id 18446744073709551616 .* give 0 to 2"):
        loaded([session(request(0, 2**64))])
    with pytest.raises(TraceError, match="jsonl:1: id -1 "):
        loaded([session(request(0, -1))])


def test_models_share_no_global_ids_and_a_session_counts_as_one_model(loaded, token_hit):
    rows = [session(request(0, 1, 2, model=model), hash_id_scope="global") for model in "aba"]
    assert token_hit(loaded(rows)) == pytest.approx(1 / 3)
    changed = loaded([session(request(0, 1, model="a"), request(5, 1, model="b"))])
    assert token_hit(changed) == 0.5
    assert changed.remarks == (
        "1 of its sessions use more than one model; each counts as if one model served it",
    )


def test_a_longer_request_without_a_known_block_is_refused_as_delta_form(loaded):
    with pytest.raises(TraceError, match="lists new blocks only"):
        loaded([session(request(0, 1), request(9, 2, 3))])
