"""Real vLLM with speculative decoding: a context comes back with the state of its draft model.

The draft decides how many tokens are accepted, and never the answer. So a test of the draft's state
compares its pages, or counts accepted tokens of a draft that is always right if its state is.
"""

import random

import pytest

pytest.importorskip("vllm")

from small_engines import SmallEngines, check_equal, is_equal
from small_models import VOCABULARY, write_draft

pytestmark = pytest.mark.vllm

BLOCK, TOKENS, ANSWER = 128, 1_100, 24
HELD = TOKENS // BLOCK * BLOCK
TARGET, DRAFT = range(2)
"""The KV groups of a model and of its draft."""


@pytest.fixture(scope="module")
def engines(real, tmp_path_factory):
    engines = SmallEngines(real, tmp_path_factory.mktemp("s"))
    yield engines
    engines.node.process.stop()


def words(name, count=TOKENS):
    return random.Random(name).choices(range(10, VOCABULARY), k=count)


def drafting(engines, method, seed=0):
    """Return vLLM's option for a draft model of a method; `same`: the model itself."""
    if method == "same":
        folder, method = engines.model("llama"), "draft_model"
    else:
        folder = engines.folder / f"{method}-{seed}"
        if not folder.exists():
            engines.write(write_draft, folder, method, seed)
    return {"speculative_config": {
        "method": method, "model": str(folder), "num_speculative_tokens": 3,
    }}  # fmt: skip


def ask(engine, name):
    [answer] = engine.ask(prompts=[words(name)], tokens=ANSWER, logprobs=3, detokenize=False)
    return answer


def accepted(engine, name):
    """Return an answer, and the share of drafted tokens that were accepted in it."""
    before, answer, after = engine.metrics(), ask(engine, name), engine.metrics()
    drafted, taken = (
        after[f"vllm:spec_decode_num_{each}_tokens"] - before[f"vllm:spec_decode_num_{each}_tokens"]
        for each in ("draft", "accepted")
    )
    return answer, taken / drafted


def test_a_context_comes_back_with_the_state_of_its_draft(engines):
    first = engines.start("llama", **drafting(engines, "same")).wait_ready()
    cold, right = accepted(first, "same")
    first.close()
    again = engines.start("llama", **drafting(engines, "same")).wait_ready()
    loaded, found = accepted(again, "same")
    assert (cold["cached"], loaded["cached"]) == (0, HELD)
    check_equal(loaded, cold)
    assert found == right > 0.9

    # What the comparison must be able to see: a draft without its state, and a model without its.
    assert again.reset()
    again.leave_out(group=DRAFT)
    forgotten, missed = accepted(again, "same")
    check_equal(forgotten, cold)
    assert missed < right
    assert again.reset()
    again.leave_out(group=TARGET)
    assert not is_equal(ask(again, "same"), cold)
    again.leave_out(group=None)
    again.fail_loads()
    assert again.reset()
    failed = ask(again, "same")
    assert failed["cached"] == 0
    check_equal(failed, cold)
    again.close()


def save(engines, name, **options):
    """Return the answer of a new engine, and digests of the pages of the model and its draft."""
    engine = engines.start(name, **options).wait_ready()
    answer = ask(engine, name)
    digests = [engine.digests(count=HELD // BLOCK, group=group) for group in (TARGET, DRAFT)]
    engine.close()
    return answer, digests


def check_loaded(engines, name, saved, **options):
    """Check that a new engine answers with the pages that were saved."""
    (cold, computed), (loaded, found) = saved, save(engines, name, **options)
    assert (cold["cached"], loaded["cached"]) == (0, HELD)
    check_equal(loaded, cold)
    assert found == computed
    assert len({*found[DRAFT]}) == HELD // BLOCK


@pytest.fixture(scope="module")
def saved_with_eagle(engines):
    return save(engines, "llama", **drafting(engines, "eagle"))


def test_pages_of_an_eagle_head_are_loaded_as_they_were_computed(engines, saved_with_eagle):
    check_loaded(engines, "llama", saved_with_eagle, **drafting(engines, "eagle"))


def test_an_engine_with_another_draft_finds_nothing_and_one_without_a_draft_finds_the_model(
    engines, saved_with_eagle
):
    cold, _ = saved_with_eagle
    for options, held in ((drafting(engines, "eagle", seed=1), 0), ({}, HELD)):
        engine = engines.start("llama", **options).wait_ready()
        answer = ask(engine, "llama")
        engine.close()
        assert answer["cached"] == held
        check_equal(answer, cold)


MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "method"), [
    ("llama", "eagle3"), ("llama", "draft_model"), ("mimo", "mtp"), ("glm4_moe", "mtp"),
])  # fmt: skip
def test_pages_of_every_kind_of_draft_are_loaded_as_they_were_computed(engines, name, method):
    options = MTP if method == "mtp" else drafting(engines, method)
    engines.node.drop_all()
    check_loaded(engines, name, save(engines, name, **options), **options)


@pytest.mark.soak
def test_a_method_without_state_of_its_own_shares_the_contexts_of_the_model(engines):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    engine = engines.start("llama", speculative_config=ngram).wait_ready()
    cold = ask(engine, "ngram")
    engine.close()
    plain = engines.start("llama").wait_ready()
    loaded = ask(plain, "ngram")
    plain.close()
    assert (cold["cached"], loaded["cached"]) == (0, HELD)
    check_equal(loaded, cold)
