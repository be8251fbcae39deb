"""Measure prestages with a real vLLM that serves one request at a time, behind a pool.

Each round computes a new context, and then requests it with an empty engine cache: from the pool,
after its session had announced its return, from the node's memory, and while another request runs,
so that it waits in vLLM's queue. The link from the target has a limited bandwidth.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from holdfast.limits import BLOCK_TOKENS
from holdfast.report import Row, at_least, not_measured
from holdfast_bench.harness.completion import NO_HINT, complete
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.network import NamespaceNetwork, open_network
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.pool import PoolUnderTest
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)
from holdfast_bench.measure.prestage import FETCH_GOAL, GAIN_GOAL, NO_LINKS, limit_link

BITS_PER_S = 200_000_000
PROMPT_TOKENS = 32 * BLOCK_TOKENS
RUNNING_TOKENS = 16
WAIT_S = 1.0
TIMED_TOKENS = 40
RUNNING_TIMEOUT_S = 30.0
"""Longest wait until the other request runs, before the one that is to wait is sent."""

RETURN_MARGIN_S = 2.0
"""Time added to two transfers, so that a return is announced before the node begins to read."""


_RUNNING = re.compile(r"^vllm:num_requests_running\{.*\} (\S+)$", re.MULTILINE)


class PrestageEngineSettings(NamedTuple):
    """Settings: the model's folder and vocabulary, rounds, and the receiver of progress texts."""

    made: Path
    vocabulary: int
    rounds: int
    tell: Callable[[str], None]


class EngineRound(NamedTuple):
    """Seconds to the first token of one context, and how long the last request waited."""

    pool_s: float
    host_s: float
    announced_s: float
    queued_s: float
    waited_s: float


class PrestageEngineBench:
    """One engine, its node and the node's pool, measured with new random prompts."""

    def __init__(
        self,
        engine: VllmServer,
        node: NodeUnderTest,
        pool: PoolUnderTest,
        settings: PrestageEngineSettings,
    ) -> None:
        self._engine, self._node, self._pool = engine, node, pool
        self._settings = settings
        self._rng = random.Random(SEED)  # noqa: S311  # prompts, not secrets
        self._token_s = 0.0

    def rows(self) -> Iterator[Row]:
        """Measure how fast the engine generates tokens, then every round."""
        self._generate(2)
        self._token_s = (self._generate(TIMED_TOKENS) - self._generate(2)) / (TIMED_TOKENS - 2)
        yield from engine_rows([self._round(at) for at in range(self._settings.rounds)])

    def _round(self, number: int) -> EngineRound:
        self._settings.tell(f"round {number + 1} of {self._settings.rounds}")
        context, session = self._prompt(PROMPT_TOKENS), f"session {number}"
        before = sum(self._pool.blocks().values())
        self._first_token_s(context)
        self._pool.wait_holding(before + PROMPT_TOKENS // BLOCK_TOKENS - 1)
        self._node.wait_idle()
        self._leave_memory()
        pool_s = self._first_token_s(context)
        returns_s = 2 * pool_s + RETURN_MARGIN_S
        self._engine.reset_prefix_cache()
        self._first_token_s(context, {"session": session, "returns_in_s": returns_s})
        returns_at_s = time.perf_counter() + returns_s
        self._leave_memory()
        time.sleep(max(0.0, returns_at_s - time.perf_counter()))
        announced_s = self._first_token_s(context)
        self._engine.reset_prefix_cache()
        time.sleep(returns_s)  # the engine has been idle equally long on both sides
        host_s = self._first_token_s(context)
        self._leave_memory()
        queued_s, waited_s = self._queued(context)
        return EngineRound(pool_s, host_s, announced_s, queued_s, waited_s)

    def _queued(self, context: Sequence[int]) -> tuple[float, float]:
        """Request a context while another request runs; return its first token, and its wait."""
        ended_s = list[float]()

        def run() -> None:
            self._generate(int(WAIT_S / self._token_s))
            ended_s.append(time.perf_counter())

        running = threading.Thread(target=run)
        running.start()
        wait_until(self._engine.process, self._is_running, RUNNING_TIMEOUT_S, "running a request")
        began_s = time.perf_counter()
        first_s = self._first_token_s(context)
        running.join()
        return first_s, ended_s[0] - began_s

    def _leave_memory(self) -> None:
        """Leave the context in the pool only."""
        self._node.drop_all()
        self._engine.reset_prefix_cache()

    def _is_running(self) -> bool:
        return any(float(value) for value in _RUNNING.findall(self._engine.metrics()))

    def _generate(self, tokens: int) -> float:
        """Have tokens generated from a new short prompt; return the seconds that it took."""
        began_s = time.perf_counter()
        complete(self._engine, self._prompt(RUNNING_TOKENS), max(2, tokens))
        return time.perf_counter() - began_s

    def _first_token_s(self, prompt: Sequence[int], hint: Mapping[str, object] = NO_HINT) -> float:
        return complete(self._engine, prompt, 1, hint).ttft_s

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(2, self._settings.vocabulary) for _ in range(tokens)]


def prestage_engine_rows(folder: Path, settings: PrestageEngineSettings) -> Iterator[Row]:
    """Start network, pool, node and engine, and measure; all of them end with the iteration."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(folder / "network.log"))
        if not isinstance(network, NamespaceNetwork):
            yield not_measured("prestage.engine", NO_LINKS)
            return
        settings.tell("a target, a host and an engine start")
        pool = PoolUnderTest(stack, folder, network)
        [target] = pool.start_targets(1)
        node = pool.start_host("host", plan="held")
        limit_link(pool.targets[target].process.pid, BITS_PER_S)
        options = VllmServerOptions(
            model=settings.made, model_tokens_max=PROMPT_TOKENS + BLOCK_TOKENS, requests_max=1
        )
        kv_transfer = holdfast_kv_transfer(node.address)
        [engine] = start_servers(stack, folder, options, {"engine": kv_transfer})
        bench = PrestageEngineBench(engine, node, pool, settings)
        yield from bench.rows()


def engine_rows(rounds: Sequence[EngineRound]) -> Iterator[Row]:
    """Yield the rows of all rounds."""
    ratio = median(each.announced_s / each.host_s for each in rounds)
    link = {"link_mbit_per_s": BITS_PER_S / 1e6, "tokens": PROMPT_TOKENS, "rounds": len(rounds)}
    yield Row(
        what="prestage.engine.announced",
        value=1e3 * median(each.announced_s for each in rounds),
        unit="ms",
        limit=1e3 * median(each.host_s for each in rounds),
        ratio=ratio,
        goal=FETCH_GOAL,
        ok=ratio <= FETCH_GOAL,
        more={"limit_is": "first token with the context in the node's memory", **link},
    )
    gain = median((each.waited_s + each.pool_s - each.queued_s) / each.waited_s for each in rounds)
    seconds = {
        "pool_s": median(each.pool_s for each in rounds),
        "queued_s": median(each.queued_s for each in rounds),
        "waited_s": median(each.waited_s for each in rounds),
    }
    yield at_least("prestage.engine.queued.gain", gain, "of the wait", GAIN_GOAL, **seconds, **link)
