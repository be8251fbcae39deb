"""Measure what a simulation has to know of this machine: an engine, and what it gets from tiers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.measure_plan import TAIL_TOKENS, Bench, Course

PLACES = ("host", "disk")


class Engine(NamedTuple):
    """Seconds to the first token by tokens of the context, a tail of `tail` tokens behind each.

    `cold`: everything computed; `warm[tier]`: the context fetched from that tier, the tail
    computed. `token_bytes`: KV state of a token.
    """

    token_bytes: float
    tail: int
    cold: dict[int, float]
    warm: dict[str, dict[int, float]]


def measure(bench: Bench, course: Course) -> Engine:
    """Ask for contexts of each length: for the first time, again, and after the node's restart."""
    texts = {n: [bench.text(n) for _ in range(course.rounds)] for n in course.lengths}
    cold = {}
    for length, prompts in texts.items():
        course.tell(f"{length} tokens, computed")
        cold[length] = median(bench.ttft_s(bench.alone, prompt)[0] for prompt in prompts)
    course.tell("every context is saved")
    for prompts in texts.values():
        bench.save(prompts)
    warm = {"host": {n: _warm(bench, prompts, course) for n, prompts in texts.items()}}
    bench.move("disk", "held")
    warm["disk"] = {n: _warm(bench, prompts, course) for n, prompts in texts.items()}
    return Engine(bench.node.token_bytes(), TAIL_TOKENS, cold, warm)


def _warm(bench: Bench, prompts: Sequence[Sequence[int]], course: Course) -> float:
    """Return the median over contexts that came whole; of all, where too few did."""
    context = len(prompts[0]) // BLOCK_TOKENS * BLOCK_TOKENS
    course.tell(f"{context} tokens, fetched")
    asked = [bench.ttft_s(bench.behind, prompt) for prompt in prompts]
    whole = [seconds for seconds, tokens in asked if tokens == context]
    return median(whole or [seconds for seconds, _ in asked])
