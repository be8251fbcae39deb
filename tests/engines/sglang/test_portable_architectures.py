"""Real SGLang and transformers go on from each other's contexts, architecture by architecture.

A fingerprint does not say how an engine implements a model, so engines share the contexts of what
was compared only. `tests/engines/vllm` has the same test for vLLM.
"""

import contextlib
import shutil
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from architectures import CONFIGS, VOCABULARY, digest_of, write_models
from portable_pair import TransformersSide, difference, words

from holdfast.engines.compared_models import COMPARED_TYPES
from holdfast.limits import BLOCK_TOKENS, MIB
from holdfast_bench.harness import model
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.peers import sglang_environment
from holdfast_bench.peers.sglang_server import (
    SglangServer,
    SglangServerOptions,
    holdfast_storage,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

TOKENS = 300
HELD = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
OWN = 1e-4
"""How far the engines are apart if each computes a context for itself."""

SHARED = sorted(name for name, engines in COMPARED_TYPES.items() if "sglang" in engines)

prompt_of = partial(words, tokens=TOKENS, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model of each type; the tokenizer is only to print what is generated."""
    sglang_environment.install()
    folder = tmp_path_factory.mktemp("architectures")
    write_models(folder)
    for name in CONFIGS:
        for file in model.make("tiny").glob("tokenizer*"):
            shutil.copy(file, folder / name)
    return folder


class SglangPair(TransformersSide):
    """SGLang and transformers with one model, at one node; the processes end with `stack`."""

    def __init__(self, folder, name, scratch, stack):
        self.node = stack.enter_context(NodeUnderTest(scratch / "n", 64 * MIB, 256 * MIB))
        digest = digest_of(name)
        extra = holdfast_storage(self.node.address, "portable")
        options = SglangServerOptions(
            folder / name,
            storage="dynamic",
            extra=extra | ({"model_digest": digest} if digest else {}),
            tokens_max=4_096,
            page_tokens=BLOCK_TOKENS,
        )
        self.server = SglangServer("sglang", options, scratch / "sglang.log")
        stack.enter_context(self.server.process)
        super().__init__(folder / name, self.node.address, digest)
        stack.callback(self.close)
        self.server.wait_ready()

    def ask(self, prompt):
        """Return how many tokens SGLang loaded, and its log-probabilities after the prompt."""
        found = self.server.ask(prompt, 1)
        named = dict(found.answer.logprobs[0])
        steps = {int(name.removeprefix("token_id:")): value for name, value in named.items()}
        return found.tokens.fetched_total, steps


@pytest.mark.parametrize("name", SHARED)
def test_each_engine_goes_on_from_what_the_other_wrote(models, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.ExitStack() as stack:
        pair = SglangPair(models, name, tmp_path, stack)
        prompt = prompt_of("from sglang")
        loaded, cold = pair.ask(prompt)
        assert loaded == 0
        own = pair.after(prompt)
        assert difference(cold, own) < OWN
        pair.node.wait_on_disk(HELD // BLOCK_TOKENS)
        cache = pair.cache(prompt)
        assert (cache.prefix.fetched, cache.prefix.computed) == (HELD, 0), cache.prefix
        assert float((pair.after(prompt, cache) - own).abs().max()) < OWN

        prompt = prompt_of("from transformers")
        cache = pair.cache(prompt)
        assert (cache.prefix.fetched, cache.prefix.computed) == (0, HELD), cache.prefix
        loaded, warm = pair.ask(prompt)
        assert loaded == HELD
        assert difference(warm, pair.after(prompt)) < OWN
        # What a comparison must be able to see: one block of another context.
        other = [*prompt_of("from sglang")[:BLOCK_TOKENS], *prompt[BLOCK_TOKENS:]]
        assert not difference(warm, pair.after(other)) < 10 * OWN
