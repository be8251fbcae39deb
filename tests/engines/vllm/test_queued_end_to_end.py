"""Real vLLM that serves one request at a time: what waits is read into the node's memory."""

import random
import time

import pytest

pytest.importorskip("vllm")

from holdfast.limits import MIB
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

PROMPT = 1100
BLOCKS = PROMPT // 128


def prompt_of(name, tokens=PROMPT):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(tokens)]


@pytest.fixture
def node(tmp_path):
    with NodeUnderTest(tmp_path / "node", 256 * MIB, 512 * MIB, settings={"plan": "held"}) as node:
        yield node


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
        max_model_len=2048, kv_cache_memory_bytes=32 * MIB, max_num_seqs=1,
    )  # fmt: skip
    yield engine.wait_ready()
    engine.close()


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def leave_memory(node, engine):
    """Leave the context on the node's disk only."""
    node.wait_on_disk(BLOCKS)
    assert engine.reset()
    node.restart()
    node.wait_recovered()
    until(engine.connected)


def test_a_context_below_memory_is_there_when_its_waiting_request_is_admitted(node, engine):
    def loaded(source):
        return engine.metrics().get(f"vllm:holdfast_prompt_tokens_by_source:{source}", 0)

    engine.ask(prompts=[prompt_of("waits")], tokens=2)
    leave_memory(node, engine)
    engine.ask(prompts=[prompt_of("waits")], tokens=2)
    assert (loaded("disk"), loaded("host")) == (BLOCKS * 128, 0), "it did not have to wait"

    leave_memory(node, engine)
    left = engine.queue(running=prompt_of("runs", 200), new=prompt_of("waits"), tokens=250)
    assert left["left"] == 0
    assert (loaded("disk"), loaded("host")) == (BLOCKS * 128, BLOCKS * 128)
    assert engine.metrics()["vllm:holdfast_prestaged_requests"] >= 1  # each five seconds
