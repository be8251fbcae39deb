"""Real vLLM with two pipeline stages: each saves its layers, and all are loaded or none."""

import random
from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("vllm")

from served_engines import ServedEngines, check_equal, words, written_model

from holdfast.limits import MIB
from holdfast_bench.harness.completion import ask
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    wait_all_ready,
)

pytestmark = [pytest.mark.vllm, pytest.mark.soak]  # two stages start within a minute or two

BLOCK, TOKENS, ANSWER = 128, 700, 8
HELD = TOKENS // BLOCK * BLOCK


def holds(node, blocks):
    return node.status()["blocks"] == blocks


def logprobs(completion):
    return [dict(step) for step in completion.answer.logprobs]


@pytest.mark.timeout(900)
def test_a_prompt_is_loaded_if_every_stage_holds_its_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    prompt = random.Random(3).choices(range(300, 30_000), k=TOKENS)
    with ExitStack() as stack:
        node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        stack.enter_context(node)
        options = VllmServerOptions(
            make("tiny"),
            holdfast_kv_transfer(node.address, 60_000),
            model_tokens_max=2048,
            dtype="float32",
            stages=2,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        )
        engine = VllmServer("stages", options, folder / "stages.log")
        with engine.process:
            wait_all_ready([engine], within_s=600)
            cold = ask(engine, prompt, ANSWER)
            # Five blocks of each stage: they have layers of their own, so other names.
            wait_until(engine.process, partial(holds, node, 2 * HELD // BLOCK), 60)
            listed = {each["fingerprint"]: each["blocks"] for each in node.listing()}
            assert sorted(listed.values()) == [HELD // BLOCK] * 2
            engine.reset_prefix_cache()
            warm = ask(engine, prompt, ANSWER)
            # Without the blocks of one stage the prompt is computed.
            engine.reset_prefix_cache()
            node.drop(min(listed))
            again = ask(engine, prompt, ANSWER)
        assert cold.tokens.fetched == {}
        assert warm.tokens.fetched == {"host": HELD}
        assert again.tokens.fetched == {}
        for other in (warm, again):
            assert other.answer.tokens == cold.answer.tokens
            assert logprobs(other) == logprobs(cold)


@pytest.mark.timeout(900)
def test_a_context_of_a_model_with_windows_is_loaded_if_every_stage_holds_each_kv_group(
    tmp_path_factory,
):
    folder, prompt = tmp_path_factory.mktemp("windows"), words("windows", TOKENS)
    model = written_model(folder, "gemma3_for_stages")
    with ExitStack() as stack:
        engines = ServedEngines(folder, stack)
        engines.start("two", model, layout="exact", stages=2)
        engines.wait_ready()
        cold = engines.save("two", prompt, 2 * 2 * HELD // BLOCK)
        listed = {each["fingerprint"]: each["blocks"] for each in engines.node.listing()}
        assert sorted(listed.values()) == [HELD // BLOCK] * 4  # two groups on each stage
        engines.forget("two")
        check_equal(engines.load("two", prompt).answer, cold.answer)
        # Of each group of each stage: without its blocks the prompt is computed, and saved again.
        for lost in sorted(listed):
            engines.forget("two")
            engines.node.drop(lost)
            check_equal(engines.save("two", prompt, HELD // BLOCK).answer, cold.answer)
