"""Real vLLM and transformers go on from each other's contexts of models with several KV groups.

Numbers of two engines differ as those of two kernels do. `OWN` is how far they are apart with these
models if each computes for itself; a context of the other must not add to that.
"""

import contextlib
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("transformers")

from portable_pair import BLOCK, PortablePairs, difference, words
from small_models import VOCABULARY, write_models

pytestmark = pytest.mark.vllm

TOKENS = 1_100
HELD = TOKENS // BLOCK * BLOCK
OWN = 1e-4
GROUPS = {"gemma3": 2, "gpt_oss": 2, "mistral": 1}
QUICK = ("gemma3",)

prompt_of = partial(words, tokens=TOKENS, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def pairs(real, tmp_path_factory):
    pairs = PortablePairs(real, tmp_path_factory.mktemp("kinds"), write_models)
    yield pairs
    pairs.node.process.stop()


@pytest.fixture
def pair_of(pairs, monkeypatch):
    """Call with the name of a model; the engines are closed after the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(contextlib.closing(pairs.start(name)))


@pytest.mark.parametrize("name", [
    *QUICK, *(pytest.param(n, marks=pytest.mark.soak) for n in GROUPS if n not in QUICK)
])  # fmt: skip
def test_each_engine_goes_on_from_what_the_other_wrote(pair_of, name):
    pair, groups = pair_of(name), GROUPS[name]
    prompt = prompt_of("from vllm")
    loaded, cold = pair.save(prompt, groups * HELD // BLOCK)
    assert loaded == 0
    own = pair.after(prompt)
    assert difference(cold, own) < OWN
    cache = pair.cache(prompt)
    assert (cache.prefix.fetched, cache.prefix.computed) == (HELD, 0), cache.prefix
    assert float((pair.after(prompt, cache) - own).abs().max()) < OWN

    prompt = prompt_of("from transformers")
    cache = pair.cache(prompt)
    assert (cache.prefix.fetched, cache.prefix.computed) == (0, HELD)
    loaded, found = pair.ask(prompt)
    right = pair.after(prompt)
    assert loaded == HELD
    assert difference(found, right) < OWN
    # What a comparison must be able to see: wrong bytes, and a group that is not loaded.
    faults = [("shift", {"by": 4096})]
    faults += [("leave_out", {"group": group}) for group in range(groups)]
    for plant, arguments in faults:
        getattr(pair.engine, plant)(**arguments)
        assert pair.engine.reset()
        loaded, wrong = pair.ask(prompt)
        assert loaded == HELD
        assert not difference(wrong, right) < 10 * OWN, (plant, arguments)


@pytest.mark.soak
def test_keys_that_vllm_keeps_in_an_order_of_its_own_are_not_shared(pair_of):
    pair, prompt = pair_of("llama4"), prompt_of("llama4")
    cold = pair.save(prompt, 2 * HELD // BLOCK)
    assert pair.cache(prompt).prefix.fetched == 0
    assert pair.engine.reset()
    warm = pair.ask(prompt)
    assert (cold[0], warm[0]) == (0, HELD)
    assert warm[1] == pytest.approx(cold[1], abs=OWN)
