"""Online robust regression: a few nonnegative coefficients from a bounded set of observations.

The model is `seconds = c1 * feature1 + c2 * feature2 + ...`. The latest observations of each size
are kept, so that a thousand of one size do not displace those of other sizes. The fit is
iteratively reweighted least squares on relative errors with Huber's weights (Huber, "Robust
Estimation of a Location Parameter", 1964). Observations lose weight with age. Coefficients are
nonnegative (Lawson and Hanson, "Solving Least Squares Problems", 1974), found by trying every
subset of them: three coefficients have seven.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import mul, truediv
from statistics import median
from typing import Any, NamedTuple

PER_SIZE = 8
"""Observations kept of each size. Features of one size are within a factor of four."""

AGED_MIN = 0.02
"""Minimum weight of an old observation, because it is still better than the prior."""

LATEST = 3
"""Number of latest observations that get a fit of their own if they contradict the others."""

FEATURE_MAX = 1e24
SECONDS_MIN, SECONDS_MAX = 1e-9, 1e9
"""Plausible range. Values beyond it are not measurements, and their squares lose precision."""

_CONTRADICTION = 0.3
"""Mean relative error of the latest observations above which they contradict the fit."""

_ROUNDS = 6
_HUBER = 1.345
_SPREAD_MIN = 0.01
_TINY = 1e-12


class Observation(NamedTuple):
    """One measured duration and its features; `number` counts the observations of one fit."""

    features: tuple[float, ...]
    seconds: float
    number: int


class _Columns(NamedTuple):
    """Observations by column, oldest first; `usual` is the median time of each one's size."""

    features: Sequence[Sequence[float]]
    seconds: Sequence[float]
    usual: Sequence[float]


class Belief(NamedTuple):
    """The prior of a fit: coefficients, and the weight of each.

    A weight is roughly the number of observations that outweighs the prior's coefficient.
    """

    coefficients: tuple[float, ...]
    weights: tuple[float, ...]


class OnlineFit:
    """Fits the coefficients of `len(belief.coefficients)` features.

    `half_life` is in observations. At most `most` are kept; the oldest are dropped first. A fit
    takes less than 10 us per observation kept.
    """

    def __init__(self, belief: Belief, half_life: float, most: int) -> None:
        self.belief = belief
        self.most = most
        self.count = 0
        self._half_life = half_life
        self._sizes: dict[tuple[int, ...], deque[Observation]] = {}
        self._fitted: tuple[float, ...] | None = belief.coefficients

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Add one observation; ignore an impossible one (negative, infinite, zero time)."""
        if len(features) != len(self.belief.coefficients) or not _is_plausible(features, seconds):
            return
        self.count += 1
        self._keep(Observation(tuple(map(float, features)), float(seconds), self.count))

    def coefficients(self) -> tuple[float, ...]:
        """Return the fit, computed on the first call after an observation."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def observations(self) -> list[Observation]:
        """Return the observations kept, oldest first."""
        kept = [one for size in self._sizes.values() for one in size]
        return sorted(kept, key=lambda one: one.number)

    def as_data(self) -> dict[str, Any]:
        """Return the observations as plain data."""
        return {
            "count": self.count,
            "seen": [[*one.features, one.seconds, one.number] for one in self.observations()],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Replace the observations by those of `as_data`; raise ValueError if they are invalid."""
        try:
            count, rows = data["count"], [list(map(float, row)) for row in data["seen"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the saved state of a fit: {error!r}") from error
        width = len(self.belief.coefficients) + 2
        if not isinstance(count, int) or len(rows) > self.most:
            raise ValueError("not the saved state of a fit: count or number of rows")
        for row in rows:
            *features, seconds, number = row
            plausible = len(row) == width and _is_plausible(features, seconds)
            if not plausible or not 0 < number <= count:
                raise ValueError(f"not the saved state of a fit: row {row}")
        self.count = count
        self._sizes.clear()
        for *features, seconds, number in rows:
            self._keep(Observation(tuple(features), seconds, int(number)))

    def _keep(self, observation: Observation) -> None:
        size = tuple(math.frexp(feature)[1] // 2 for feature in observation.features)
        self._sizes.setdefault(size, deque(maxlen=PER_SIZE)).append(observation)
        if sum(map(len, self._sizes.values())) > self.most:
            oldest = min(self._sizes, key=lambda size: self._sizes[size][0].number)
            self._sizes[oldest].popleft()
            if not self._sizes[oldest]:
                del self._sizes[oldest]
        self._fitted = None

    def _fit(self) -> tuple[float, ...]:
        """Return the better of two fits: one starts from all observations, one from the latest.

        If old and new observations contradict each other, each group looks like outliers to a fit
        of the other, so reweighting alone cannot choose between them.
        """
        kept = self.observations()
        usual: dict[int, float] = {}
        for size in self._sizes.values():
            middle = median([one.seconds for one in size])
            usual |= dict.fromkeys([one.number for one in size], middle)
        features = list(zip(*(one.features for one in kept), strict=True))
        seconds = [one.seconds for one in kept]
        data = _Columns(features, seconds, [usual[one.number] for one in kept])
        aged = [max(AGED_MIN, 0.5 ** ((self.count - one.number) / self._half_life)) for one in kept]
        found = self._reweighted_fit(data, aged, aged)
        count = len(kept)
        if count > LATEST:
            latest = _Columns(
                [column[-LATEST:] for column in features], seconds[-LATEST:], data.usual[-LATEST:]
            )
            if _misfit(latest, found, [1.0] * LATEST) >= _CONTRADICTION:
                start = [0.0] * (count - LATEST) + [1.0] * LATEST
                other = self._reweighted_fit(data, aged, start)
                found = min(found, other, key=lambda each: _misfit(data, each, aged))
        return found

    def _reweighted_fit(
        self, data: _Columns, aged: Sequence[float], start: Sequence[float]
    ) -> tuple[float, ...]:
        """Fit with the weights `start`, then repeatedly with Huber's weights for the errors."""
        scales, weights = data.usual, start
        last = self.belief.coefficients
        prior_weights = tuple(
            weight * max(_TINY, median(map(truediv, column, data.usual))) ** 2
            for weight, column in zip(self.belief.weights, data.features, strict=True)
        )
        for _ in range(_ROUNDS):
            relative = [list(map(truediv, column, scales)) for column in data.features]
            times = list(map(truediv, data.seconds, scales))
            prior = (self.belief.coefficients, prior_weights)
            found = _least_squares(relative, times, weights, prior)
            if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(last, found, strict=True)):
                break
            last = found
            errors, scales = _errors(data, found)
            spread = _HUBER * max(_SPREAD_MIN, 1.4826 * median(errors))
            weights = [
                age * min(1.0, spread / max(error, _TINY))
                for age, error in zip(aged, errors, strict=True)
            ]
        return found


def _is_plausible(features: Sequence[float], seconds: float) -> bool:
    """Return whether this may be a measurement. NaN is not: it fails every comparison."""
    return SECONDS_MIN <= seconds <= SECONDS_MAX and all(0 <= x <= FEATURE_MAX for x in features)


def _errors(data: _Columns, found: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the relative error of each observation, and the time that it is relative to.

    The scale is the larger of the expected and the usual time. So an error of factor two weighs the
    same in both directions, and few errors exceed 1.
    """
    expected = [0.0] * len(data.seconds)
    for coefficient, column in zip(found, data.features, strict=True):
        expected = [e + coefficient * x for e, x in zip(expected, column, strict=True)]
    scales = list(map(max, expected, data.usual))
    errors = [abs(e - s) / by for e, s, by in zip(expected, data.seconds, scales, strict=True)]
    return errors, scales


def _misfit(data: _Columns, found: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of the relative errors, each at most 1."""
    errors, _ = _errors(data, found)
    return sum(w * min(1.0, e) for w, e in zip(weights, errors, strict=True)) / sum(weights)


def _least_squares(
    columns: Sequence[Sequence[float]],
    times: Sequence[float],
    weights: Sequence[float],
    prior: tuple[Sequence[float], Sequence[float]],
) -> tuple[float, ...]:
    """Minimise the weighted squares of `row . c - time` and of `c - prior`, over c >= 0."""
    prior_coefficients, prior_weights = prior
    size = range(len(prior_coefficients))
    weighted = [list(map(mul, weights, column)) for column in columns]
    right = [sum(map(mul, column, times)) for column in weighted]
    matrix = [[0.0 for _ in size] for _ in size]
    for i in size:
        for j in range(i + 1):
            matrix[i][j] = sum(map(mul, weighted[i], columns[j]))
    for i in size:
        right[i] += prior_weights[i] * prior_coefficients[i]
        matrix[i][i] += prior_weights[i]
        for j in range(i):
            matrix[j][i] = matrix[i][j]
    whole = _solve(matrix, right, size)
    if whole is not None and min(whole) >= 0:
        return tuple(whole)  # the unconstrained minimum is feasible
    best, least = tuple(0.0 for _ in size), 0.0
    for count in range(1, len(right)):
        for chosen in combinations(size, count):
            solved = _solve(matrix, right, chosen)
            if solved is None or min(solved) < 0:
                continue
            value = -sum(c * right[k] for c, k in zip(solved, chosen, strict=True))
            if value < least:
                found = dict(zip(chosen, solved, strict=True))
                best, least = tuple(found.get(k, 0.0) for k in size), value
    return best


def _solve(
    matrix: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Solve for the chosen coefficients by scaled elimination; return None if it is singular."""
    scale = {i: math.sqrt(matrix[i][i]) or 1.0 for i in chosen}
    lines = [
        [matrix[i][j] / scale[i] / scale[j] for j in chosen] + [right[i] / scale[i]] for i in chosen
    ]
    for at in range(len(lines)):
        pivot = max(range(at, len(lines)), key=lambda i: abs(lines[i][at]))
        lines[at], lines[pivot] = lines[pivot], lines[at]
        if abs(lines[at][at]) < _TINY:
            return None
        for below in range(at + 1, len(lines)):
            factor = lines[below][at] / lines[at][at]
            lines[below] = [b - factor * a for a, b in zip(lines[at], lines[below], strict=True)]
    solved = [0.0] * len(lines)
    for at in reversed(range(len(lines))):
        rest = sum(lines[at][j] * solved[j] for j in range(at + 1, len(lines)))
        solved[at] = (lines[at][-1] - rest) / lines[at][at]
    return [value / scale[i] for value, i in zip(solved, chosen, strict=True)]
