"""Real vLLM whose weights are replaced in place while a save is under way.

What the earlier weights computed serves engines with those weights only, and no engine gets KV that
both have computed. Answers are compared by log-probabilities.
"""

import random
import shutil
import threading
import time

import pytest

pytest.importorskip("vllm")

from safetensors.torch import load_file, save_file

from holdfast.limits import MIB
from holdfast.wire.local.messages import Commit
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK, ANSWER = 128, 8
STEP = 2 * BLOCK
"""Tokens of a step: a prompt takes several."""

TOKENS = 4 * STEP - 24
HELD = TOKENS // BLOCK * BLOCK
NEAR = 1e-4
"""Largest difference of log-probabilities between computed and loaded contexts, in float32."""


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class HeldCommits:
    """Holds the first commit that an engine sends, and what follows it, until it is released."""

    def __init__(self, between):
        self.held, self._goes_on = threading.Event(), threading.Event()
        self._between = between
        between.passes = self._passes

    def _passes(self, message):
        if isinstance(message, Commit):
            self.held.set()
            self._goes_on.wait(120)
        return True

    def release(self):
        self._between.passes = None
        self._goes_on.set()


class Scene:
    """A node, two sets of weights, and engines that begin with the first of them."""

    def __init__(self, real, folder):
        self.folder, self._real = folder, real
        self.node = NodeUnderTest(folder / "node", 256 * MIB, 256 * MIB, settings={"plan": "held"})
        self.between = real.Between(str(folder / "node" / "node.sock"), folder / "between.sock")
        self.model, self.other = make("tiny"), folder / "other"
        shutil.copytree(self.model, self.other)
        tensors = load_file(self.other / "model.safetensors")
        rolled = {
            name: tensor.roll(1, 0).contiguous() if "self_attn" in name else tensor
            for name, tensor in tensors.items()
        }
        save_file(rolled, self.other / "model.safetensors", metadata={"format": "pt"})
        self.engines = []

    def start(self, address=None):
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"holdfast": address, "cover_deadline_ms": 60_000},
        }
        engine = self._real.Engine(
            self.folder / f"{len(self.engines)}.log", model=str(self.model), dtype="float32",
            max_model_len=2048, max_num_batched_tokens=STEP, kv_cache_memory_bytes=32 * MIB,
            kv_transfer=transfer if address else None,
        )  # fmt: skip
        self.engines.append(engine)
        return engine

    def blocks(self):
        return self.node.status()["blocks"]

    def close(self):
        for engine in self.engines:
            engine.close()
        self.node.process.stop()


@pytest.fixture(scope="module")
def scene(real, tmp_path_factory):
    scene = Scene(real, tmp_path_factory.mktemp("f"))
    yield scene
    scene.close()


@pytest.fixture(scope="module")
def prompts():
    """One prompt for each test, by whether the caches are reset before the update."""
    return {
        resets: random.Random(f"resets: {resets}").choices(range(300, 30_000), k=TOKENS)
        for resets in (True, False)
    }


@pytest.fixture(scope="module")
def right(scene, prompts):
    """What an engine without a connector answers to each prompt, before and after an update."""
    alone = scene.start().wait_ready()
    before = {resets: ask(alone, prompt) for resets, prompt in prompts.items()}
    assert alone.reset()
    alone.reload_weights(folder=str(scene.other))
    after = {resets: ask(alone, prompt) for resets, prompt in prompts.items()}
    for resets in prompts:
        assert not is_equal(after[resets], before[resets])
    return before, after


@pytest.fixture(scope="module")
def reader(scene):
    """An engine that keeps the earlier weights."""
    return scene.start(scene.node.address).wait_ready()


def ask(engine, prompt):
    (answer,) = engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=5)
    return answer


def is_equal(found, right):
    steps = zip(found["logprobs"], right["logprobs"], strict=True)
    near = all(dict(step) == pytest.approx(dict(other), abs=NEAR) for step, other in steps)
    return found["tokens"] == right["tokens"] and near


@pytest.mark.parametrize("resets", [True, False], ids=["reset before", "no reset"])
def test_a_save_under_way_at_an_update_serves_engines_with_the_earlier_weights_only(
    scene, prompts, right, reader, resets
):
    prompt, (right_before, right_after) = prompts[resets], right
    engine = scene.start(scene.between.address).wait_ready()
    blocks, commits = scene.blocks(), HeldCommits(scene.between)
    engine.add(prompts=[prompt], tokens=ANSWER)
    for _ in range(TOKENS // STEP):  # steps of the prompt, before its last one
        if not commits.held.is_set():
            engine.step(steps=1)
    assert commits.held.is_set()
    assert scene.blocks() == blocks
    if resets:
        assert engine.reset_running()
    engine.reload_weights(folder=str(scene.other))
    commits.release()
    assert engine.drain() == {"left": 0, "usage": 0.0}
    until(lambda: scene.blocks() > blocks)  # the save has ended, under its earlier name

    assert engine.reset(), "of what vLLM itself has cached"
    computed = ask(engine, prompt)
    assert computed["cached"] == 0
    assert is_equal(computed, right_after[resets])

    def loaded():
        assert engine.reset()
        found = ask(engine, prompt)
        assert is_equal(found, right_after[resets])
        return found["cached"] == HELD

    until(loaded)
    # What the earlier weights had computed by the update is loaded, and nothing that came after.
    found = ask(reader, prompt)
    assert 0 < found["cached"] < HELD
    assert is_equal(found, right_before[resets])
