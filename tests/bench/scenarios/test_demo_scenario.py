"""The demo's prompts can be compared bit for bit, and its verdicts are strict."""

import pytest

from holdfast.errors import ConfigError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness import model
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.scenarios import demo_scenario
from holdfast_bench.scenarios.demo_scenario import DemoStep, prompts_of

pytest.importorskip("tokenizers")

ANSWER = CompletionAnswer(tuple(range(demo_scenario.ANSWER_TOKENS)), (), 0.5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("torch")
    return model.make("tiny", tmp_path_factory.mktemp("models") / "tiny")


def step(tokens, equal=True, tier=""):
    return DemoStep(
        "warm",
        [MeasuredCompletion(ANSWER, tokens)],
        equal,
        fetched=4096,
        tier=tier,
        token_bytes=20_480,
    )


def test_the_context_ends_where_a_prefill_step_ends(made):
    prompts = prompts_of(made, None, 2048)
    assert len(prompts.context) == 2048
    assert prompts.first[:2048] == prompts.context
    assert len(prompts.first) % demo_scenario.BATCH_TOKENS <= BLOCK_TOKENS


def test_the_whole_conversation_stays_within_one_block_after_the_context(made):
    prompts = prompts_of(made, None, 1024)
    turn = prompts.next(ANSWER)
    assert turn[: len(prompts.first)] == prompts.first
    assert turn[len(prompts.first) :][: len(ANSWER.tokens)] == list(ANSWER.tokens)
    assert len(turn) + demo_scenario.ANSWER_TOKENS < 1024 + BLOCK_TOKENS


def test_the_warm_up_prompt_has_equal_length_and_shares_no_block(made):
    prompts = prompts_of(made, None, 1024)
    assert len(prompts.unrelated) == len(prompts.first)
    assert prompts.unrelated[:BLOCK_TOKENS] != prompts.first[:BLOCK_TOKENS]
    assert prompts.probe == prompts.unrelated[: len(prompts.probe)]
    assert len(prompts.probe) > BLOCK_TOKENS


def test_the_context_is_taken_from_a_document_of_the_user(made, tmp_path):
    text = tmp_path / "text"
    text.write_text("holdfast " * 3000)
    tokenizer = demo_scenario.document.tokenizer_of(made)
    prompts = prompts_of(made, text, 1024)
    assert tokenizer.decode(prompts.context).startswith("holdfast holdfast")


@pytest.mark.parametrize(("tokens", "hint"), [(0, 1024), (1000, 1024), (4000, 4096), (-5, 1024)])
def test_a_length_that_could_not_be_compared_is_refused(made, tokens, hint):
    with pytest.raises(ConfigError, match=rf"--tokens: {tokens} is not .* take {hint}"):
        prompts_of(made, None, tokens)


def test_a_short_document_is_refused_with_its_length(made, tmp_path):
    text = tmp_path / "short"
    text.write_text("a few words")
    with pytest.raises(ConfigError, match=r"--document: .*short' has \d tokens and 1024"):
        prompts_of(made, text, 1024)


def test_a_missing_document_is_refused(made, tmp_path):
    with pytest.raises(ConfigError, match=r"--document: cannot read .*No such file"):
        prompts_of(made, tmp_path / "none", 1024)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--model: .* holds no tokenizer\.json"):
        prompts_of(tmp_path, None, 1024)


@pytest.mark.parametrize(
    ("tokens", "equal", "tier", "ok"),
    [
        (TokenSources(40, 0, {"host": 4096}), True, "", True),
        (TokenSources(40, 0, {"host": 4000, "disk": 96}), True, "", True),
        (TokenSources(40, 0, {"disk": 4096}), True, "disk", True),
        (TokenSources(40, 0, {"host": 4096}), False, "", False),
        (TokenSources(40, 0, {"host": 4096}), True, "disk", False),
        (TokenSources(168, 0, {"host": 3968}), True, "", False),
        (TokenSources(40, 4096, {}), True, "", False),
        (TokenSources(4136, 0, {}), True, "", False),
    ],
)
def test_a_step_is_ok_only_if_equal_whole_and_from_the_right_tier(tokens, equal, tier, ok):
    assert step(tokens, equal, tier).ok is ok


def test_speed_counts_the_bytes_fetched_over_the_whole_wait():
    assert step(TokenSources(40, 0, {"host": 4096})).gb_per_s == pytest.approx(
        4096 * 20_480 / 0.5 / 1e9
    )
    assert step(TokenSources(4136, 0, {})).gb_per_s is None
