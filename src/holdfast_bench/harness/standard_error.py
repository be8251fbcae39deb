"""Standard errors of medians and means, the rule that ends sampling, and percentiles.

The rule does not depend on whether a figure meets its goal, so that sampling does not continue
until the goal is met by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, sqrt
from statistics import quantiles, stdev

CONCLUSIVE_ERROR = 0.015
"""Standard error of a ratio at which sampling ends."""

CONCLUSIVE_DISTANCE = 4.0
"""Distance of a figure from its goal, in standard errors, at which sampling ends."""

_MEDIAN_OVER_MEAN = 1.2533
"""Standard error of the median over that of the mean, for many normal samples: sqrt(pi / 2)."""

_QUARTILE_DISTANCE = 1.349
"""Distance between the quartiles of a normal distribution, in standard deviations."""


def of_median(samples: Sequence[float]) -> float:
    """Return the standard error of the median, estimated from the samples' quartiles."""
    if len(samples) < 4:  # noqa: PLR2004  # too few for quartiles
        return inf
    low, _, high = quantiles(samples, n=4)
    return _MEDIAN_OVER_MEAN * (high - low) / _QUARTILE_DISTANCE / sqrt(len(samples))


def of_mean(samples: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(samples) / sqrt(len(samples)) if len(samples) > 1 else inf


def is_conclusive(figure: float, standard_error: float, goal: float) -> bool:
    """Whether sampling may end: the figure is accurate, or clearly above or below its goal."""
    distance = abs(figure - goal)
    return standard_error <= CONCLUSIVE_ERROR or distance >= CONCLUSIVE_DISTANCE * standard_error


def percentile_90(samples: Sequence[float]) -> float:
    """Return the smallest sample that at least 90 % of the samples do not exceed."""
    return sorted(samples)[ceil(0.9 * len(samples)) - 1]


def percentile_99(samples: Sequence[float]) -> float:
    """Return the smallest sample that at least 99 % of the samples do not exceed."""
    return sorted(samples)[ceil(0.99 * len(samples)) - 1]
