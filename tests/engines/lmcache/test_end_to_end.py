"""LMCache's server with vLLM on the CPU in front, and a node behind."""

import random
import shutil
from contextlib import ExitStack

import pytest
import small_models

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from holdfast.engines import cached_models
from holdfast.limits import MIB
from holdfast_bench.harness.completion import ask
from holdfast_bench.harness.model import SHAPES, make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import VllmServerOptions, start_servers
from holdfast_bench.peers import lmcache_server

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

TOKENS, HELD, CHUNKS = 1100, 1024, 4
ANSWER = 8
CLOSE = 2e-5
"""Largest difference of log-probabilities between a computed and a loaded context."""

MODELS = {"llama": cached_models.FULL, "mla": cached_models.FULL}
"""Models with keys and values, and with latents: their kinds."""


DTYPES = {"llama": "float32", "mla": "bfloat16"}
"""vLLM's latent attention for CPUs with AMX takes no float32."""


def written_model(folder, name):
    """Return the folder of a model, and the size of its vocabulary."""
    tiny = make("tiny")
    if name == "llama":
        return tiny, SHAPES["tiny"].vocabulary
    small_models.write_model(folder, name)
    for file in tiny.glob("tokenizer*"):  # only to print what is generated
        shutil.copy(file, folder / name)
    return folder / name, small_models.VOCABULARY


def prompt_of(name, vocabulary):
    words = random.Random(name)
    return [words.randrange(300, vocabulary) for _ in range(TOKENS)]


def served(stack, folder, node, options, prompt):
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
    (engine,) = start_servers(stack, folder, options, {"vllm": transfer})
    return ask(engine, prompt, ANSWER)


def test_every_kind_that_the_table_calls_cached_has_a_model_here():
    cached = {each for each in cached_models.MODEL_KINDS if each.lmcache == cached_models.YES}
    assert cached == {*MODELS.values()}


@pytest.mark.parametrize("name", MODELS)
def test_a_new_server_of_lmcache_and_a_new_engine_continue_a_context(tmp_path, name):
    model, vocabulary = written_model(tmp_path, name)
    prompt = prompt_of(name, vocabulary)
    options = VllmServerOptions(
        model=model,
        model_tokens_max=4096,
        dtype=DTYPES[name],
        environment=lmcache_server.variables(),
    )
    with NodeUnderTest(tmp_path / "node", 256 * MIB, 256 * MIB) as node:
        with ExitStack() as stack:
            right = served(stack, tmp_path / "first", node, options, prompt)
            wait_until(node.process, lambda: node.blocks_on_disk() >= CHUNKS, 60)
        with ExitStack() as stack:
            found = served(stack, tmp_path / "second", node, options, prompt)
    assert (right.tokens.fetched_total, found.tokens.fetched_total) == (0, HELD)
    assert found.answer.tokens == right.answer.tokens
    steps = zip(found.answer.logprobs, right.answer.logprobs, strict=True)
    for step, truth in steps:
        values = dict(truth)
        assert all(abs(value - values.get(token, value)) < CLOSE for token, value in step)
