"""Real vLLM with two ranks or pipeline stages and with one: each reads what the other wrote."""

import random
import shutil
import subprocess
import sys
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

pytestmark = [pytest.mark.vllm, pytest.mark.soak]  # engines start within a minute or two

BLOCK, TOKENS, ANSWER = 128, 700, 8
HELD = TOKENS // BLOCK * BLOCK
WRITE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from small_models import write_models
write_models(Path(sys.argv[1]))
"""
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


class Engines:
    """vLLM servers that share portable contexts of one node, by the number of ranks or stages."""

    def __init__(self, folder, stack):
        self.node = NodeUnderTest(folder / "node", 128 * MIB, 256 * MIB, settings={"plan": "held"})
        stack.enter_context(self.node)
        self.servers, self._folder, self._stack = {}, folder, stack

    def start(self, name, model=None, **options):
        cores = "0|1" if options.get("ranks", 1) > 1 else "nobind"
        settings = VllmServerOptions(
            model or make("tiny"),
            holdfast_kv_transfer(self.node.address, 60_000, layout="portable"),
            model_tokens_max=2048,
            dtype="float32",
            environment={"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"},
            **options,
        )
        self.servers[name] = VllmServer(name, settings, self._folder / f"{name}.log")
        self._stack.enter_context(self.servers[name].process)

    def pass_on(self, writer, reader, groups=1):
        """One computes a prompt, the other loads it; return the answers of both."""
        words = random.Random(f"{writer} writes").choices(range(300, 2_000), k=TOKENS)
        before = self.node.status()["blocks"]
        writing, reading = self.servers[writer], self.servers[reader]
        cold = ask(writing, words, ANSWER)
        written = before + groups * HELD // BLOCK  # one copy of a block, of all heads and layers
        wait_until(writing.process, partial(holds, self.node, written), 60)
        warm = ask(reading, words, ANSWER)
        assert cold.tokens.fetched == {}
        assert warm.tokens.fetched == {"host": HELD}
        assert holds(self.node, written)
        return cold.answer, warm.answer


def check_equal(cold, warm):
    assert warm.tokens == cold.tokens
    assert largest_difference(warm, cold) < CLOSE


@pytest.mark.timeout(900)
@pytest.mark.parametrize("divided", [{"ranks": 2}, {"stages": 2}], ids=["ranks", "stages"])
def test_engines_of_one_rank_and_of_two_read_what_the_other_wrote(
    memory, tmp_path_factory, divided
):
    with ExitStack() as stack:
        engines = Engines(tmp_path_factory.mktemp("ranks"), stack)
        engines.start("one")
        engines.start("two", **divided)
        wait_all_ready(list(engines.servers.values()), within_s=600)
        for writer, reader in (("two", "one"), ("one", "two")):
            check_equal(*engines.pass_on(writer, reader))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["gemma3", "mla"])
def test_ranks_of_a_model_with_windows_or_latents_fill_one_block_of_each_kind(
    memory, tmp_path_factory, kind
):
    """Latents are written once, by the first rank, and read by both.

    Answers say nothing of them: vLLM's kernels for CPUs without AMX give other log-probabilities in
    prefill than in decode, without a connector, too.
    """
    folder = tmp_path_factory.mktemp("kinds")
    subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=True)
    for file in make("tiny").glob("tokenizer*"):
        shutil.copy(file, folder / kind)
    with ExitStack() as stack:
        engines = Engines(folder, stack)
        engines.start("one", folder / kind)
        engines.start("two", folder / kind, ranks=2)
        wait_all_ready(list(engines.servers.values()), within_s=600)
        for writer, reader in (("two", "one"), ("one", "two")):
            if kind == "mla":
                engines.pass_on(writer, reader)
            else:
                check_equal(*engines.pass_on(writer, reader, groups=2))
