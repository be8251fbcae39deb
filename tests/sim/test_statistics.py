"""The figures of the shipped traces, as they were computed independently."""

import pytest

from holdfast.sim.statistics import statistics


def rounded(quantiles: dict[str, float], *names: str) -> tuple[int, ...]:
    return tuple(round(quantiles[name]) for name in names)


def test_the_conversation_trace_has_its_known_statistics(shipped) -> None:
    found = statistics(shipped("conversation"))
    assert (found.requests, found.blocks, found.unique_blocks) == (12_031, 288_500, 182_790)
    assert round(found.span_s) == 3_537
    assert found.unique_tokens == 93_588_480
    assert round(found.input_mean) == 12_035
    assert rounded(found.input_tokens, "p50", "p99") == (6_909, 85_401)
    assert round(found.infinite_token_hit, 3) == 0.374
    assert round(found.infinite_block_hit, 3) == 0.366
    assert round(found.infinite_request_hit, 3) == 0.409
    assert round(found.one_hit, 4) == 0.7585
    assert rounded(found.reuse_s, "p50", "p90", "p99") == (114, 519, 1_578)


def test_the_synthetic_trace_has_its_known_statistics(shipped) -> None:
    found = statistics(shipped("synthetic"))
    assert rounded(found.input_tokens, "p50", "p99") == (11_587, 66_458)
    assert round(found.infinite_token_hit, 4) == 0.6512
    assert round(found.infinite_request_hit, 4) == 0.4315
    assert round(found.one_hit, 4) == 0.5845
    assert rounded(found.reuse_s, "p50", "p90", "p99") == (59, 282, 583)


def test_the_agent_sessions_have_their_known_statistics(shipped) -> None:
    found = statistics(shipped("claudecode"))
    assert (found.requests, found.sessions) == (22_448, 341)
    assert (found.blocks, found.unique_blocks) == (42_434_678, 1_588_461)
    assert found.span_s / 3_600 == pytest.approx(32.5, abs=0.05)
    assert round(found.input_mean) == 121_014
    assert rounded(found.input_tokens, "p50", "p99") == (103_664, 456_805)
    assert round(found.infinite_token_hit, 4) == 0.9623
    assert round(found.infinite_request_hit, 4) == 0.9494
    assert round(found.requests_with_a_hit, 4) == 0.9837
    assert round(found.one_hit, 3) == 0.064
    assert rounded(found.reuse_s, "p10", "p50", "p90", "p99") == (9, 20, 129, 1_568)


def test_a_trace_with_estimated_lengths_has_its_known_statistics(shipped) -> None:
    found = statistics(shipped("airline"))
    assert found.block_tokens == 64
    assert rounded(found.input_tokens, "p50", "p99") == (2_618, 7_136)
    assert round(found.one_hit, 4) == 0.0851


def test_a_trace_without_block_ids_has_arrival_and_length_statistics(shipped) -> None:
    found = statistics(shipped("2023_conv"))
    assert found.requests == 19_366
    assert rounded(found.input_tokens, "p50", "p99") == (1_020, 4_142)
    assert (found.infinite_token_hit, found.one_hit, found.reuse_s) == (0.0, 1.0, {})


def test_a_trace_without_blocks_has_zero_hit_ratios(made) -> None:
    found = statistics(made([[]], [0], [0]))
    assert (found.infinite_token_hit, found.infinite_request_hit, found.one_hit) == (0, 0, 0)
