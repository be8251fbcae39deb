"""Measure an engine's prefill and its fetches from disk and memory, to calibrate the simulator.

Every round computes each length, fetches it from disk and fetches it from memory, in that order, so
that a disturbance of a minute affects one sample of each series instead of all samples of one.
Before each sample the engines are idle: a busy-waiting engine delays a load by up to a third.
Samples disturbed by other processes are left out. The figures are medians; rounds continue, with
up to `NODES_MAX` nodes in turn, until the standard error of every median is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from holdfast.errors import HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast_bench.harness.noise_filter import OtherProcesses, least_disturbed
from holdfast_bench.harness.standard_error import of_median
from holdfast_bench.measure.engine_pair import EnginePair, EnginePairSettings

COLD = "cold"
PLACES = ("disk", "host")
"""In this order, because a fetch from disk promotes the context to memory."""

NODES_MAX = 4
"""Largest number of nodes, used one after the other: two identical nodes differ by a tenth."""

WHOLE_MIN = 4
"""Smallest number of complete fetches per length and tier."""

CONCLUSIVE_ERROR_SHARE = 0.05
"""Relative standard error of a median at which rounds end.

A prediction uses four medians and must be within 25 % of a fifth.
"""

ERROR_SHARE_MAX = 0.1
"""Largest relative standard error of a median after the last round."""

Times: TypeAlias = Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
"""Samples by `COLD` or tier, and by tokens of the context: seconds to the first token, and share of
the machine that other processes used; one sample of each kind per round."""


class EngineMeasurement(NamedTuple):
    """Seconds to the first token by tokens of the context; each prompt has `TAIL_TOKENS` more.

    `cold`: all tokens computed; `warm[tier]`: the context fetched from that tier, the tail
    computed. `token_bytes`: bytes of KV state per token.
    """

    token_bytes: float
    cold: dict[int, float]
    warm: dict[str, dict[int, float]]


def measure(bench: EnginePair, settings: EnginePairSettings) -> EngineMeasurement:
    """Save contexts of each length and measure them in rounds until all medians are conclusive.

    Raises HoldfastError if a standard error stays too large, or too few fetches are complete.
    """
    times: dict[str, dict[int, list[tuple[float, float]]]] = {
        what: {n: [] for n in settings.lengths} for what in (COLD, *PLACES)
    }
    for number in range(NODES_MAX):
        _measure_node(bench, settings, f"node {number + 1} of up to {NODES_MAX}", times)
        if all(_is_conclusive(each) for by_length in times.values() for each in by_length.values()):
            break
    found = medians(times)
    return EngineMeasurement(bench.node.token_bytes(), found.pop(COLD), found)


def medians(times: Times) -> dict[str, dict[int, float]]:
    """Return the median of each series; raise HoldfastError if one is not accurate enough."""
    return {
        what: {n: _accurate_median(f"{n} tokens, {what}", each) for n, each in by_length.items()}
        for what, by_length in times.items()
    }


def _measure_node(
    bench: EnginePair,
    settings: EnginePairSettings,
    node: str,
    times: Mapping[str, Mapping[int, list[tuple[float, float]]]],
) -> None:
    """Save contexts, restart the node, and append the samples of all rounds to `times`."""
    texts = {n: [bench.text(n) for _ in range(settings.rounds)] for n in settings.lengths}
    settings.tell(f"{node}: every context is saved")
    bench.drop_contexts()
    for prompts in texts.values():
        bench.save(prompts)
    bench.restart_node("disk", "held")
    others = OtherProcesses()
    for turn in range(settings.rounds):
        for length, prompts in texts.items():
            settings.tell(f"{node}: {length} tokens, round {turn + 1} of {settings.rounds}")
            others.share()
            for what, seconds in _round(bench, prompts[turn], length):
                times[what][length].append((seconds, others.share()))


def _round(bench: EnginePair, prompt: Sequence[int], length: int) -> Iterator[tuple[str, float]]:
    """Yield the seconds of one context, computed and from each tier; skip incomplete fetches."""
    bench.wait_idle()
    seconds, _ = bench.ttft_s(bench.alone, prompt)
    yield COLD, seconds
    for place in PLACES:
        bench.wait_idle()
        seconds, tokens = bench.ttft_s(bench.behind, prompt)
        if tokens == length // BLOCK_TOKENS * BLOCK_TOKENS:
            yield place, seconds


def _undisturbed(samples: Sequence[tuple[float, float]]) -> list[float]:
    return least_disturbed(samples, max(WHOLE_MIN, len(samples) // 2))


def _is_conclusive(samples: Sequence[tuple[float, float]]) -> bool:
    seconds = _undisturbed(samples)
    error_max_s = CONCLUSIVE_ERROR_SHARE * median(seconds) if seconds else 0.0
    return len(seconds) >= WHOLE_MIN and of_median(seconds) <= error_max_s


def _accurate_median(what: str, samples: Sequence[tuple[float, float]]) -> float:
    seconds = _undisturbed(samples)
    if len(seconds) < WHOLE_MIN:
        raise HoldfastError(
            f"{what}: {len(seconds)} fetches were complete, at least {WHOLE_MIN} must be; nothing "
            "is written: reduce other load on the machine, or raise --rounds"
        )
    median_s, standard_error_s = median(seconds), of_median(seconds)
    if standard_error_s > ERROR_SHARE_MAX * median_s:
        raise HoldfastError(
            f"{what}: the median of {len(seconds)} rounds, {median_s:.3f} s, has a standard error "
            f"of {standard_error_s:.3f} s, more than {ERROR_SHARE_MAX:.0%}; nothing is written: "
            "reduce other load on the machine, or raise --rounds"
        )
    return median_s
