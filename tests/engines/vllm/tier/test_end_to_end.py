"""Real vLLM on the CPU, whose own offloading has Holdfast as its secondary tier.

Every answer is the one of an engine without a connector: tokens, and log-probabilities, because a
recurrent model gives equal tokens also if its state was not loaded.
"""

import random

import pytest

pytest.importorskip("vllm")

import small_models

from holdfast.engines import cached_models
from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.peers import vllm_host_tier

pytestmark = pytest.mark.vllm

TOKENS = 1100
HELD = 1024
ANSWER = 8
CLOSE = 2e-5
"""Largest difference of log-probabilities between a computed and a loaded context, in float32."""


def prompt_of(name, tokens=TOKENS):
    words = random.Random(name)
    return [words.randrange(10, small_models.VOCABULARY) for _ in range(tokens)]


def transfer_to(address, **options):
    tier = {"type": "HoldfastTier", "module_path": "holdfast.engines.vllm.tier"}
    return vllm_host_tier.kv_transfer(64 * MIB, [tier | {"holdfast": address} | options])


class Bench:
    def __init__(self, real, folder):
        self.folder, self._real = folder, real
        self.models = folder / "models"
        small_models.write_models(self.models)
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB)
        self._started = 0

    def engine(self, model, transfer=None, **options):
        self._started += 1
        settings = {
            "model": str(self.models / model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 32 * MIB,
        }
        if transfer is not None:
            settings["kv_transfer"] = transfer
        log = self.folder / f"{self._started}-{model}.log"
        return self._real.Engine(log, **(settings | options)).wait_ready()


def ask(engine, prompt):
    (answer,) = engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=5, detokenize=False)
    return answer


def damage(folder):
    """Change bytes all over the files of a disk tier; every block has some of them."""
    for path in folder.iterdir():
        with path.open("r+b") as file:
            for at in range(MIB, path.stat().st_size, 32 * 1024):
                file.seek(at)
                (byte,) = file.read(1) or b"\0"
                file.seek(at)
                file.write(bytes([byte ^ 1]))


def same(found, right):
    assert found["tokens"] == right["tokens"]
    for step, truth in zip(found["logprobs"], right["logprobs"], strict=True):
        values = dict(truth)
        for token, value in step:
            assert abs(value - values.get(token, value)) < CLOSE


@pytest.fixture(scope="module")
def bench(real, tmp_path_factory):
    made = Bench(real, tmp_path_factory.mktemp("tier"))
    with made.node:
        yield made


SOAK = pytest.mark.soak
KINDS = {
    "lfm2": cached_models.RECURRENT,
    "llama": cached_models.FULL,
    "gemma3": cached_models.WINDOWS,
}


def test_every_kind_that_the_table_calls_offloaded_has_a_model_here():
    offloaded = {k for k in cached_models.MODEL_KINDS if k.offloading == cached_models.YES}
    assert offloaded == set(KINDS.values())


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[SOAK] * (name != "lfm2")) for name in KINDS]
)
def test_another_process_continues_a_context_from_the_node(bench, model):
    prompt = prompt_of(model)
    first = bench.engine(model, transfer_to(bench.node.address))
    right = ask(first, prompt)
    first.drain()
    first.close()
    second = bench.engine(model, transfer_to(bench.node.address))
    found = ask(second, prompt)
    second.close()
    assert (right["cached"], found["cached"]) == (0, HELD)
    same(found, right)


@SOAK
def test_damaged_blocks_and_a_node_that_stops_change_no_answer(bench):
    first = bench.engine("llama", transfer_to(bench.node.address))
    prompts = [prompt_of(number) for number in range(3)]
    right = [ask(first, prompt) for prompt in prompts]
    first.drain()
    bench.node.wait_idle()
    bench.node.kill()
    same(ask(first, prompts[0]), right[0])
    fresh = ask(first, prompt_of("fresh"))
    first.close()
    damage(bench.folder / "node" / "disk")
    bench.node.start()
    bench.node.wait_recovered()
    second = bench.engine("llama", transfer_to(bench.node.address))
    found = [ask(second, prompt) for prompt in prompts]
    assert all(each["cached"] < HELD for each in found)
    for each, truth in zip(found, right, strict=True):
        same(each, truth)
    same(ask(second, prompt_of("fresh")), fresh)
    second.drain()
    second.close()
    third = bench.engine("llama", transfer_to(bench.node.address))
    again = ask(third, prompts[0])
    third.close()
    assert again["cached"] == HELD, "the damaged blocks were saved again"
    same(again, right[0])
