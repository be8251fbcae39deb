"""Real vLLM on the CPU: what vLLM can do beside plain prompts, with Holdfast behind it.

Each answer is that of an engine without a connector. Speculative decoding, parallel sizes and
preemption have tests of their own.
"""

import json
import random
import shutil
import time

import pytest

pytest.importorskip("vllm")

import torch
from audio_model import AUDIO_TOKEN, BEGIN, END, SOUND_TOKENS, make_audio_model
from image_model import IMAGE_TOKENS, make_image_model
from safetensors.torch import load_file, save_file

from holdfast.limits import MIB
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK, ANSWER = 128, 8
TOKENS = 500
HELD = TOKENS // BLOCK * BLOCK
NEAR = 1e-4
"""Largest difference of log-probabilities between computed and loaded contexts, in float32."""


def prompt_of(name, tokens=TOKENS, words=range(300, 30_000)):
    return random.Random(name).choices(words, k=tokens)


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Scene:
    """A node, and engines with a connector to it or without one."""

    def __init__(self, real, folder):
        self.folder, self._real = folder, real
        self.node = NodeUnderTest(folder / "node", 256 * MIB, 256 * MIB, settings={"plan": "held"})
        self.model = str(make("tiny"))
        self._engines = []

    def start(self, *, alone=False, extra=(), **options):
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": self.node.address,
                "cover_deadline_ms": 60_000,
            }
            | dict(extra),
        }
        settings = {
            "model": self.model, "dtype": "float32", "max_model_len": 2048,
            "kv_cache_memory_bytes": 32 * MIB,
        }  # fmt: skip
        if not alone:
            settings["kv_transfer"] = transfer
        log = self.folder / f"{len(self._engines)}.log"
        engine = self._real.Engine(log, **settings | options).wait_ready()
        self._engines.append(engine)
        return engine

    def saved(self, engine, ask, blocks):
        """Have a context computed and saved, and forgotten by the engine; return the answer."""
        before = self.node.status()["blocks"]
        answer = ask()
        until(lambda: self.node.status()["blocks"] >= before + blocks)
        until(engine.reset)
        return answer

    def close(self):
        for engine in self._engines:
            engine.close()
        self.node.process.stop()


@pytest.fixture(scope="module")
def scene(real, tmp_path_factory):
    scene = Scene(real, tmp_path_factory.mktemp("f"))
    yield scene
    scene.close()


@pytest.fixture(scope="module")
def alone(scene):
    return scene.start(alone=True)


@pytest.fixture(scope="module")
def engine(scene):
    return scene.start()


def ask(engine, prompt, tokens=ANSWER):
    (answer,) = engine.ask(prompts=[prompt], tokens=tokens)
    return answer


def test_several_answers_to_one_prompt_are_those_of_an_engine_alone(scene, alone, engine):
    several = {"prompt": prompt_of("several"), "tokens": ANSWER, "count": 3, "seed": 5}
    right, _ = alone.ask_several(**several)
    cold, _ = scene.saved(engine, lambda: engine.ask_several(**several), HELD // BLOCK)
    loaded, cached = engine.ask_several(**several)
    assert cold == loaded == right
    assert len(set(map(tuple, right))) == 3
    assert cached >= HELD


def test_log_probabilities_of_a_prompt_are_computed_although_it_is_held(scene, alone, engine):
    prompt = prompt_of("held")
    right, _ = alone.ask_prompt_logprobs(prompt=prompt, tokens=ANSWER)
    scene.saved(engine, lambda: ask(engine, prompt), HELD // BLOCK)
    found, cached = engine.ask_prompt_logprobs(prompt=prompt, tokens=ANSWER)
    assert cached == 0
    assert found == pytest.approx(right, abs=NEAR)


def test_a_context_computed_for_its_log_probabilities_serves_later_requests(scene, alone, engine):
    prompt = prompt_of("first asked for log-probabilities")
    asked = {"prompt": prompt, "tokens": ANSWER}
    scene.saved(engine, lambda: engine.ask_prompt_logprobs(**asked), HELD // BLOCK)
    answer = ask(engine, prompt)
    assert (answer["tokens"], answer["cached"]) == (ask(alone, prompt)["tokens"], HELD)


def test_an_engine_that_slept_uses_only_what_it_saves_afterwards(scene, alone):
    engine, prompt = scene.start(), prompt_of("slept")
    scene.saved(engine, lambda: ask(engine, prompt), HELD // BLOCK)
    engine.sleep_and_wake(level=1)
    # The weights may have been replaced while it slept, and vLLM does not say so.
    awake = scene.saved(engine, lambda: ask(engine, prompt), HELD // BLOCK)
    again = ask(engine, prompt)
    assert (awake["cached"], again["cached"]) == (0, HELD)
    assert awake["tokens"] == again["tokens"] == ask(alone, prompt)["tokens"]


def test_an_engine_of_fixed_weights_uses_its_contexts_again_after_it_slept(scene, alone):
    engine, prompt = scene.start(extra={"fixed_weights": True}), prompt_of("slept, fixed weights")
    scene.saved(engine, lambda: ask(engine, prompt), HELD // BLOCK)
    engine.sleep_and_wake(level=1)
    awake = ask(engine, prompt)
    assert (awake["tokens"], awake["cached"]) == (ask(alone, prompt)["tokens"], HELD)


@pytest.mark.parametrize("resets", [True, False], ids=["reset before", "no reset"])
def test_contexts_of_replaced_weights_are_neither_used_nor_changed(scene, engine, resets):
    other = scene.folder / f"other-{resets}"
    shutil.copytree(scene.model, other)
    tensors = load_file(other / "model.safetensors")
    rolled = {n: t.roll(1, 0).contiguous() if "self_attn" in n else t for n, t in tensors.items()}
    save_file(rolled, other / "model.safetensors", metadata={"format": "pt"})
    prompt = prompt_of(f"replaced, resets: {resets}")
    before = scene.saved(engine, lambda: ask(engine, prompt), HELD // BLOCK)
    right = ask(scene.start(alone=True, model=str(other)), prompt)

    refitted = scene.start()
    assert ask(refitted, prompt)["cached"] == HELD
    if resets:
        assert refitted.reset(connector=True)
    refitted.reload_weights(folder=str(other))
    if not resets:
        assert refitted.reset(), "of what vLLM itself has cached"
    # The scheduler learns of the update from this step, of which the worker moves no block.
    assert ask(refitted, prompt)["tokens"] == right["tokens"]
    assert refitted.reset()
    new = scene.saved(refitted, lambda: ask(refitted, prompt), HELD // BLOCK)
    loaded = ask(refitted, prompt)
    assert (new["cached"], loaded["cached"]) == (0, HELD)
    assert new["tokens"] == loaded["tokens"] == right["tokens"] != before["tokens"]
    # An engine with the earlier weights has the earlier contexts.
    assert engine.reset()
    assert ask(engine, prompt) == before | {"cached": HELD}


def test_a_context_with_an_image_is_loaded_for_the_same_image_only(scene):
    model = str(make_image_model(scene.folder / "images"))
    right, engine = scene.start(alone=True, model=model), scene.start(model=model)
    prompt = prompt_of("image", words=range(10, 900))
    whole = (len(prompt) + IMAGE_TOKENS - 1) // BLOCK * BLOCK

    def asked(of, seed):
        return of.ask_picture(prompt=prompt, seed=seed, tokens=ANSWER)

    cold = scene.saved(engine, lambda: asked(engine, 1), whole // BLOCK)
    loaded = asked(engine, 1)
    assert engine.reset()
    other = asked(engine, 2)
    assert [each["cached"] for each in (cold, loaded, other)] == [0, whole, 0]
    first, second = asked(right, 1), asked(right, 2)
    check_equal(loaded, first)
    check_equal(other, second)
    assert first["logprobs"] != second["logprobs"]


@pytest.mark.soak  # the image above goes the same way
def test_a_context_with_a_sound_is_loaded_up_to_another_sound(scene):
    model = str(make_audio_model(scene.folder / "sounds"))
    right, engine = scene.start(alone=True, model=model), scene.start(model=model)
    before, after = (prompt_of(name, 200, range(10, 900)) for name in ("before", "after"))
    prompt = [*before, BEGIN, AUDIO_TOKEN, END, *after]
    whole = (len(prompt) - 1 + SOUND_TOKENS - 1) // BLOCK * BLOCK

    def asked(of, seed):
        return of.ask_sound(prompt=prompt, seed=seed, tokens=ANSWER)

    cold = scene.saved(engine, lambda: asked(engine, 1), whole // BLOCK)
    loaded = asked(engine, 1)
    assert engine.reset()
    other = asked(engine, 2)
    common = len(before) // BLOCK * BLOCK
    assert [each["cached"] for each in (cold, loaded, other)] == [0, whole, common]
    first, second = asked(right, 1), asked(right, 2)
    check_equal(loaded, first)
    check_equal(other, second)
    assert first["logprobs"] != second["logprobs"]


def test_a_context_of_an_adapter_is_loaded_for_this_adapter_only(scene):
    adapters = [str(make_adapter(scene, number)) for number in (1, 2)]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    right, engine = scene.start(alone=True, **options), scene.start(**options)
    prompt = prompt_of("adapted")

    def asked(of, adapter):
        return of.ask_adapted(prompt=prompt, tokens=ANSWER, adapter=adapter)

    for adapter in (*adapters, None):
        cold = scene.saved(engine, lambda of=adapter: asked(engine, of), HELD // BLOCK)
        loaded = asked(engine, adapter)
        assert (cold["cached"], loaded["cached"]) == (0, HELD)
        check_equal(loaded, asked(right, adapter))
        until(engine.reset)
    assert asked(right, adapters[0])["logprobs"] != asked(right, adapters[1])["logprobs"]


def make_adapter(scene, number):
    """Write a LoRA adapter of random weights for the tiny model."""
    folder = scene.folder / f"adapter-{number}"
    folder.mkdir()
    model = load_file(f"{scene.model}/model.safetensors")
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, weight in model.items():
        if "q_proj" in name or "v_proj" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, columns, generator=generator) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def check_equal(found, right):
    assert found["tokens"] == right["tokens"]
    for step, expected in zip(found["logprobs"], right["logprobs"], strict=True):
        assert dict(step) == pytest.approx(dict(expected), abs=NEAR)


@pytest.mark.soak
def test_quantised_kv_is_loaded_as_it_was_computed_and_apart_from_other_kv(scene):
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    engine, plain = scene.start(**options), scene.start(dtype="bfloat16")
    prompt = prompt_of("quantised")
    scene.saved(plain, lambda: ask(plain, prompt), HELD // BLOCK)

    def asked():
        (answer,) = engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=5)
        return answer

    before = scene.node.status()["blocks"]
    cold, local = asked(), asked()
    assert (cold["cached"], local["cached"]) == (0, HELD)
    until(lambda: scene.node.status()["blocks"] >= before + HELD // BLOCK)
    until(engine.reset)
    assert asked() == local
