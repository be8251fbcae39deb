"""Real vLLM and transformers compute the same keys and values, architecture by architecture.

A fingerprint says which model a context is of, and not how an engine implements it: an engine that
keeps keys in an order of its own would have the contexts of the other without an error.
"""

import contextlib
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("transformers")

from architectures import CONFIGS, VOCABULARY, digest_of, write_models
from portable_pair import BLOCK, PortablePairs, difference, words

from holdfast.engines.compared_models import COMPARED_TYPES

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

TOKENS = 300
HELD = TOKENS // BLOCK * BLOCK
OWN = 1e-4
COMPARED_ELSEWHERE = {"gemma3_text", "gpt_oss"}
"""Types of models that `test_portable_kinds` compares."""


@pytest.fixture(scope="module")
def pairs(real, tmp_path_factory):
    pairs = PortablePairs(real, tmp_path_factory.mktemp("architectures"), write_models)
    yield pairs
    pairs.node.process.stop()


def test_every_shared_type_of_model_is_compared():
    shared = {name for name, engines in COMPARED_TYPES.items() if "vllm" in engines}
    assert shared == {*CONFIGS} | COMPARED_ELSEWHERE


prompt_of = partial(words, tokens=TOKENS, vocabulary=VOCABULARY)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_goes_on_from_what_vllm_wrote(pairs, name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.closing(pairs.start(name, digest_of(name))) as pair:
        prompt = prompt_of(name)
        _, cold = pair.save(prompt, HELD // BLOCK)
        own = pair.after(prompt)
        assert difference(cold, own) < OWN
        cache = pair.cache(prompt)
        assert (cache.prefix.fetched, cache.prefix.computed) == (HELD, 0), cache.prefix
        assert float((pair.after(prompt, cache) - own).abs().max()) < OWN
