"""Throughput where nothing can be reused: what Holdfast costs those whom it does not help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec

from holdfast.rig.ask import complete
from holdfast.rig.doubt import of_median
from holdfast.rig.race import Track
from holdfast.rig.server import Engine

REQUESTS = 16
CONCURRENT = 8
PROMPT_TOKENS = 512
ANSWER_TOKENS = 16
SEED = 20_26


class Pairs(msgspec.Struct, frozen=True):
    """Seconds for the same amount of work, one entry a pair."""

    alone: list[float]
    behind: list[float]

    @property
    def overhead(self) -> float:
        """How much longer it takes with Holdfast, as a share: the median over the pairs."""
        pairs = zip(self.alone, self.behind, strict=True)
        return median(behind / alone for alone, behind in pairs) - 1.0

    @property
    def doubt(self) -> float:
        """The standard error of `overhead`."""
        pairs = zip(self.alone, self.behind, strict=True)
        return of_median([behind / alone for alone, behind in pairs])

    def tokens_per_s(self, seconds: list[float]) -> float:
        """Prompt and answer tokens per second at the median."""
        return REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS) / median(seconds)


def measure(track: Track, vocabulary: int, pairs: int, tell: Callable[[str], None]) -> Pairs:
    """Give both engines equal loads in turn, the order changing each time; a first pair is dropped.

    Every prompt is new, so each of its blocks is saved and none is ever fetched.
    """
    source = random.Random(SEED)  # noqa: S311  # prompts, not secrets
    found = Pairs([], [])
    for turn in range(pairs + 1):
        tell(f"load without reuse, pair {turn} of {pairs} ...")
        runs = [(track.alone, found.alone), (track.behind, found.behind)]
        for engine, seconds in runs if turn % 2 == 0 else reversed(runs):
            track.rest.before(engine)
            taken_s = _seconds(engine, source, vocabulary)
            track.node.wait_idle()  # what is still being written must not slow the other one
            if turn:
                seconds.append(taken_s)
    return found


def _seconds(engine: Engine, source: random.Random, vocabulary: int) -> float:
    prompts = [
        [source.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)
    ]
    with ThreadPoolExecutor(CONCURRENT) as clients:
        start_s = time.perf_counter()
        list(clients.map(lambda prompt: complete(engine, prompt, ANSWER_TOKENS), prompts))
        return time.perf_counter() - start_s
