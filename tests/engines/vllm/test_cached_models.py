"""Real vLLM with small models of each kind: the table of cached models is true.

A model that is cached answers after a restart of its engine as before, by the log-probabilities of
all steps. One that is not cached runs as without Holdfast, and the log names its kind. Plain full
attention is what all other tests here use.
"""

import random

import pytest

pytest.importorskip("vllm")

from small_models import VOCABULARY, write_models

from holdfast.cli.model_caching import kind_of_shape
from holdfast.engines import cached_models
from holdfast.engines.cached_models import FLAG, FLAG_COST, Caching
from holdfast.limits import MIB
from holdfast.sim.model.catalogue import load_model
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

KINDS = {
    "mla": cached_models.FULL,
    "gemma3": cached_models.WINDOWS,
    "gpt_oss": cached_models.WINDOWS,
    "llama4": cached_models.CHUNKS,
    "mistral": cached_models.WINDOW_ONLY,
    "gemma4": cached_models.SIZES,
    "lfm2": cached_models.RECURRENT,
}
BLOCK, TOKENS, ANSWER = 128, 1_000, 8
HELD = TOKENS // BLOCK * BLOCK
MLA_PAGE = 16  # vLLM's on a CPU without AMX
NEAR = 1e-4
"""Largest difference of log-probabilities; chunks of other lengths change the last bits."""

WITH_FLAG = {"disable_hybrid_kv_cache_manager": True}


def needs_flag(name):
    return KINDS[name].caching is Caching.WITH_FLAG


def words(name):
    return random.Random(name).choices(range(10, VOCABULARY), k=TOKENS)


class Harness:
    def __init__(self, real, folder):
        self.real, self.folder = real, folder
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        self.count = 0
        # In another process: vLLM refuses weights that are younger than its own process.
        writing = real.forks().Process(target=write_models, args=(folder,))
        writing.start()
        writing.join()
        assert writing.exitcode == 0

    def start(self, name, layout="exact", **options):
        self.count += 1
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": self.node.address, "cover_deadline_ms": 5000, "layout": layout,
            },
        }  # fmt: skip
        return self.real.Engine(
            self.folder / f"{self.count}-{name}.log", model=str(self.folder / name),
            kv_transfer=transfer, dtype="float32", max_model_len=2048,
            kv_cache_memory_bytes=32 * MIB, skip_tokenizer_init=True, **options,
        )  # fmt: skip


@pytest.fixture(scope="module")
def harness(real, tmp_path_factory):
    harness = Harness(real, tmp_path_factory.mktemp("m"))
    yield harness
    harness.node.process.stop()


def ask(engine, name):
    [answer] = engine.ask(prompts=[words(name)], tokens=ANSWER, logprobs=3, detokenize=False)
    return answer


def test_doctor_finds_the_same_kind_in_the_config_of_a_model(harness):
    named = {kind.name for kind in harness.folder.iterdir() if kind.name in KINDS}
    found = {
        name: kind_of_shape(load_model(str(harness.folder / name)))
        for name in named - {"lfm2"}  # its config has fields that only vLLM reads
    }
    assert found == {name: kind for name, kind in KINDS.items() if name != "lfm2"}


def check_equal(found, right):
    assert found["tokens"] == right["tokens"]
    for step, expected in zip(found["logprobs"], right["logprobs"], strict=True):
        assert dict(step) == pytest.approx(dict(expected), abs=NEAR)


@pytest.mark.parametrize("name", [n for n in KINDS if needs_flag(n)])
def test_a_kind_that_needs_the_flag_answers_equally_after_a_restart(harness, name):
    first = harness.start(name, **WITH_FLAG).wait_ready()
    cold = ask(first, name)
    first.close()
    again = harness.start(name, **WITH_FLAG).wait_ready()
    loaded = ask(again, name)
    assert (cold["cached"], loaded["cached"]) == (0, HELD)
    check_equal(loaded, cold)
    # The control: other bytes give other log-probabilities.
    assert again.reset()
    again.shift(by=64 << 10)
    shifted = ask(again, name)
    assert shifted["cached"] == HELD
    with pytest.raises(AssertionError):
        check_equal(shifted, cold)
    again.close()


@pytest.mark.parametrize("layout", ["exact", "portable"])
def test_latent_pages_are_loaded_as_they_were_computed(harness, layout):
    # Answers say nothing here: vLLM's kernels for CPUs without AMX give other log-probabilities in
    # prefill than in decode, without a connector, too.
    engine = harness.start("mla", layout).wait_ready()
    assert f"{layout} blocks of {BLOCK} tokens" in engine.log.read_text()
    cold, computed = ask(engine, "mla"), engine.digests(count=HELD // MLA_PAGE)
    loaded, found = ask(engine, "mla"), engine.digests(count=HELD // MLA_PAGE)
    assert (cold["cached"], loaded["cached"]) == (0, HELD)
    assert found == computed
    assert len(set(found)) == HELD // MLA_PAGE
    engine.close()


@pytest.mark.parametrize("name", [
    "gemma3",
    "lfm2",
    *(pytest.param(n, marks=pytest.mark.soak) for n in ("gpt_oss", "llama4", "mistral", "gemma4")),
])  # fmt: skip
def test_a_kind_that_is_not_cached_runs_and_the_log_says_why(harness, name):
    before = harness.node.status()["blocks"]
    engine = harness.start(name).wait_ready()
    assert ask(engine, name)["finish"] == "length"
    engine.close()
    assert harness.node.status()["blocks"] == before
    [warning] = [line for line in engine.log.read_text().splitlines() if "Holdfast is off" in line]
    kind = KINDS[name]
    assert f"the model has {kind.layers} (" in warning
    assert kind.why in warning
    assert (f"start vLLM with {FLAG} to cache it: {FLAG_COST}" in warning) == needs_flag(name)
