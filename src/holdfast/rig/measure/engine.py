"""Measure what a simulation has to know of this machine: an engine, and what it gets from tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from holdfast.limits import BLOCK_TOKENS
from holdfast.rig import server
from holdfast.rig.measure.plan import TAIL_TOKENS, Bench, Course

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
    """Ask for contexts of each length: for the first time, again, and after the node's restart.

    One of each length in every round, so that no length has the machine at its best or worst to
    itself.
    """
    texts = {n: [bench.text(n) for _ in range(course.rounds)] for n in course.lengths}
    alone = _asked(bench, bench.alone, texts, course)
    cold = {n: median(seconds for seconds, _ in asked) for n, asked in alone.items()}
    course.tell("every context is saved")
    for prompts in texts.values():
        bench.save(prompts)
    warm = {"host": _warm(bench, texts, course)}
    bench.move("disk", "held")
    warm["disk"] = _warm(bench, texts, course)
    return Engine(bench.node.token_bytes(), TAIL_TOKENS, cold, warm)


_Texts: TypeAlias = Mapping[int, Sequence[Sequence[int]]]
"""Prompts by the length of their contexts."""


def _asked(
    bench: Bench, engine: server.Engine, texts: _Texts, course: Course
) -> dict[int, list[tuple[float, int]]]:
    """Return seconds and tokens fetched, for each length in the order of the rounds."""
    asked: dict[int, list[tuple[float, int]]] = {length: [] for length in texts}
    for turn in range(course.rounds):
        for length, prompts in texts.items():
            course.tell(f"{engine.name}: {length} tokens, round {turn + 1} of {course.rounds}")
            asked[length].append(bench.ttft_s(engine, prompts[turn]))
    return asked


def _warm(bench: Bench, texts: _Texts, course: Course) -> dict[int, float]:
    """Return for each length the median of contexts that came whole; of all, if none did."""
    medians = {}
    for length, asked in _asked(bench, bench.behind, texts, course).items():
        context = length // BLOCK_TOKENS * BLOCK_TOKENS
        whole = [seconds for seconds, tokens in asked if tokens == context]
        medians[length] = median(whole or [seconds for seconds, _ in asked])
    return medians
