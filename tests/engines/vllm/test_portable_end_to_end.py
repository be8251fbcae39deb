"""Real vLLM on the CPU with portable blocks: equal outputs, and contexts shared with transformers.

Between programs numbers differ as between two kernels. The limits below are some times what was
measured with the model of these tests: see docs/how-to/vllm.md.
"""

import logging
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import holdfast  # noqa: E402
from holdfast.client.local_model import portable_fingerprint  # noqa: E402
from holdfast.devices.context_tensors import blocks_to_tensors, tensors_to_blocks  # noqa: E402
from holdfast.limits import MIB  # noqa: E402
from holdfast_bench.harness.model import SHAPES, make  # noqa: E402
from holdfast_bench.harness.node import NodeUnderTest  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCK, TOKENS, ANSWER = 128, 700, 8
HELD = TOKENS // BLOCK * BLOCK
SHAPE = SHAPES["tiny"]
LIMITS = {"float32": (5e-5, 5e-5), "bfloat16": (0.3, 0.5)}
"""Largest differences of keys and values, and of log-probabilities, between two programs."""


def prompt_of(name, tokens=TOKENS):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(tokens)]


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


_log = logging.getLogger("measured")


class Place:
    """A node, engines in front of it, and transformers beside them."""

    def __init__(self, real, folder):
        self.folder, self._real = folder, real
        self.node = NodeUnderTest(folder / "node", 256 * MIB, 512 * MIB, settings={"plan": "held"})
        self.engines = {}
        for dtype in LIMITS:
            self.start(f"portable {dtype}", dtype, layout="portable")
        self.start("exact bfloat16", "bfloat16", layout="exact")
        self.start("alone float32", "float32", layout=None)
        self.starting = set(self.engines)

    def start(self, name, dtype, layout):
        options = {
            "model": str(make("tiny")),
            "dtype": dtype,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 32 * MIB,
        }
        if layout is not None:
            options["kv_transfer"] = {
                "kv_connector": "HoldfastConnector",
                "kv_connector_module_path": "holdfast.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "holdfast": self.node.address,
                    "layout": layout,
                    "cover_deadline_ms": 60_000,
                },
            }
        self.engines[name] = self._real.Engine(self.folder / f"{name}.log", **options)

    def __getitem__(self, name):
        if name in self.starting:
            self.starting.discard(name)
            self.engines[name].wait_ready()
        return self.engines[name]

    def ask(self, name, prompt):
        (answer,) = self[name].ask(prompts=[prompt], tokens=ANSWER, logprobs=3)
        return answer

    def save(self, name, prompt):
        """Have an engine compute and save a context, and forget it."""
        before = self.node.status()["blocks"]
        answer = self.ask(name, prompt)
        until(lambda: self.node.status()["blocks"] == before + HELD // BLOCK)
        assert self[name].reset()
        return answer

    def close(self, name):
        self[name].close()
        del self.engines[name]


@pytest.fixture(scope="module")
def place(real, tmp_path_factory):
    place = Place(real, tmp_path_factory.mktemp("portable"))
    yield place
    for name in list(place.engines):
        place.close(name)
    place.node.process.stop()


def test_outputs_with_portable_blocks_are_those_with_exact_ones_bit_for_bit(place):
    prompt = prompt_of("exact")
    answers = {}
    for layout in ("portable", "exact"):
        engine = f"{layout} bfloat16"
        cold = place.save(engine, prompt)
        computed = place[engine].digests(count=HELD // BLOCK)
        warm = place.ask(engine, prompt)
        assert (cold["cached"], warm["cached"]) == (0, HELD)
        assert place[engine].digests(count=HELD // BLOCK) == computed
        answers[layout] = cold["logprobs"], warm["logprobs"]
    assert answers["portable"] == answers["exact"]


def test_outputs_after_a_restart_of_node_and_engine_are_those_of_an_engine_alone(place):
    prompt = prompt_of("restart")
    cold = place.save("portable float32", prompt)
    warm = place.ask("portable float32", prompt)
    assert (cold["cached"], warm["cached"]) == (0, HELD)
    place.close("portable float32")
    place.node.restart()
    until(lambda: place.node.status()["recovery_s"] is not None)
    place.start("portable float32", "float32", "portable")
    place.starting.add("portable float32")
    again = place.ask("portable float32", prompt)
    assert (again["cached"], again["logprobs"]) == (HELD, warm["logprobs"])
    assert again["tokens"] == place.ask("alone float32", prompt)["tokens"]
    assert place["portable float32"].reset()


class Transformers:
    """The same model in Hugging Face transformers, with a session of the node."""

    def __init__(self, node, dtype):
        from transformers import AutoModelForCausalLM

        self.dtype = getattr(torch, dtype)
        folder = make("tiny")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()
        self.layout = holdfast.Layout.portable(
            layers=SHAPE.layers,
            kv_heads=SHAPE.kv_heads,
            head_size=SHAPE.head_size,
            dtype=dtype,
            block_tokens=BLOCK,
        )
        self.store = holdfast.open(node.address)
        self.session = self.store.session(portable_fingerprint(folder, self.layout))

    def compute(self, prompt):
        """Return the keys and values of a prompt, and the logits after it."""
        with torch.no_grad():
            found = self.model(torch.tensor([prompt]), use_cache=True)
        layers = [(layer.keys[0], layer.values[0]) for layer in found.past_key_values.layers]
        return layers, found.logits[0, -1]

    def go_on(self, layers, prompt):
        """Return the log-probabilities after a prompt whose first tokens have this state."""
        from transformers import DynamicCache

        held = layers[0][0].shape[1]
        cache = DynamicCache(ddp_cache_data=[(k[None], v[None]) for k, v in layers])
        with torch.no_grad():
            found = self.model(torch.tensor([prompt[held:]]), past_key_values=cache)
        return torch.log_softmax(found.logits[0, -1].float(), -1)

    def empty(self, tokens):
        shape = (SHAPE.kv_heads, tokens, SHAPE.head_size)
        return [[torch.zeros(shape, dtype=self.dtype) for _ in "kv"] for _ in range(SHAPE.layers)]


@pytest.fixture(params=LIMITS)
def pair(request, place):
    """The vLLM engine and the transformers model of one data type."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        other = Transformers(place.node, request.param)
    yield SimpleNamespace(
        engine=f"portable {request.param}",
        other=other,
        limits=LIMITS[request.param],
        record=lambda **found: _log.info("%s: %s", request.param, found),
    )
    other.store.close()


def test_transformers_goes_on_from_what_vllm_wrote(place, pair):
    prompt, other = prompt_of(f"from vllm {pair.engine}"), pair.other
    answer = place.save(pair.engine, prompt)
    blocks = np.zeros((TOKENS // BLOCK, other.layout.raw_bytes), np.uint8)
    landed = other.session.fetch(prompt, into=blocks, deadline_s=60.0)
    assert landed.tokens == HELD, landed
    foreign = other.empty(HELD)
    blocks_to_tensors(other.layout, blocks, foreign)
    own, logits = other.compute(prompt)
    difference = max(
        (mine[:, :HELD].float() - its.float()).abs().max().item()
        for states, foreign_states in zip(own, foreign, strict=True)
        for mine, its in zip(states, foreign_states, strict=True)
    )
    after = other.go_on(foreign, prompt)
    tail = (after - torch.log_softmax(logits.float(), -1)).abs().max().item()
    first = dict(answer["logprobs"][0])
    across = max(abs(value - after[token].item()) for token, value in first.items())
    swapped = other.go_on([(k.flip(0), v.flip(0)) for k, v in foreign], prompt)
    control = (swapped - after).abs().max().item()
    pair.record(kv=difference, tail=tail, vllm=across)
    assert control > 2 * pair.limits[1]  # heads in another order are seen
    assert difference <= pair.limits[0]
    assert max(tail, across) <= pair.limits[1]


def test_vllm_goes_on_from_what_transformers_wrote(place, pair):
    prompt, other = prompt_of(f"from transformers {pair.engine}"), pair.other
    layers, logits = other.compute(prompt)
    assert other.session.save(prompt, tensors_to_blocks(other.layout, layers)) == HELD // BLOCK
    answer = place.ask(pair.engine, prompt)
    assert answer["cached"] == HELD
    right = torch.log_softmax(logits.float(), -1)
    first = dict(answer["logprobs"][0])
    across = max(abs(value - right[token].item()) for token, value in first.items())
    pair.record(vllm_after_transformers=across)
    assert across <= pair.limits[1]
    assert place[pair.engine].reset()


def test_a_context_of_another_data_type_is_not_found(place):
    prompt = prompt_of("data type")
    place.save("portable bfloat16", prompt)
    assert place.ask("portable float32", prompt)["cached"] == 0
    assert place["portable float32"].reset()
