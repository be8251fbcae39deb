"""Time to the first token without any reuse, with several requests at once, in pairs of runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec

from holdfast_bench.harness.completion import complete
from holdfast_bench.harness.hardware_limits import SEED
from holdfast_bench.harness.server import VllmServer
from holdfast_bench.scenarios.ttft_race import RaceTrack

REQUESTS = {1: 2, 2: 6, 8: 16}
"""Requests of one run, by the number of clients that each send one request after the other.

With several clients a new request arrives while others are computed.
"""

PROMPT_TOKENS = 2048


class FirstTokenPairs(msgspec.Struct, frozen=True):
    """Seconds to the first token of each request of equal loads, without and with Holdfast.

    One list for each run; the runs with the same index are a pair.
    """

    alone: list[list[float]]
    behind: list[list[float]]

    def ratios(self, figure: Callable[[Sequence[float]], float]) -> list[float]:
        """Return a figure with Holdfast, divided by that without, for each pair of runs."""
        pairs = zip(self.alone, self.behind, strict=True)
        return [figure(behind) / figure(alone) for alone, behind in pairs]

    def figures(self, figure: Callable[[Sequence[float]], float]) -> tuple[float, float]:
        """Return a figure of all requests without Holdfast and of all with it, in seconds."""
        return figure(list(chain(*self.alone))), figure(list(chain(*self.behind)))


def measure(
    track: RaceTrack, vocabulary: int, clients: int, pairs: int, tell: Callable[[str], None]
) -> FirstTokenPairs:
    """Send equal loads of `clients` clients to both engines, in alternating order.

    Every prompt is new, so each of its blocks is saved and none is ever fetched.
    """
    source = random.Random(SEED + clients)  # noqa: S311  # prompts, not secrets
    found = FirstTokenPairs([], [])
    for pair in range(pairs):
        tell(f"no reuse, {clients} at once, pair {pair + 1} of {pairs} ...")
        runs = [(track.alone, found.alone), (track.behind, found.behind)]
        for engine, times in runs if pair % 2 == 0 else reversed(runs):
            track.rest.wait_others(engine)
            prompts = [
                [source.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)]
                for _ in range(REQUESTS[clients])
            ]
            times.append(_first_tokens_s(engine, prompts, clients))
            track.node.wait_idle()  # pending writes must not slow the other engine
    return found


def _first_tokens_s(
    engine: VllmServer, prompts: Sequence[Sequence[int]], clients: int
) -> list[float]:
    with ThreadPoolExecutor(clients) as pool:
        answers = pool.map(lambda prompt: complete(engine, prompt, 1), prompts)
        return [answer.ttft_s for answer in answers]
