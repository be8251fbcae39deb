"""LMCache's server with vLLM on the CPU in front, and a node behind."""

import random
import shutil
from contextlib import ExitStack
from pathlib import Path

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
from holdfast_bench.harness.transformers_engine import largest_difference
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

NO_FAULT = "none"
FAULTS = ("other prompt", "no last layer")
"""See `faulty_adapter`."""


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


def started(stack, folder, node, options, fault=None):
    """Start LMCache's server and vLLM, both new; return the engine.

    `fault`: the file that names the fault of what is loaded; without it there is none.
    """
    folder.mkdir()
    params = {"holdfast": node.address, "identity": "tiny"}
    adapter = {
        "type": "plugin",
        "module_path": "holdfast.engines.lmcache",
        "class_name": "HoldfastL2Adapter",
        "adapter_params": params,
    }
    if fault is not None:
        adapter |= {"module_path": "faulty_adapter", "class_name": "FaultyL2Adapter"}
        params["fault"] = str(fault)
    server = lmcache_server.LMCacheServer(stack, folder, adapter, [Path(__file__).parent])
    (engine,) = start_servers(stack, folder, options, {"vllm": server.kv_transfer()})
    return engine


def same(one, other, within):
    """Whether two answers have equal tokens, and log-probabilities that differ by less."""
    equal = one.answer.tokens == other.answer.tokens
    return equal and largest_difference(one.answer, other.answer) < within


def test_every_kind_that_the_table_calls_cached_has_a_model_here():
    cached = {each for each in cached_models.MODEL_KINDS if each.lmcache == cached_models.YES}
    assert cached == {*MODELS.values()}


@pytest.mark.parametrize("name", MODELS)
def test_a_new_server_of_lmcache_and_a_new_engine_continue_contexts(tmp_path, name):
    model, vocabulary = written_model(tmp_path, name)
    prompts = {each: prompt_of(f"{name}, {each}", vocabulary) for each in (NO_FAULT, *FAULTS)}
    options = VllmServerOptions(
        model=model,
        model_tokens_max=4096,
        dtype=DTYPES[name],
        environment=lmcache_server.variables(),
    )
    fault = tmp_path / "fault"
    fault.write_text(NO_FAULT)
    with NodeUnderTest(tmp_path / "node", 256 * MIB, 256 * MIB) as node:
        with ExitStack() as stack:
            engine = started(stack, tmp_path / "first", node, options)
            right = {each: ask(engine, prompt, ANSWER) for each, prompt in prompts.items()}
            chunks = CHUNKS * len(prompts)
            wait_until(node.process, lambda: node.blocks_on_disk() >= chunks, 60)
        assert all(each.tokens.fetched_total == 0 for each in right.values())
        with ExitStack() as stack:
            engine = started(stack, tmp_path / "second", node, options, fault)
            found = ask(engine, prompts[NO_FAULT], ANSWER)
            assert found.tokens.fetched_total == HELD
            assert same(found, right[NO_FAULT], CLOSE)
            # What the comparison must be able to see.
            for planted in FAULTS:
                fault.write_text(planted)
                found = ask(engine, prompts[planted], ANSWER)
                assert found.tokens.fetched_total == HELD
                assert not same(found, right[planted], 10 * CLOSE), planted
