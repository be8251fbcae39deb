"""Real vLLM, for as long as asked: every output is what it is without Holdfast, whatever happens.

The short form is test_end_to_end.py, a test for each thing that may happen.
"""

import collections
import random
import time

import pytest

pytest.importorskip("vllm")

from holdfast.limits import MIB
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pause import pause, resume

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

CONTEXTS, CONTEXT_TOKENS, QUESTION_TOKENS, ANSWER = 6, 1_500, 20, 12
BLOCK = 128


class Scene:
    """A node, an engine behind it, one without a connector, and what may happen to the node."""

    def __init__(self, real, folder, rng):
        self.node = NodeUnderTest(folder / "node", 96 * MIB, 192 * MIB)
        self._real, self._rng = real, rng
        self._disk = folder / "node" / "disk" / "blocks.holdfast"
        options = {"model": str(make("tiny")), "dtype": "float32", "max_model_len": 2048}
        options["kv_cache_memory_bytes"] = 32 * MIB
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"holdfast": self.node.address},
        }
        self.behind = real.Engine(folder / "behind.log", kv_transfer=transfer, **options)
        self.alone = real.Engine(folder / "alone.log", **options)
        for engine in (self.behind, self.alone):
            engine.wait_ready()

    def nothing(self):
        pass

    def forget(self):
        self.node.drop_all()

    def restart(self):
        self.node.restart()

    def gone(self):
        """Dead while the next question is asked."""
        self.node.kill()

    def stopped(self):
        """Silent while the next question is asked."""
        pause(self.node.process.pid)

    def damage_memory(self):
        if self.node.status()["blocks"]:
            with self._real.arena(self.node) as memory:
                for at in range(self._rng.randrange(4 << 10), len(memory), 64 << 10):
                    memory[at] ^= 1 << self._rng.randrange(8)

    def damage_disk(self):
        self.node.kill()
        with self._disk.open("r+b") as file:
            for at in range(MIB + self._rng.randrange(4 << 10), self._disk.stat().st_size, 99_999):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))
        self.node.start()

    def mend(self, name):
        """Have a node that answers again."""
        if name == "gone":
            self.node.start()
        if name == "stopped":
            resume(self.node.process.pid)

    def close(self):
        for engine in (self.behind, self.alone):
            engine.close()
        self.node.process.stop()


FAULTS = ("nothing", "forget", "restart", "gone", "stopped", "damage_memory", "damage_disk")


@pytest.mark.timeout(0)
def test_outputs_are_equal_under_every_fault(real, tmp_path, soak_s):
    rng = random.Random("equality")
    words = [rng.choices(range(300, 30_000), k=CONTEXT_TOKENS) for _ in range(CONTEXTS)]
    scene = Scene(real, tmp_path, rng)
    end_s, done, cached = time.monotonic() + soak_s, collections.Counter(), 0
    while time.monotonic() < end_s or len(done) < len(FAULTS):
        fault = FAULTS[sum(done.values()) % len(FAULTS)]
        kept = rng.randrange(BLOCK, CONTEXT_TOKENS)
        question = rng.choices(range(300, 30_000), k=QUESTION_TOKENS)
        prompt = rng.choice(words)[:kept] + question
        getattr(scene, fault)()
        (answer,) = scene.behind.ask(prompts=[prompt], tokens=ANSWER)
        (right,) = scene.alone.ask(prompts=[prompt], tokens=ANSWER)
        assert (answer["tokens"], answer["finish"]) == (right["tokens"], "length"), (fault, done)
        scene.mend(fault)
        scene.behind.reset()
        done[fault] += 1
        cached += answer["cached"]
    scene.close()
    assert cached > 0
