"""Real vLLM and transformers go on from each other's contexts of models with several KV groups.

Numbers of two engines differ as those of two kernels do. `OWN` is how far they are apart with these
models if each computes for itself; a context of the other must not add to that.
"""

import contextlib
import random
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")

from small_models import VOCABULARY, write_models  # noqa: E402

import holdfast  # noqa: E402
from holdfast.limits import MIB  # noqa: E402
from holdfast_bench.harness.node import NodeUnderTest  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCK, TOKENS, ANSWER = 128, 1_100, 4
HELD = TOKENS // BLOCK * BLOCK
OWN = 1e-4
GROUPS = {"gemma3": 2, "gpt_oss": 2, "mistral": 1}
QUICK = ("gemma3",)


def words(name):
    return random.Random(name).choices(range(10, VOCABULARY), k=TOKENS)


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Pair:
    """vLLM and transformers with one model, at one node."""

    def __init__(self, harness, name):
        self.node = harness.node
        self.engine = harness.start(name)
        folder = harness.folder / name
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.store = holdfast.open(self.node.address, domain="default")
        self.engine.wait_ready()

    def close(self):
        self.engine.close()
        self.store.close()

    def ask(self, prompt):
        """Return how many tokens vLLM loaded, and the log-probabilities of its first token."""
        settings = {"tokens": ANSWER, "logprobs": 5, "detokenize": False}
        (answer,) = self.engine.ask(prompts=[prompt], **settings)
        return answer["cached"], dict(answer["logprobs"][0])

    def cache(self, prompt):
        return holdfast.transformers.cache(self.model, [prompt], self.store, block_tokens=BLOCK)

    def after(self, prompt, cache=None):
        """Return the log-probabilities of transformers after a prompt, part of it in a cache."""
        held = cache.get_seq_length() if cache is not None else 0
        ids = torch.tensor([prompt[held:]])
        with torch.no_grad():
            logits = self.model(ids, past_key_values=cache, use_cache=True).logits[0, -1]
        return torch.log_softmax(logits, -1)


def difference(found, right):
    return max(abs(value - float(right[token])) for token, value in found.items())


class Harness:
    def __init__(self, real, folder):
        self.real, self.folder = real, folder
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        # In another process: vLLM refuses weights that are younger than its own process.
        writing = real.forks().Process(target=write_models, args=(folder,))
        writing.start()
        writing.join()
        assert writing.exitcode == 0

    def start(self, name):
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": self.node.address, "cover_deadline_ms": 5000, "layout": "portable",
            },
        }  # fmt: skip
        return self.real.Engine(
            self.folder / f"{name}.log", model=str(self.folder / name), dtype="float32",
            kv_transfer=transfer, max_model_len=2048, kv_cache_memory_bytes=32 * MIB,
            skip_tokenizer_init=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def harness(real, tmp_path_factory):
    harness = Harness(real, tmp_path_factory.mktemp("kinds"))
    yield harness
    harness.node.process.stop()


@pytest.fixture
def pair_of(harness, monkeypatch):
    """Call with the name of a model; the engines are closed after the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(contextlib.closing(Pair(harness, name)))


@pytest.mark.parametrize("name", [
    *QUICK, *(pytest.param(n, marks=pytest.mark.soak) for n in GROUPS if n not in QUICK)
])  # fmt: skip
def test_each_engine_goes_on_from_what_the_other_wrote(pair_of, name):
    pair, groups = pair_of(name), GROUPS[name]
    prompt = words("from vllm")
    before = pair.node.status()["blocks"]
    loaded, cold = pair.ask(prompt)
    assert loaded == 0
    until(lambda: pair.node.status()["blocks"] == before + groups * HELD // BLOCK)
    own = pair.after(prompt)
    assert difference(cold, own) < OWN
    cache = pair.cache(prompt)
    assert (cache.prefix.fetched, cache.prefix.computed) == (HELD, 0), cache.prefix
    assert float((pair.after(prompt, cache) - own).abs().max()) < OWN

    prompt = words("from transformers")
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
        assert not difference(wrong, right) < 10 * OWN, (plant, arguments)  # it may be no number


@pytest.mark.soak
def test_keys_that_vllm_keeps_in_an_order_of_its_own_are_not_shared(pair_of):
    pair, prompt = pair_of("llama4"), words("llama4")
    before = pair.node.status()["blocks"]
    cold = pair.ask(prompt)
    until(lambda: pair.node.status()["blocks"] == before + 2 * HELD // BLOCK)
    assert pair.cache(prompt).prefix.fetched == 0
    assert pair.engine.reset()
    warm = pair.ask(prompt)
    assert (cold[0], warm[0]) == (0, HELD)
    assert warm[1] == pytest.approx(cold[1], abs=OWN)
