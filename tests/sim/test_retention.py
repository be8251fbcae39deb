"""Retention is what a plain store would do that looks at its clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sim.retention import retention


@given(data=st.data(), ttl_s=st.integers(0, 8))
def test_hits_and_space_equal_a_plain_replay(any_trace, data, ttl_s) -> None:
    trace = data.draw(any_trace)
    used: dict[int, float] = {}
    block_seconds = 0.0
    blocks = tokens = peak = 0
    for request, now in enumerate(trace.time_s.tolist()):
        chain = trace.chain(request).tolist()
        there = [block in used and now - used[block] <= ttl_s for block in chain]
        held = next((i for i, found in enumerate(there) if not found), len(chain))
        blocks += held
        tokens += min(held * trace.block_tokens, int(trace.input_tokens[request]))
        for block in chain:
            block_seconds += min(now - used.get(block, now), ttl_s)
            used[block] = now
        peak = max(peak, sum(now - last <= ttl_s for last in used.values()))
    block_seconds += sum(min(trace.span_s - last, ttl_s) for last in used.values())
    (row,) = retention(trace, [float(ttl_s)])
    assert row.block_hit == blocks / (trace.blocks or 1)
    assert row.token_hit == tokens / (int(trace.input_tokens.sum()) or 1)
    assert row.peak_blocks == peak
    mean = block_seconds / trace.span_s if trace.span_s else trace.unique
    assert row.mean_blocks == pytest.approx(mean)


CONVERSATION = {60: (0.105, 4_552), 300: (0.293, 18_896), 600: (0.350, 33_126)}
AGENTS = {
    60: (0.781, 10_498, 70_988),
    300: (0.915, 20_852, 93_961),
    600: (0.934, 28_628, 126_772),
    1_800: (0.954, 50_881, 215_327),
    3_600: (0.960, 78_544, 311_164),
    28_800: (0.962, 420_726, 1_344_840),
}


def test_the_conversation_trace_has_its_known_retention_figures(shipped) -> None:
    """Hits and means of the other computation; its peaks are up to 1 % lower.

    It has 6,335 blocks at 60 s and 21,251 at 300 s, where a plain count in whole milliseconds, and
    this one, have 6,378 and 21,441: uses and drops at the same moment are many in this trace, and a
    block that is dropped just when others enter is counted with them here.
    """
    rows = retention(shipped("conversation"), [60.0, 300.0, 600.0])
    found = {row.ttl_s: (round(row.token_hit, 3), round(row.mean_blocks)) for row in rows}
    assert found == CONVERSATION


def test_the_agent_sessions_have_their_known_retention_figures(shipped) -> None:
    rows = retention(shipped("claudecode"), [float(ttl) for ttl in AGENTS])
    assert {
        row.ttl_s: (round(row.token_hit, 3), round(row.mean_blocks), row.peak_blocks)
        for row in rows
    } == AGENTS
