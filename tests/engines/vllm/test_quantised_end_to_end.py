"""Real vLLM on the CPU behind a node whose domain quantises: half the bytes, and near outputs."""

import random
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import holdfast  # noqa: E402
from holdfast.client.local_model import portable_fingerprint  # noqa: E402
from holdfast.codec.int8 import Int8, coded_bytes  # noqa: E402
from holdfast.limits import MIB  # noqa: E402
from holdfast.testing.gates import permit  # noqa: E402
from holdfast_bench.harness.model import SHAPES, make  # noqa: E402
from holdfast_bench.harness.node import NodeUnderTest  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

BLOCK, TOKENS, ANSWER = 128, 700, 8
BLOCKS = TOKENS // BLOCK
SECRET = bytes(range(32))
LOGPROB_LIMIT = 0.5
"""Largest difference of log-probabilities: that of two programs in bf16, see `vllm.md`."""


def layout():
    shape = SHAPES["tiny"]
    return holdfast.Layout.portable(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype="bfloat16",
        block_tokens=BLOCK,
    )


def until(what, within_s=120.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture(scope="module")
def behind(real, tmp_path_factory):
    """Return a node that may quantise the model's blocks, an engine before it, and the folder."""
    folder = tmp_path_factory.mktemp("quantised")
    (folder / "default.key").touch(mode=0o600)
    (folder / "default.key").write_bytes(SECRET)
    permit(folder / "gates", SECRET, portable_fingerprint(make("tiny"), layout()))
    settings = {
        "plan": "held",
        "gates": str(folder / "gates"),
        "domains": {"default": {"key_file": str(folder / "default.key"), "quantise": "int8"}},
    }
    node = NodeUnderTest(folder / "node", 256 * MIB, 512 * MIB, settings=settings)
    engine = real.Engine(
        folder / "engine.log",
        model=str(make("tiny")),
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_memory_bytes=32 * MIB,
        kv_transfer={
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": node.address,
                "layout": "portable",
                "cover_deadline_ms": 60_000,
            },
        },
    )
    engine.wait_ready()
    yield node, engine
    engine.close()
    node.process.stop()


def assert_goes_on(engine, prompt, cold):
    """Ask until the engine has found its blocks; it may first have to reconnect."""

    def is_held():
        assert engine.reset()
        answers.append(engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=3)[0])
        return answers[-1]["cached"] == BLOCKS * BLOCK

    answers = []
    until(is_held)
    before, after = dict(cold["logprobs"][0]), dict(answers[-1]["logprobs"][0])
    assert before.keys() & after.keys()
    for token in before.keys() & after.keys():
        assert abs(before[token] - after[token]) < LOGPROB_LIMIT


def test_an_engine_goes_on_from_quantised_blocks_of_memory_and_of_the_disk(behind):
    node, engine = behind
    words = random.Random(1)
    prompt = [words.randrange(300, 30_000) for _ in range(TOKENS)]
    (cold,) = engine.ask(prompts=[prompt], tokens=ANSWER, logprobs=3)
    until(lambda: node.status()["blocks"] == BLOCKS)
    until(lambda: node.status()["quantise"]["quantised"] == BLOCKS)
    until(lambda: not node.status()["waiting_to_write"])
    [codec] = node.status()["codecs"]
    assert codec["quantised"] == BLOCKS
    stored = codec["stored_bytes"] / codec["raw_bytes"]
    assert stored < 1.02 * coded_bytes(layout()) / layout().raw_bytes + 8192 / codec["raw_bytes"]
    assert_goes_on(engine, prompt, cold)
    node.restart()
    until(lambda: node.status()["recovery_s"] is not None)
    assert_goes_on(engine, prompt, cold)
    assert node.status()["codecs"][0]["decoded"] == BLOCKS
    with holdfast.open(node.address) as store:
        session = store.session(portable_fingerprint(make("tiny"), layout()))
        found = np.zeros((BLOCKS, layout().raw_bytes), np.uint8)
        assert session.fetch(prompt, into=found, deadline_s=60.0).blocks == BLOCKS
    again = found.copy()
    assert all(Int8(layout()).quantised(block.data) for block in again)
    assert (again == found).all()
