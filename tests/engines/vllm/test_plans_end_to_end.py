"""Real vLLM with a prefix cache of its own: what that serves is not counted as a plan."""

import random
import time

import pytest

pytest.importorskip("vllm")

from holdfast.cli.inspect import plans_text
from holdfast.limits import MIB
from holdfast.status import read_plans
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK = 128
ANSWER = 2


def prompt_of(name, tokens):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(tokens)]


def until(what, within_s=180.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture
def node(tmp_path):
    node = NodeUnderTest(tmp_path / "node", 256 * MIB, 512 * MIB)
    yield node
    node.process.stop()


@pytest.fixture
def engine(real, node, tmp_path):
    transfer = {
        "kv_connector": "HoldfastConnector",
        "kv_connector_module_path": "holdfast.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"holdfast": node.address, "cover_deadline_ms": 60_000},
    }
    engine = real.Engine(
        tmp_path / "engine.log", kv_transfer=transfer, model=str(make("tiny")), dtype="float32",
        max_model_len=2048, kv_cache_memory_bytes=32 * MIB,
    )  # fmt: skip
    yield engine.wait_ready()
    engine.close()


def test_a_prompt_served_by_the_engine_cache_is_not_a_followed_plan(node, engine):
    def ask(prompt):
        blocks = node.status()["blocks"]
        (answer,) = engine.ask(prompts=[prompt], tokens=ANSWER)
        if not answer["cached"]:
            until(lambda: node.status()["blocks"] >= blocks + len(prompt) // BLOCK)
        return answer

    for tokens in (300, 600, 900, 1200):  # the engine tells how fast it computes
        ask(prompt_of(tokens, tokens))
    until(lambda: node.plans()["engines"] and node.plans()["engines"][0]["cost"])
    prompt = prompt_of("served twice", 1100)
    ask(prompt)
    before = node.plans()

    again = ask(prompt)
    assert again["cached"] == 1100 // BLOCK * BLOCK
    number = node.last_plan()
    assert number > max((plan["plan"] for plan in before["plans"]), default=0)

    def plan():
        return next(each for each in node.plans()["plans"] if each["plan"] == number)

    until(lambda: plan()["actual"]["first_token_s"] is not None)
    after = node.plans()
    assert plan()["actual"]["fetched_s"] is None
    told = {key: after["right"][key] for key in ("ended", "within_25_percent", "median_error")}
    assert told == {key: before["right"][key] for key in told}
    assert plan()["not_followed"] == "engine_had_it"
    assert after["right"]["not_followed"] == before["right"]["not_followed"] + 1
    said = "not carried out: the engine had more than it had reported; first token after"
    assert said in plans_text(read_plans(after))

    # The control: what the engine has forgotten is planned, and counts.
    assert engine.reset()
    ask(prompt)
    number = node.last_plan()
    until(lambda: plan()["actual"]["first_token_s"] is not None)
    assert plan()["not_followed"] is None
    assert node.plans()["right"]["ended"] == after["right"]["ended"] + 1
