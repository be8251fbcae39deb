"""Charts of a sizing: cost by time to first token, and cost by hit rate."""

from __future__ import annotations

from holdfast.sim.chart import Axis, Series, chart
from holdfast.sim.size.proposal import ladder_text
from holdfast.sim.size.question import SizingQuestion
from holdfast.sim.size.search import SizingAnswer

_LOG_RATIO = 4.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""


def frontier_svg(question: SizingQuestion, answer: SizingAnswer) -> str:
    """Return the Pareto front of cost against time to first token as SVG."""
    front = [(need.ttft_s[1], need.dollars_per_h) for need in answer.frontier]
    notes = _sparse([ladder_text(need) for need in answer.frontier])
    best, without = answer.best, answer.without
    costs = [cost for _, cost in front] + [without.dollars_per_h]
    return chart(
        f"{question.shape.name.rpartition('/')[2]}: what the first token costs",
        Axis(f"first token of {question.goal.share:.0%} of requests, s", log=True),
        Axis("$ an hour", log=max(costs) > _LOG_RATIO * max(min(costs), 1e-9)),
        [
            Series("cheapest ladder", front, "steps", notes),
            Series(
                "proposed",
                [(best.ttft_s[1], best.dollars_per_h)],
                "points",
                ["" if (best.ttft_s[1], best.dollars_per_h) in front else ladder_text(best)],
            ),
            Series(
                "no context memory", [(without.ttft_s[1], without.dollars_per_h)], "points", [""]
            ),
        ],
    )


def hits_svg(question: SizingQuestion, answer: SizingAnswer) -> str:
    """Return cost by hit rate as SVG: storage alone, and storage with the remaining prefill."""
    storage = [(100 * need.hit, need.storage_dollars_per_h) for need in answer.by_hits]
    total = [(100 * need.hit, need.dollars_per_h) for need in answer.by_hits]
    best = answer.best
    return chart(
        f"{question.shape.name.rpartition('/')[2]}: what hits cost",
        Axis("hits, % of input tokens"),
        Axis("$ an hour"),
        [
            Series("storage", storage, "line", _sparse([ladder_text(n) for n in answer.by_hits])),
            Series("storage and prefill", total, "line"),
            Series("proposed", [(100 * best.hit, best.dollars_per_h)], "points"),
        ],
    )


def _sparse(notes: list[str]) -> list[str]:
    """Keep a note only where the ladder's media change."""
    media = [tuple(word for word in note.split() if word[0].isalpha()) for note in notes]
    return [note if i == 0 or media[i] != media[i - 1] else "" for i, note in enumerate(notes)]
