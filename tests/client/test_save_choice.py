"""Saves are deferred while prompts find their blocks in the engine, and not in the store."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.prompt_ledger import CountedPrompt
from holdfast.client.save_choice import MEMORY_PROMPTS, PROMPTS_MIN, STORE_HIGH, SaveChoice

FROM_ENGINE = CountedPrompt(1000, 900, {})
FROM_STORE = CountedPrompt(1000, 0, {"host": 600, "disk": 300})
COMPUTED = CountedPrompt(1000, 0, {})


def after(*prompts):
    choice = SaveChoice()
    for prompt in prompts:
        choice.counted(prompt)
    return choice


def test_blocks_are_saved_when_full_until_enough_prompts_have_reused_tokens():
    assert not after(*[FROM_ENGINE] * (PROMPTS_MIN - 1)).defers
    assert after(*[FROM_ENGINE] * PROMPTS_MIN).defers


def test_blocks_are_saved_when_full_while_the_store_serves_prompts():
    assert not after(*[FROM_STORE, FROM_ENGINE] * PROMPTS_MIN).defers


def test_prompts_that_reuse_nothing_change_nothing():
    assert not after(*[COMPUTED] * 1000).defers
    assert after(*[FROM_ENGINE] * PROMPTS_MIN, *[COMPUTED] * 1000).defers


def test_the_choice_follows_a_change_of_the_load():
    choice = after(*[FROM_ENGINE] * 1000)
    for _ in range(MEMORY_PROMPTS):
        choice.counted(FROM_STORE)
    assert not choice.defers
    for _ in range(10 * MEMORY_PROMPTS):
        choice.counted(FROM_ENGINE)
    assert choice.defers


@given(st.lists(st.sampled_from([FROM_ENGINE, FROM_STORE, COMPUTED])))
def test_saves_are_never_deferred_with_much_from_the_store(prompts):
    choice = after(*prompts)
    assert not choice.defers or choice.store_share < STORE_HIGH
