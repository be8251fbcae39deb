"""A warm context comes from host memory, however busy the machine is."""

import contextlib
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from holdfast_bench.harness import model
from holdfast_bench.harness.completion import ask
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.server import (
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    wait_all_ready,
)
from holdfast_bench.scenarios import demo_scenario
from holdfast_bench.scenarios.miss_causes import MissWatch

pytestmark = pytest.mark.vllm

BUSY = 6
TIMES = 4
TOKENS = 1024


@contextlib.contextmanager
def busy_machine():
    loop = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.timeout(600)
def test_a_warm_context_comes_from_host_memory_beside_busy_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("b")
    made = model.make("tiny", folder / "tiny")
    prompts = demo_scenario.prompts_of(made, None, TOKENS)
    with NodeUnderTest(folder / "node", settings={"plan": "held"}) as node:
        kv_transfer = holdfast_kv_transfer(node.address)
        # What a user gets who sets no deadline of their own.
        del kv_transfer["kv_connector_extra_config"]["cover_deadline_ms"]
        engine = VllmServer("engine", VllmServerOptions(made, kv_transfer), folder / "engine.log")
        with engine.process:
            wait_all_ready([engine])
            first = ask(engine, prompts.first, 4)
            node.wait_on_disk(TOKENS // 128)
            with busy_machine():
                for _ in range(TIMES):
                    engine.reset_prefix_cache()
                    watch = MissWatch(node, engine.process.log)
                    again = ask(engine, prompts.first, 4)
                    assert again.answer.tokens == first.answer.tokens
                    assert again.tokens.fetched == {"host": TOKENS}, (again.tokens, watch.why())
