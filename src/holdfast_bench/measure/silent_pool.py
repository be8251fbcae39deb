"""Measure a real engine's time to first token while no target of its pool answers.

Two engines serve the same model: one without Holdfast, one behind a node whose pool becomes silent.
Both compute the same new prompts in alternation, so that nothing is fetched and the difference is
the cost of a silent pool.

A pair that other processes disturb is measured again, up to `AGAIN` times the requested number of
pairs; the least disturbed pairs count.

The pool becomes silent several times. The first request after each is compared with one before and
one after it to the engine without Holdfast, and the figure is the median of all silences, because
a short disturbance is as long as the effect. The rounds are distributed over the silences.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple, TypeAlias

from holdfast.limits import BLOCK_TOKENS
from holdfast.report import Row, at_most
from holdfast_bench.harness.completion import complete
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.network import open_network
from holdfast_bench.harness.node import NodeUnderTest
from holdfast_bench.harness.noise_filter import DISTURBED, OtherProcesses, least_disturbed
from holdfast_bench.harness.pool import PoolUnderTest, SilentTargets
from holdfast_bench.harness.process import wait_until
from holdfast_bench.harness.server import (
    COVER_DEADLINE_MS,
    SPIN_S,
    VllmServer,
    VllmServerOptions,
    holdfast_kv_transfer,
    start_servers,
)

TARGETS = 4
PROMPT_TOKENS = 2048
SHORT_TOKENS = BLOCK_TOKENS + 16
TTFT_GOAL = 1.05
OPEN_S = 30.0
RECOVERED_S = 90.0
FALLS = 3
AGAIN = 2
"""Largest number of measured pairs, as a multiple of the requested rounds."""


class SilentPoolSettings(NamedTuple):
    """Settings: the model's folder and vocabulary, rounds, and the receiver of progress texts."""

    made: Path
    vocabulary: int
    rounds: int
    tell: Callable[[str], None]


class SilentPoolEngines(NamedTuple):
    """Two engines: one without Holdfast, and one behind a node with a pool."""

    alone: VllmServer
    behind: VllmServer


SilentPoolPair: TypeAlias = tuple[float, float]
"""Seconds to the first token of one prompt, without Holdfast and behind the node."""


class SilenceResult(NamedTuple):
    """One silence: the first request's seconds, its delay against `alone`, and the pairs.

    `disturbed`: number of pairs left out.
    """

    first_s: float
    late_s: float
    pairs: Sequence[SilentPoolPair]
    disturbed: int


class SilentPoolBench:
    """Engines, a node and its pool, measured with new random prompts."""

    def __init__(
        self,
        engines: SilentPoolEngines,
        node: NodeUnderTest,
        pool: PoolUnderTest,
        settings: SilentPoolSettings,
    ) -> None:
        self._engines, self._node, self._pool = engines, node, pool
        self._settings = settings
        self._rng = random.Random(SEED)  # noqa: S311  # prompts, not secrets
        self._others = OtherProcesses()

    def rows(self) -> Iterator[Row]:
        """Warm up, then measure every way in which the targets can become silent."""
        before = sum(self._pool.blocks().values())
        self._settings.tell("both engines warm up, and the pool is written to")
        for engine in self._engines:
            self._ttft_s(engine, self._prompt())
        self._pool.wait_holding(before + PROMPT_TOKENS // BLOCK_TOKENS)
        for silence in self._pool.silences():
            falls = [self._fall(silence, number) for number in range(FALLS)]
            yield _first_row(silence, falls)
            yield _ttft_row(silence, falls)

    def _fall(self, silence: SilentTargets, number: int) -> SilenceResult:
        settings, name = self._settings, f"all targets {silence}, {number + 1} of {FALLS}"
        process, members = self._node.process, self._node.members
        wait_until(
            process, lambda: self._asked() == len(members()), RECOVERED_S, "sure of its pool"
        )
        rounds = settings.rounds // FALLS + (number < settings.rounds % FALLS)
        with self._pool.silent(silence):
            settings.tell(f"{name}: the first request that meets them")
            prompt = self._prompt()
            before_s = self._ttft_s(self._engines.alone, prompt)
            first_s = self._ttft_s(self._engines.behind, prompt)
            after_s = self._ttft_s(self._engines.alone, self._prompt())
            wait_until(process, self._all_open, OPEN_S, "sure that its pool is silent")
            pairs = self._pairs(name, number, rounds)
        late_s = first_s - (before_s + after_s) / 2
        kept = least_disturbed(pairs, rounds)
        return SilenceResult(first_s, late_s, kept, len(pairs) - len(kept))

    def _pairs(self, name: str, number: int, rounds: int) -> list[tuple[SilentPoolPair, float]]:
        """Return pairs, each with the share of the machine that other processes used."""
        found: list[tuple[SilentPoolPair, float]] = []
        left = rounds
        while left and len(found) < AGAIN * rounds:
            self._settings.tell(f"{name}: round {rounds - left + 1} of {rounds}")
            prompt, times = self._prompt(), {}
            self._others.share()
            for which in (0, 1) if (number + len(found)) % 2 == 0 else (1, 0):
                times[which] = self._ttft_s(self._engines[which], prompt)
            others = self._others.share()
            found.append(((times[0], times[1]), others))
            left -= others <= DISTURBED
        return found

    def _ttft_s(self, engine: VllmServer, prompt: Sequence[int]) -> float:
        """Request one token, after the other engine's worker has stopped busy-waiting."""
        time.sleep(SPIN_S)
        return complete(engine, prompt, 1).ttft_s

    def _prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        return [self._rng.randrange(2, self._settings.vocabulary) for _ in range(tokens)]

    def _asked(self) -> int:
        """Return the number of members that users' requests go to: breaker closed, not ejected."""
        members = self._node.members()
        return sum(each["phase"] == "closed" and not each["ejected"] for each in members)

    def _all_open(self) -> bool:
        """Send a short prompt, for one target; return whether requests no longer go to any."""
        if self._asked():
            complete(self._engines.behind, self._prompt(SHORT_TOKENS), 1)
        return not self._asked()


def mute_rows(folder: Path, settings: SilentPoolSettings) -> Iterator[Row]:
    """Start network, pool and engines, and measure; all of them end with the iteration."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(folder / "network.log"))
        pool = PoolUnderTest(stack, folder, network)
        settings.tell(f"{TARGETS} targets, a host and two engines start, on {network.kind}")
        pool.start_targets(TARGETS)
        node = pool.start_host("host")
        options = VllmServerOptions(
            model=settings.made, model_tokens_max=PROMPT_TOKENS + BLOCK_TOKENS
        )
        flags = {"alone": {}, "behind": holdfast_kv_transfer(node.address)}
        engines = SilentPoolEngines(*start_servers(stack, folder, options, flags))
        yield from SilentPoolBench(engines, node, pool, settings).rows()


def _first_row(silence: SilentTargets, falls: Sequence[SilenceResult]) -> Row:
    late_s = median(fall.late_s for fall in falls)
    more = {
        "first_s": median(fall.first_s for fall in falls),
        "worst_s": max(fall.late_s for fall in falls),
        "falls": len(falls),
    }
    return at_most(f"pool.{silence}.first", late_s, "s late", COVER_DEADLINE_MS / 1000, **more)


def _ttft_row(silence: SilentTargets, falls: Sequence[SilenceResult]) -> Row:
    pairs = [pair for fall in falls for pair in fall.pairs]
    ratios = [behind_s / alone_s for alone_s, behind_s in pairs]
    more = {
        "alone_s": median(alone_s for alone_s, _ in pairs),
        "behind_s": median(behind_s for _, behind_s in pairs),
        "quartiles": [quantiles(ratios, n=4)[at] for at in (0, 2)],
        "worst": max(ratios),
        "rounds": len(pairs),
        "disturbed": sum(fall.disturbed for fall in falls),
    }
    return at_most(f"pool.{silence}.ttft", median(ratios), "x without", TTFT_GOAL, **more)
