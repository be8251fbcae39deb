"""Real vLLM on the CPU: a durable request is acknowledged, and its context outlives its node."""

import random
import time

import pytest

pytest.importorskip("vllm")

from holdfast.limits import MIB
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK, TOKENS, ANSWER = 128, 1100, 4
HELD = TOKENS // BLOCK * BLOCK
DURABLE = {"kv_transfer_params": {"holdfast": {"retention": "durable"}}}
WITHIN_S = 120.0


def prompt_of(name):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(TOKENS)]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("durable")
    with NodeUnderTest(folder / "node", 256 * MIB, 256 * MIB, settings={"plan": "held"}) as node:
        yield node


@pytest.fixture(scope="module")
def engine(real, node, tmp_path_factory):
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
            "kv_connector_extra_config": {"holdfast": node.address, "cover_deadline_ms": 60_000},
        },
    )
    yield engine.wait_ready()
    engine.close()


def ask(engine, prompt, **settings):
    (answer,) = engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=3, **settings)
    return answer


def acknowledged_tokens(answer):
    return (answer["transferred"] or {}).get("holdfast", {}).get("durable_tokens", 0)


def await_that(is_true):
    end_s = time.monotonic() + WITHIN_S
    while not is_true():
        assert time.monotonic() < end_s, "not reached"
        time.sleep(0.1)


def test_an_acknowledged_context_is_served_by_its_node_after_a_kill(engine, node):
    prompt = prompt_of("contract")
    cold = ask(engine, prompt, extra_args=DURABLE)
    await_that(lambda: acknowledged_tokens(ask(engine, prompt, extra_args=DURABLE)) == HELD)
    assert engine.durable_blocks()["kept"] >= HELD // BLOCK
    assert node.status()["durable"]["marked"] >= HELD // BLOCK
    node.kill()
    node.start()
    node.wait_recovered()

    warm = cold

    def is_loaded():
        nonlocal warm
        await_that(engine.reset)  # or the engine has the context itself
        warm = ask(engine, prompt, extra_args=DURABLE)
        return warm["cached"] == HELD

    await_that(is_loaded)  # the engine has found its node again
    assert warm["tokens"] == cold["tokens"]
    for ours, theirs in zip(warm["logprobs"], cold["logprobs"], strict=True):
        assert [value for _, value in ours] == pytest.approx(
            [value for _, value in theirs], abs=1e-4
        )
    status = node.status()["durable"]
    assert status["marked"] >= HELD // BLOCK, "marks outlive the node, too"
    assert (status["waiting"], status["lost"]) == (0, 0)


def test_a_request_that_is_not_durable_is_not_acknowledged(engine):
    assert "durable_tokens" not in str(ask(engine, prompt_of("chat"))["transferred"])
