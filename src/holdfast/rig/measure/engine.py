"""Measure what a simulation has to know of this machine: an engine, and what it gets from tiers.

In every round each length is computed, fetched from disk and fetched from memory, one after the
other: so what disturbs the machine for a minute meets one sample in `rounds` of everything, instead
of all samples of one length or tier. Before each an engine rests: one that still spins on the cores
that load a context takes up to a third longer, by chance. Samples beside which others of the
machine computed are left out. Medians of the rounds count, and only where the rounds agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.rig.calm import Others, calm
from holdfast.rig.measure.bench import TAIL_TOKENS, Bench, Course

COLD = "cold"
PLACES = ("disk", "host")
"""In this order: what was fetched from disk is in memory."""

WHOLE_MIN = 3
"""Rounds of a length that must have come whole."""

APART = 0.25
"""How much longer than the fastest the median of the rounds may be.

What disturbs a machine makes it slower, so a median far from the fastest was disturbed itself.
"""

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
    """Save contexts of each length, then ask for them in rounds.

    Raises HoldfastError where the rounds disagree, or where contexts did not come whole.
    """
    texts = {n: [bench.text(n) for _ in range(course.rounds)] for n in course.lengths}
    course.tell("every context is saved")
    for prompts in texts.values():
        bench.save(prompts)
    bench.move("disk", "held")
    times: dict[str, dict[int, list[tuple[float, float]]]] = {
        what: {n: [] for n in texts} for what in (COLD, *PLACES)
    }
    others = Others()
    for turn in range(course.rounds):
        for length, prompts in texts.items():
            course.tell(f"{length} tokens, round {turn + 1} of {course.rounds}")
            others.share()
            for what, seconds in _round(bench, prompts[turn], length):
                times[what][length].append((seconds, others.share()))
    settled = medians(times, course.rounds)
    return Engine(bench.node.token_bytes(), TAIL_TOKENS, settled.pop(COLD), settled)


def medians(times: Times, rounds: int) -> dict[str, dict[int, float]]:
    """Return the median of each length's rounds; raise HoldfastError where they disagree."""
    return {
        what: {n: _settled(f"{n} tokens, {what}", each, rounds) for n, each in by_length.items()}
        for what, by_length in times.items()
    }


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


def _settled(what: str, samples: Sequence[tuple[float, float]], rounds: int) -> float:
    seconds = calm(samples, WHOLE_MIN)
    if len(seconds) < WHOLE_MIN:
        raise HoldfastError(
            f"{what}: {len(seconds)} of {rounds} contexts came whole, {WHOLE_MIN} must; nothing is "
            "written: let the machine rest, or raise --rounds"
        )
    fastest, middle = min(seconds), median(seconds)
    if middle > (1.0 + APART) * fastest:
        raise HoldfastError(
            f"{what}: the fastest of {len(seconds)} rounds took {fastest:.3f} s, the median "
            f"{middle:.3f} s, more than {APART:.0%} longer; nothing is written: let the machine "
            "rest, or raise --rounds"
        )
    return middle
