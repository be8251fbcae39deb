"""Real vLLM with two tensor-parallel ranks and with one: each reads what the other wrote."""

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from holdfast.limits import MIB
from holdfast_bench.harness.completion import ask
from holdfast_bench.harness.model import make
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    wait_all_ready,
)

pytestmark = [pytest.mark.vllm, pytest.mark.soak]  # two ranks start within a minute or two

BLOCK, TOKENS, ANSWER = 128, 700, 8
HELD = TOKENS // BLOCK * BLOCK
CORES = {1: "nobind", 2: "0|1"}
"""What vLLM binds threads to: with two ranks it needs a core for each."""


SHARED = Path("/dev/shm")  # where vLLM has it
CLOSE = 1e-4
"""Log-probabilities differ by less between one rank and two, because sums have another order."""


def largest_difference(one, other):
    """Return the largest difference of log-probabilities of the same tokens."""
    steps = zip(one.logprobs, other.logprobs, strict=True)
    both = [(dict(first), dict(second)) for first, second in steps]
    return max(abs(a[token] - b[token]) for a, b in both for token in a.keys() & b.keys())


def holds(node, blocks):
    return node.status()["blocks"] == blocks


@pytest.fixture
def memory():
    """Remove the shared memory that vLLM's ranks leave behind when they are stopped."""
    before = set(SHARED.glob("vllm_dist_*"))
    yield
    for left in set(SHARED.glob("vllm_dist_*")) - before:
        left.unlink(missing_ok=True)


@pytest.mark.timeout(600)
def test_engines_of_one_rank_and_of_two_read_what_the_other_wrote(memory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        stack.enter_context(node)
        engines = {}
        for ranks, cores in CORES.items():
            options = VllmServerOptions(
                make("tiny"),
                holdfast_kv_transfer(node.address, 5000, layout="portable"),
                model_tokens_max=2048,
                dtype="float32",
                ranks=ranks,
                environment={"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"},
            )
            name = f"ranks{ranks}"
            engines[ranks] = VllmServer(name, options, folder / f"{name}.log")
            stack.enter_context(engines[ranks].process)
        wait_all_ready(list(engines.values()))
        for turn, (writer, reader) in enumerate(((2, 1), (1, 2)), 1):
            prompt = random.Random(f"{writer} writes").choices(range(300, 30_000), k=TOKENS)
            cold = ask(engines[writer], prompt, ANSWER)
            written = turn * (HELD // BLOCK)  # one copy of a block, of all heads
            wait_until(engines[writer].process, partial(holds, node, written), 60)
            warm = ask(engines[reader], prompt, ANSWER)
            assert cold.tokens.fetched == {}
            assert warm.tokens.fetched == {"host": HELD}
            assert warm.answer.tokens == cold.answer.tokens
            assert largest_difference(warm.answer, cold.answer) < CLOSE
        assert node.status()["blocks"] == written
