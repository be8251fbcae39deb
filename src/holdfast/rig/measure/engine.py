"""Measure what a simulation has to know of this machine: an engine, and what it gets from tiers.

In every round each length is computed, fetched from disk and fetched from memory, one after the
other: so what disturbs the machine for a minute meets one sample in `rounds` of everything, instead
of all samples of one length or tier. Before each an engine rests: one that still spins on the cores
that load a context takes up to a third longer, by chance. Samples beside which others of the
machine computed are left out. Medians count, and rounds go on, behind one node after the other,
until it is known how far off each of them may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.calm import Others, calm
from holdfast.rig.doubt import of_median
from holdfast.rig.measure.bench import TAIL_TOKENS, Bench, Course

COLD = "cold"
PLACES = ("disk", "host")
"""In this order: what was fetched from disk is in memory."""

NODES_MAX = 4
"""So many nodes are asked at most, one after the other: two that start alike differ by a tenth."""

WHOLE_MIN = 4
"""Contexts of a length that must have come whole."""

KNOWN = 0.05
"""How far off a median may be for rounds to end: its standard error, as a share of it.

A prediction is made of four of them, and is to come within 25 % of a fifth.
"""

UNKNOWN = 0.1
"""How far off a median may be at most, when all rounds have been."""

Times: TypeAlias = Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
"""Seconds to the first token, and what share of the machine others had meanwhile: `COLD` or a tier,
tokens of the context, one of each a round."""


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
    """Save contexts of each length, then ask for them in rounds, until medians are known.

    Raises HoldfastError where they are not known well in the end, or contexts did not come whole.
    """
    times: dict[str, dict[int, list[tuple[float, float]]]] = {
        what: {n: [] for n in course.lengths} for what in (COLD, *PLACES)
    }
    for number in range(NODES_MAX):
        _behind_a_node(bench, course, f"node {number + 1} of up to {NODES_MAX}", times)
        if all(_known(each) for by_length in times.values() for each in by_length.values()):
            break
    settled = medians(times)
    return Engine(bench.node.token_bytes(), TAIL_TOKENS, settled.pop(COLD), settled)


def medians(times: Times) -> dict[str, dict[int, float]]:
    """Return the median of each length's rounds; raise HoldfastError where one is not known."""
    return {
        what: {n: _settled(f"{n} tokens, {what}", each) for n, each in by_length.items()}
        for what, by_length in times.items()
    }


def _behind_a_node(
    bench: Bench,
    course: Course,
    node: str,
    times: Mapping[str, Mapping[int, list[tuple[float, float]]]],
) -> None:
    """Save contexts, start the node anew, and ask for them in rounds."""
    texts = {n: [bench.text(n) for _ in range(course.rounds)] for n in course.lengths}
    course.tell(f"{node}: every context is saved")
    bench.clear()
    for prompts in texts.values():
        bench.save(prompts)
    bench.move("disk", "held")
    others = Others()
    for turn in range(course.rounds):
        for length, prompts in texts.items():
            course.tell(f"{node}: {length} tokens, round {turn + 1} of {course.rounds}")
            others.share()
            for what, seconds in _round(bench, prompts[turn], length):
                times[what][length].append((seconds, others.share()))


def _round(bench: Bench, prompt: Sequence[int], length: int) -> Iterator[tuple[str, float]]:
    """Ask for one context, computed and from each tier; what did not come whole is left out."""
    bench.rest()
    seconds, _ = bench.ttft_s(bench.alone, prompt)
    yield COLD, seconds
    for place in PLACES:
        bench.rest()
        seconds, tokens = bench.ttft_s(bench.behind, prompt)
        if tokens == length // BLOCK_TOKENS * BLOCK_TOKENS:
            yield place, seconds


def _undisturbed(samples: Sequence[tuple[float, float]]) -> list[float]:
    return calm(samples, max(WHOLE_MIN, len(samples) // 2))


def _known(samples: Sequence[tuple[float, float]]) -> bool:
    seconds = _undisturbed(samples)
    return len(seconds) >= WHOLE_MIN and of_median(seconds) <= KNOWN * median(seconds)


def _settled(what: str, samples: Sequence[tuple[float, float]]) -> float:
    seconds = _undisturbed(samples)
    if len(seconds) < WHOLE_MIN:
        raise HoldfastError(
            f"{what}: {len(seconds)} contexts came whole, {WHOLE_MIN} must; nothing is written: "
            "let the machine rest, or raise --rounds"
        )
    middle, doubt = median(seconds), of_median(seconds)
    if doubt > UNKNOWN * middle:
        raise HoldfastError(
            f"{what}: the median of {len(seconds)} rounds, {middle:.3f} s, may be {doubt:.3f} s "
            f"off, more than {UNKNOWN:.0%}; nothing is written: let the machine rest, or raise "
            "--rounds"
        )
    return middle
