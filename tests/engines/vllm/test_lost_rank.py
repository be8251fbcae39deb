"""Real vLLM with two ranks, one of which dies while it saves: no half of a block is served."""

import contextlib
import os
import signal
import threading
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm")

from served_engines import ANSWER, BLOCK, HELD, ServedEngines, check_equal, words

from holdfast.errors import HoldfastError
from holdfast.limits import PARTIAL_S, RECLAIM_S
from holdfast.wire.local.messages import Commit
from holdfast_bench.harness.completion import complete
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import holdfast_kv_transfer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.soak,  # engines start within a minute or two
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("shared_memory"),
]


class DeathAtCommit:
    """Kills the first process that commits blocks, before the node hears of it."""

    def __init__(self, between):
        self._between, self._lock = between, threading.Lock()
        self.victim, self.seen = None, threading.Event()

    def passes(self, message):
        sender = self._between.sender.pid
        with self._lock:
            if isinstance(message, Commit) and self.victim is None:
                self.victim = sender
                os.kill(sender, signal.SIGKILL)
                self.seen.set()
            return sender != self.victim


@pytest.mark.parametrize("layout", ["portable", "exact"])
def test_blocks_that_a_lost_rank_did_not_write_are_computed_by_the_next_engine(
    real, tmp_path_factory, layout
):
    folder, prompt = tmp_path_factory.mktemp("lost"), words("a rank dies")
    with ExitStack() as stack:
        engines = ServedEngines(folder, stack)
        between = real.Between(str(folder / "node" / "node.sock"), folder / "between.sock")
        death = DeathAtCommit(between)
        through = holdfast_kv_transfer(between.address, 60_000, layout=layout)
        engines.start("two", transfer=through, ranks=2)
        engines.wait_ready()
        between.passes = death.passes
        with contextlib.suppress(HoldfastError):  # vLLM ends its engine if a rank is lost
            complete(engines.servers["two"], prompt, ANSWER)
        assert death.seen.wait(60)
        engines.stop("two")
        # Nothing is left of the rank that died, nor of the blocks that wait for its part.
        node = engines.node
        left_s = PARTIAL_S + RECLAIM_S + 60
        wait_until(node.process, lambda: is_settled(node.status()), left_s, "without reservations")
        written = node.status()["blocks"]
        # Exact blocks belong to one rank: those of the other one may be whole.
        assert written in ((0,) if layout == "portable" else (0, HELD // BLOCK))

        size = 1 if layout == "portable" else 2
        engines.start("next", layout=layout, ranks=size)
        engines.wait_ready()
        cold = engines.save("next", prompt, size * HELD // BLOCK - written)
        engines.forget("next")
        warm = engines.load("next", prompt)
        check_equal(warm.answer, cold.answer)


def is_settled(status):
    return status["partial_blocks"] == status["tickets"] == 0
