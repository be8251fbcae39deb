"""Rules of KV groups: what a resume needs, and the longest resume, beside a token-by-token twin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.fingerprint import KvGroup
from holdfast.blocks.group_rules import GroupRule, longest_resume, resume_points, unit_tokens
from holdfast.errors import BlockError

FULL = GroupRule("full", 0, 128, 128)


@st.composite
def rules(draw):
    attention = draw(st.sampled_from(["full", "window", "chunk", "recurrent"]))
    window = draw(st.integers(1, 40)) if attention in {"window", "chunk"} else 0
    step = draw(st.sampled_from([1, 2, 3, 4]))
    block = step * draw(st.integers(1, 3))
    return GroupRule.of(KvGroup(attention, window, (0,)), block, step)


def blocks_read(rule, tokens, have):
    """The plain twin: which blocks the next token reads, position by position."""
    if rule.attention == "recurrent":
        return {tokens // rule.block_tokens - 1} if tokens > have else set()
    read = set()
    for position in range(have, tokens):
        seen = {
            "full": True,
            "window": tokens - position < rule.window,
            "chunk": position // max(1, rule.window) == tokens // max(1, rule.window),
        }[rule.attention]
        if seen:
            read.add(position // rule.block_tokens)
    return read


@given(rules(), st.integers(0, 60), st.integers(0, 60))
def test_a_resume_needs_the_blocks_that_the_next_token_reads(rule, steps, have):
    tokens = steps * rule.step_tokens
    assert set(rule.needed(tokens, have)) == blocks_read(rule, tokens, have)


@given(st.lists(rules(), min_size=1, max_size=3), st.integers(0, 60), st.integers(0, 20), st.data())
def test_resume_points_are_those_for_which_every_group_is_held(several, limit, have, data):
    held = [data.draw(st.lists(st.booleans(), max_size=30)) for _ in several]
    expected = [
        tokens
        for tokens in range(limit, have, -1)
        if all(
            tokens % rule.step_tokens == 0
            and all(
                block < len(flags) and flags[block] for block in blocks_read(rule, tokens, have)
            )
            for rule, flags in zip(several, held, strict=True)
        )
    ]
    assert list(resume_points(several, held, limit, have)) == expected
    assert longest_resume(several, held, limit, have) == (expected[0] if expected else have)


@pytest.mark.parametrize(
    ("rule", "tokens", "blocks"),
    [
        (FULL, 2944, range(23)),
        (GroupRule("window", 512, 128, 128), 2944, range(19, 23)),
        (GroupRule("window", 128, 128, 128), 2944, range(22, 23)),
        (GroupRule("window", 512, 1024, 1024), 2048, range(1, 2)),
        (GroupRule("chunk", 512, 128, 128), 2944, range(20, 23)),
        (GroupRule("chunk", 512, 128, 128), 2560, range(20, 20)),
        (GroupRule("recurrent", 0, 1152, 1152), 2304, range(1, 2)),
    ],
    ids=["full", "Gemma 3", "gpt-oss", "Gemma 4", "Llama 4", "chunk ends", "Qwen3-Next"],
)
def test_models_need_the_blocks_of_their_kind(rule, tokens, blocks):
    assert rule.needed(tokens) == blocks


def test_resumes_are_at_multiples_of_every_step():
    window = GroupRule("window", 512, 1024, 1024)
    assert unit_tokens([FULL, window]) == 1024
    assert longest_resume([FULL, window], [[1] * 23, [1] * 2], 2999) == 2048


def test_a_group_without_its_window_shortens_the_resume():
    window = GroupRule("window", 256, 128, 128)
    held = [1] * 23, [1] * 20 + [0, 1, 1]
    assert longest_resume([FULL, window], held, 2999) == 2944
    assert longest_resume([FULL, window], held, 2900) == 20 * 128


def test_a_checkpoint_serves_its_own_position_only():
    state = GroupRule.of(KvGroup("recurrent", 0, (1,)), 128, 16)
    held = [1] * 23, [0] * 10 + [1]
    assert list(resume_points([FULL, state], held, 2999)) == [11 * 128]


def test_a_block_may_be_cut_between_two_pages():
    rule = GroupRule.of(KvGroup("full", 0, (0,)), 256, 128)
    assert rule.needed(384) == range(2)
    assert longest_resume([rule], [[1, 1]], 511) == 384


def test_a_resume_between_two_steps_is_refused():
    with pytest.raises(BlockError, match="pass a multiple of 128"):
        FULL.needed(100)


def test_a_block_is_a_whole_number_of_steps():
    with pytest.raises(BlockError, match="whole number of steps"):
        GroupRule.of(KvGroup("full", 0, (0,)), 100, 16)


def test_each_group_has_one_rule():
    with pytest.raises(BlockError, match="1 rules for 2 groups"):
        longest_resume([FULL], [[1], [1]], 128)
