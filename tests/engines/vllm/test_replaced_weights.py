"""Real vLLM over a folder whose weights are replaced: no engine gets KV of weights it lacks."""

import random
import shutil
import subprocess
import time

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file

from holdfast.limits import MIB
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest

pytestmark = pytest.mark.vllm

BLOCK = 128
ANSWER = 12
PROMPT = [random.Random("weights").randrange(300, 30_000) for _ in range(500)]
HELD = len(PROMPT) // BLOCK * BLOCK


class Harness:
    """A node, and one engine after the other over the same folder."""

    def __init__(self, real, folder):
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(make("tiny"), self.model)
        self.file = self.model / "model.safetensors"
        self.node = NodeUnderTest(folder / "node", 256 * MIB, 512 * MIB, settings={"plan": "held"})
        self._real = real
        self._count = 0

    def start(self, **options):
        self._count += 1
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": self.node.address, "cover_deadline_ms": 60_000,
            },
        }  # fmt: skip
        engine = self._real.Engine(
            self.folder / f"engine-{self._count}.log", kv_transfer=transfer, model=str(self.model),
            dtype="float32", max_model_len=1024, kv_cache_memory_bytes=32 * MIB, **options,
        )  # fmt: skip
        return engine.wait_ready()

    def ask(self, **options):
        """Return what a new engine answers, once what it computed is saved."""
        engine, before = self.start(**options), self.blocks()
        (answer,) = engine.ask(prompts=[PROMPT], tokens=ANSWER)
        if not answer["cached"]:
            end_s = time.monotonic() + 60
            while self.blocks() < before + HELD // BLOCK:
                assert time.monotonic() < end_s
                time.sleep(0.01)
        engine.close()
        return answer["tokens"], answer["cached"]

    def blocks(self):
        return self.node.status()["blocks"]


@pytest.fixture
def harness(real, tmp_path):
    harness = Harness(real, tmp_path)
    yield harness
    harness.node.process.stop()


def replace(file, source, scratch):
    """Copy over a file in place, and give it the times that it had."""
    subprocess.run(["touch", "-r", file, scratch / "times"], check=True)
    subprocess.run(["cp", source, file], check=True)
    subprocess.run(["touch", "-r", scratch / "times", file], check=True)


def test_an_engine_loads_no_blocks_that_other_weights_computed(harness, tmp_path):
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(harness.file).items()}
    shutil.copy(harness.file, old)
    others = {
        name: tensor.roll(1, 0) if "self_attn" in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(others, new, metadata={"format": "pt"})
    assert new.stat().st_size == old.stat().st_size

    answer, cached = harness.ask()
    assert cached == 0
    before = harness.file.stat()
    replace(harness.file, new, tmp_path)
    after = harness.file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino, before.st_size, before.st_mtime_ns,
    )  # fmt: skip
    replaced, cached = harness.ask()
    assert cached == 0
    assert replaced != answer

    # The old weights again, beside the new ones and in another format.
    torch.save(tensors, harness.model / "weights.pt")
    assert harness.ask(load_format="pt") == (answer, 0)
    assert harness.ask(load_format="safetensors") == (replaced, HELD)

    # The control: what the same weights made comes back.
    replace(harness.file, old, tmp_path)
    assert harness.ask() == (answer, HELD)
