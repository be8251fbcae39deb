"""How far off a median or a mean of a few samples may be, and when more would change nothing.

Whether to go on never depends on which side of its goal a figure is: nobody asks until it is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import quantiles, stdev

SMALL = 0.015
"""A ratio this well known is known well enough."""

FAR = 4.0
"""A goal so many times its doubt away from a figure is met or missed, whatever comes."""

MEDIAN = 1.2533
"""The standard error of a median over that of the mean, of many normal samples: sqrt(pi / 2)."""

QUARTILES = 1.349
"""Between the quartiles of normal samples lie so many standard deviations."""


def of_median(samples: Sequence[float]) -> float:
    """Return the standard error of the median, from where the middle half of the samples lies."""
    if len(samples) < 4:  # noqa: PLR2004  # quartiles of fewer are one of them
        return inf
    low, _, high = quantiles(samples, n=4)
    return MEDIAN * (high - low) / QUARTILES / sqrt(len(samples))


def of_mean(samples: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(samples) / sqrt(len(samples)) if len(samples) > 1 else inf


def settled(figure: float, doubt: float, goal: float) -> bool:
    """Whether more samples would hardly say more about a ratio and its goal."""
    return doubt <= SMALL or abs(figure - goal) >= FAR * doubt
