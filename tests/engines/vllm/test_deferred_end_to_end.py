"""Real vLLM on the CPU with `save: before_eviction`: only what it is about to lose is saved."""

import random

import pytest

pytest.importorskip("vllm")

from holdfast.limits import MIB
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK, TOKENS, ANSWER = 128, 1100, 4
HELD = TOKENS // BLOCK
CONTEXTS = 8
"""Contexts that are more than the engine's 64 pages hold."""


def prompt_of(name):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(TOKENS)]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deferred")
    with NodeUnderTest(folder / "node", 256 * MIB, 64 * MIB, settings={"plan": "held"}) as node:
        yield node


@pytest.fixture(scope="module")
def engine(real, node, tmp_path_factory):
    options = {"holdfast": node.address, "save": "before_eviction", "cover_deadline_ms": 60_000}
    engine = real.Engine(
        tmp_path_factory.mktemp("engine") / "engine.log",
        model=str(make("tiny")),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=32 * MIB,
        kv_transfer={
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options,
        },
    )
    yield engine.wait_ready()
    engine.close()


def ask(engine, prompt):
    (answer,) = engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=3)
    return answer


def test_a_context_that_the_engine_keeps_is_not_saved(engine, node):
    for _ in range(3):
        ask(engine, prompt_of("kept"))
    engine.drain()
    assert node.status()["blocks"] == 0


def test_a_context_is_saved_before_the_engine_forgets_it_and_comes_back_the_same(engine, node):
    cold = ask(engine, prompt_of("lost"))
    for number in range(CONTEXTS):
        ask(engine, prompt_of(f"other {number}"))
    engine.drain()
    assert 0 < node.status()["blocks"] < (CONTEXTS + 2) * HELD
    warm = ask(engine, prompt_of("lost"))
    assert warm["cached"] == HELD * BLOCK
    assert warm["tokens"] == cold["tokens"]
    for ours, theirs in zip(warm["logprobs"], cold["logprobs"], strict=True):
        assert [value for _, value in ours] == pytest.approx(
            [value for _, value in theirs], abs=1e-4
        )
