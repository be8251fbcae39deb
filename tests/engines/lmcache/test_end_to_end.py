"""LMCache's server with vLLM on the CPU in front, and a node behind."""

import random
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from holdfast.limits import MIB
from holdfast_bench.harness.completion import ask
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import VllmServerOptions, start_servers
from holdfast_bench.peers import lmcache_server

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

TOKENS, HELD, CHUNKS = 1100, 1024, 4
ANSWER = 8
CLOSE = 2e-5
"""Largest difference of log-probabilities between a computed and a loaded context, in float32."""


def prompt_of(name):
    words = random.Random(name)
    return [words.randrange(300, 30_000) for _ in range(TOKENS)]


def served(stack, folder, node, prompt):
    """Start LMCache's server and vLLM, both new; return the answer to a prompt."""
    folder.mkdir()
    params = {"holdfast": node.address, "identity": "tiny"}
    adapter = {
        "type": "plugin",
        "module_path": "holdfast.engines.lmcache",
        "class_name": "HoldfastL2Adapter",
        "adapter_params": params,
    }
    transfer = lmcache_server.LMCacheServer(stack, folder, adapter).kv_transfer()
    options = VllmServerOptions(
        model=make("tiny"),
        model_tokens_max=4096,
        dtype="float32",
        environment=lmcache_server.variables(),
    )
    (engine,) = start_servers(stack, folder, options, {"vllm": transfer})
    return ask(engine, prompt, ANSWER)


def test_a_new_server_of_lmcache_and_a_new_engine_continue_a_context(tmp_path):
    prompt = prompt_of("lmcache")
    with NodeUnderTest(tmp_path / "node", 256 * MIB, 256 * MIB) as node:
        with ExitStack() as stack:
            right = served(stack, tmp_path / "first", node, prompt)
            wait_until(node.process, lambda: node.blocks_on_disk() >= CHUNKS, 60)
        with ExitStack() as stack:
            found = served(stack, tmp_path / "second", node, prompt)
    assert (right.tokens.fetched_total, found.tokens.fetched_total) == (0, HELD)
    assert found.answer.tokens == right.answer.tokens
    steps = zip(found.answer.logprobs, right.answer.logprobs, strict=True)
    for step, truth in steps:
        values = dict(truth)
        assert all(abs(value - values.get(token, value)) < CLOSE for token, value in step)
