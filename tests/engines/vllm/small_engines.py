"""Engines of small models before one node, for tests that compare what they answer."""

import time

import pytest
from small_models import write_model

from holdfast.limits import MIB
from holdfast_bench.harness.node import NodeUnderTest

NEAR = 1e-4
"""Largest difference of log-probabilities; chunks of other lengths change the last bits."""


class SmallEngines:
    """A node, models in `folder`, and engines before the node."""

    def __init__(self, real, folder):
        self.real, self.folder = real, folder
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        self.count = 0

    def wait_holding(self, blocks, within_s=120.0):
        """Wait until the node holds so many blocks: saves end after the answer."""
        end_s = time.monotonic() + within_s
        while self.node.status()["blocks"] < blocks:
            assert time.monotonic() < end_s
            time.sleep(0.02)

    def write(self, write, *arguments):
        """Call what writes a model, in another process.

        vLLM refuses weights that are younger than its own process.
        """
        writing = self.real.forks().Process(target=write, args=arguments)
        writing.start()
        writing.join()
        assert writing.exitcode == 0

    def model(self, name):
        """Return the folder of a small model; write it if it is not there."""
        if not (self.folder / name).exists():
            self.write(write_model, self.folder, name)
        return self.folder / name

    def start(self, name, layout="exact", **options):
        self.count += 1
        transfer = {
            "kv_connector": "HoldfastConnector",
            "kv_connector_module_path": "holdfast.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "holdfast": self.node.address, "cover_deadline_ms": 60_000, "layout": layout,
            },
        }  # fmt: skip
        return self.real.Engine(
            self.folder / f"{self.count}-{name}.log", model=str(self.model(name)),
            kv_transfer=transfer, max_model_len=2048, kv_cache_memory_bytes=32 * MIB,
            skip_tokenizer_init=True, **({"dtype": "float32"} | options),
        )  # fmt: skip


def check_equal(found, right):
    assert found["tokens"] == right["tokens"]
    for step, expected in zip(found["logprobs"], right["logprobs"], strict=True):
        assert dict(step) == pytest.approx(dict(expected), abs=NEAR)


def is_equal(found, right):
    try:
        check_equal(found, right)
    except AssertionError:
        return False
    return True
