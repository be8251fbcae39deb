"""vLLM servers with several ranks, stages or replicas before one node, by name."""

import random
import shutil
import subprocess
import sys
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from holdfast.limits import MIB
from holdfast_bench.harness.completion import ANY_REPLICA, MeasuredCompletion, ask
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    wait_all_ready,
)

BLOCK, TOKENS, ANSWER = 128, 700, 8
HELD = TOKENS // BLOCK * BLOCK
CLOSE = 1e-4
"""Log-probabilities differ by less between one rank and two, because sums have another order."""

WRITE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from small_models import write_model
write_model(Path(sys.argv[1]), sys.argv[2])
"""


def written_model(folder, kind):
    """Write a small model of a kind in another process; return its folder."""
    subprocess.run([sys.executable, "-c", WRITE, str(folder), kind], check=True)
    for file in make("tiny").glob("tokenizer*"):
        shutil.copy(file, folder / kind)
    return folder / kind


def words(name, tokens=TOKENS):
    return random.Random(name).choices(range(300, 2_000), k=tokens)


def largest_difference(one, other):
    """Return the largest difference of log-probabilities of the same tokens; none: infinite."""
    steps = zip(one.logprobs, other.logprobs, strict=True)
    both = [(dict(first), dict(second)) for first, second in steps]
    return max(
        max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=inf)
        for a, b in both
    )


def check_equal(found, right):
    assert found.tokens == right.tokens
    assert largest_difference(found, right) < CLOSE


class Replica(NamedTuple):
    """A server, and the data-parallel rank of it that is asked."""

    server: VllmServer
    number: int = ANY_REPLICA

    def ask(self, prompt) -> MeasuredCompletion:
        return ask(self.server, prompt, ANSWER, replica=self.number)


class ServedEngines:
    """A node, and servers that end with `stack`. Those with replicas are asked by `name/number`."""

    def __init__(self, folder, stack):
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        stack.enter_context(self.node)
        self.replicas, self.servers, self._folder, self._stack = {}, {}, folder, stack

    def start(self, name, model=None, layout="portable", transfer=None, **options):
        cores = "0|1" if options.get("ranks", 1) > 1 else "nobind"
        settings = VllmServerOptions(
            model or make("tiny"),
            transfer or holdfast_kv_transfer(self.node.address, 60_000, layout=layout),
            model_tokens_max=2048,
            kv_bytes=64 * MIB,
            environment={"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"},
            **({"dtype": "float32"} | options),
        )
        self.servers[name] = VllmServer(name, settings, self._folder / f"{name}.log")
        self._stack.enter_context(self.servers[name].process)
        count = options.get("replicas", 1)
        if count == 1:
            self.replicas[name] = Replica(self.servers[name])
        for number in range(count) if count > 1 else ():
            self.replicas[f"{name}/{number}"] = Replica(self.servers[name], number)

    def wait_ready(self):
        wait_all_ready(list(self.servers.values()), within_s=600)

    def stop(self, name):
        self.servers.pop(name).process.stop()

    def ask(self, name, prompt) -> MeasuredCompletion:
        return self.replicas[name].ask(prompt)

    def forget(self, name):
        """Empty the engine's own cache."""
        self.replicas[name].server.reset_prefix_cache()

    def save(self, name, prompt, blocks) -> MeasuredCompletion:
        """Have an engine compute a prompt, and wait until the node has its blocks."""
        before = self.blocks()
        cold = self.ask(name, prompt)
        assert cold.tokens.fetched == {}
        held = partial(self._holds, before + blocks)
        wait_until(self.replicas[name].server.process, held, 60, f"saving {blocks} blocks")
        return cold

    def load(self, name, prompt) -> MeasuredCompletion:
        """Have an engine answer a prompt whose blocks are all held, in memory."""
        warm = self.ask(name, prompt)
        assert warm.tokens.fetched == {"host": HELD}
        return warm

    def pass_on(self, writer, reader, groups=1):
        """One computes a prompt, the other loads it; return the answers of both.

        `groups`: KV groups of the model. A block has one copy, with the heads and layers of all
        ranks and stages.
        """
        prompt, blocks = words(f"{writer} writes"), groups * HELD // BLOCK
        cold = self.save(writer, prompt, blocks)
        written = self.blocks()
        warm = self.load(reader, prompt)
        assert self.blocks() == written
        return cold.answer, warm.answer

    def blocks(self):
        return self.node.status()["blocks"]

    def _holds(self, blocks):
        return self.blocks() == blocks
