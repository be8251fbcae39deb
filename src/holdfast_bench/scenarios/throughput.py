"""Throughput without any reuse: the overhead of Holdfast when nothing can be fetched."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec

from holdfast_bench.harness.completion import complete
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.server import VllmServer
from holdfast_bench.scenarios.ttft_race import RaceTrack

REQUESTS = 16
CONCURRENT = 8
PROMPT_TOKENS = 512
ANSWER_TOKENS = 16


class ThroughputPairs(msgspec.Struct, frozen=True):
    """Seconds for the same load without and with Holdfast, one entry for each pair of runs."""

    alone: list[float]
    behind: list[float]

    @property
    def ratios(self) -> list[float]:
        """The time with Holdfast divided by that without, for each pair."""
        return [behind / alone for alone, behind in zip(self.alone, self.behind, strict=True)]

    @property
    def overhead(self) -> float:
        """The additional time with Holdfast, as a fraction: the median over the pairs."""
        return median(self.ratios) - 1.0

    def tokens_per_s(self, seconds: list[float]) -> float:
        """Prompt and answer tokens per second at the median time."""
        return REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS) / median(seconds)


def measure(
    track: RaceTrack, vocabulary: int, pairs: int, tell: Callable[[str], None]
) -> ThroughputPairs:
    """Time equal loads on both engines, one after the other, in alternating order.

    The first pair is a warm-up and is dropped. Every prompt is new, so each of its blocks is saved
    and none is ever fetched.
    """
    source = random.Random(SEED)  # noqa: S311  # prompts, not secrets
    found = ThroughputPairs([], [])
    for pair in range(pairs + 1):
        tell(f"load without reuse, pair {pair} of {pairs} ...")
        runs = [(track.alone, found.alone), (track.behind, found.behind)]
        for engine, seconds in runs if pair % 2 == 0 else reversed(runs):
            track.rest.wait_others(engine)
            taken_s = _seconds(engine, source, vocabulary)
            track.node.wait_idle()  # pending writes must not slow the other engine
            if pair:
                seconds.append(taken_s)
    return found


def _seconds(engine: VllmServer, source: random.Random, vocabulary: int) -> float:
    prompts = [
        [source.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)
    ]
    with ThreadPoolExecutor(CONCURRENT) as clients:
        start_s = time.perf_counter()
        list(clients.map(lambda prompt: complete(engine, prompt, ANSWER_TOKENS), prompts))
        return time.perf_counter() - start_s
