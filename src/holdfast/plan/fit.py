"""A few nonnegative coefficients from a small memory of observations, whatever the outliers.

`seconds = c1 * feature1 + c2 * feature2 + ...`. The memory keeps the latest observations of each
size, so that a thousand equal ones do not push out what was learnt about other sizes. The fit is
iteratively reweighted least squares on relative errors with Huber's weights (Huber, "Robust
Estimation of a Location Parameter", 1964), older observations counting less, and the best of the
few sets of coefficients that stay above zero (Lawson and Hanson, "Solving Least Squares Problems",
1974, by trying every set: there are seven of three).
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
"""Observations kept of each size: features within a factor of four of each other."""

AGED_MIN = 0.02
"""Least that an old observation counts: what was seen once is better than a guess."""

LATEST = 3
"""So many in a row that say something else are heard on their own."""

FEATURE_MAX = 1e24
SECONDS_MIN, SECONDS_MAX = 1e-9, 1e9
"""What is beyond was not measured: its squares would leave no room for what was."""

_CONTRADICTION = 0.3
_ROUNDS = 6
_HUBER = 1.345
_SPREAD_MIN = 0.01
_TINY = 1e-12


class Observation(NamedTuple):
    """What took how long; `number` counts the observations of one fit."""

    features: tuple[float, ...]
    seconds: float
    number: int


class _Seen(NamedTuple):
    """Observations by column, oldest first; `usual` are the times usual for the size of each."""

    features: Sequence[Sequence[float]]
    seconds: Sequence[float]
    usual: Sequence[float]

    def latest(self, count: int) -> _Seen:
        """Return the last few."""
        features = [column[-count:] for column in self.features]
        return _Seen(features, self.seconds[-count:], self.usual[-count:])


class Belief(NamedTuple):
    """What to assume until observations say otherwise: coefficients, and how firmly each.

    A weight is a number of observations: how many it takes to be outvoted, roughly.
    """

    coefficients: tuple[float, ...]
    weights: tuple[float, ...]


class Fit:
    """Coefficients of `len(belief.coefficients)` features.

    `half_life` counts observations; `most` are kept in all, the oldest go first. A fit over as many
    takes less than ten microseconds for each.
    """

    def __init__(self, belief: Belief, half_life: float, most: int) -> None:
        self.belief = belief
        self.most = most
        self.count = 0
        self._half_life = half_life
        self._sizes: dict[tuple[int, ...], deque[Observation]] = {}
        self._fitted: tuple[float, ...] | None = belief.coefficients

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Take one observation in; what can not be (negative, endless, no time) is ignored."""
        if len(features) != len(self.belief.coefficients) or not _can_be(features, seconds):
            return
        self.count += 1
        self._keep(Observation(tuple(map(float, features)), float(seconds), self.count))

    def coefficients(self) -> tuple[float, ...]:
        """Return the fit; computed when asked for the first time after an observation."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def observations(self) -> list[Observation]:
        """Return what is remembered, oldest first."""
        kept = [seen for size in self._sizes.values() for seen in size]
        return sorted(kept, key=lambda seen: seen.number)

    def as_data(self) -> dict[str, Any]:
        """Return the memory as plain data."""
        return {
            "count": self.count,
            "seen": [[*seen.features, seen.seconds, seen.number] for seen in self.observations()],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Remember what `as_data` returned; raise ValueError if this is something else."""
        try:
            count, rows = data["count"], [list(map(float, row)) for row in data["seen"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the memory of a fit: {error!r}") from error
        width = len(self.belief.coefficients) + 2
        if not isinstance(count, int) or len(rows) > self.most:
            raise ValueError("not the memory of a fit: count or number of rows")
        for row in rows:
            *features, seconds, number = row
            if len(row) != width or not _can_be(features, seconds) or not 0 < number <= count:
                raise ValueError(f"not the memory of a fit: row {row}")
        self.count = count
        self._sizes.clear()
        for *features, seconds, number in rows:
            self._keep(Observation(tuple(features), seconds, int(number)))

    def _keep(self, seen: Observation) -> None:
        size = tuple(math.frexp(feature)[1] // 2 for feature in seen.features)
        self._sizes.setdefault(size, deque(maxlen=PER_SIZE)).append(seen)
        if sum(map(len, self._sizes.values())) > self.most:
            oldest = min(self._sizes, key=lambda size: self._sizes[size][0].number)
            self._sizes[oldest].popleft()
            if not self._sizes[oldest]:
                del self._sizes[oldest]
        self._fitted = None

    def _fit(self) -> tuple[float, ...]:
        """Return the better of two: what all observations say, and what the latest few say.

        Where old and new ones contradict each other, each side is an outlier to the other.
        """
        kept = self.observations()
        seen, count = self._columns(kept), len(kept)
        aged = [max(AGED_MIN, 0.5 ** ((self.count - one.number) / self._half_life)) for one in kept]
        found = self._settle(seen, aged, aged)
        if count <= LATEST or _misfit(seen.latest(LATEST), found, [1.0] * LATEST) < _CONTRADICTION:
            return found
        other = self._settle(seen, aged, [0.0] * (count - LATEST) + [1.0] * LATEST)
        return min(found, other, key=lambda each: _misfit(seen, each, aged))

    def _settle(
        self, seen: _Seen, aged: Sequence[float], start: Sequence[float]
    ) -> tuple[float, ...]:
        """Fit with the weights of `start`, then again and again with those that the errors ask."""
        scales, weights = seen.usual, start
        held_to, last = self._held_to(seen), self.belief.coefficients
        for _ in range(_ROUNDS):
            relative = [list(map(truediv, column, scales)) for column in seen.features]
            times = list(map(truediv, seen.seconds, scales))
            found = _least_squares(relative, times, weights, (self.belief.coefficients, held_to))
            if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(last, found, strict=True)):
                break
            last = found
            errors, scales = _errors(seen, found)
            spread = _HUBER * max(_SPREAD_MIN, 1.4826 * median(errors))
            weights = [
                age * min(1.0, spread / max(error, _TINY))
                for age, error in zip(aged, errors, strict=True)
            ]
        return found

    def _columns(self, kept: Sequence[Observation]) -> _Seen:
        """Return what is remembered by column, with the usual time of each size."""
        usual: dict[int, float] = {}
        for size in self._sizes.values():
            middle = median([one.seconds for one in size])
            usual |= dict.fromkeys([one.number for one in size], middle)
        features = list(zip(*(one.features for one in kept), strict=True))
        return _Seen(features, [one.seconds for one in kept], [usual[one.number] for one in kept])

    def _held_to(self, seen: _Seen) -> tuple[float, ...]:
        """Return how much each coefficient costs that leaves what was believed, squared."""
        return tuple(
            weight * max(_TINY, median(map(truediv, column, seen.usual))) ** 2
            for weight, column in zip(self.belief.weights, seen.features, strict=True)
        )


def _can_be(features: Sequence[float], seconds: float) -> bool:
    """Whether this may have been measured; no comparison holds for what is not a number."""
    return SECONDS_MIN <= seconds <= SECONDS_MAX and all(0 <= x <= FEATURE_MAX for x in features)


def _errors(seen: _Seen, found: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return how far each is off, as a share of the larger of what was expected and what is usual.

    So twice too long and twice too short are as bad as each other, and no error is much above 1.
    The second list has what each is a share of.
    """
    expected = [0.0] * len(seen.seconds)
    for coefficient, column in zip(found, seen.features, strict=True):
        expected = [e + coefficient * x for e, x in zip(expected, column, strict=True)]
    scales = list(map(max, expected, seen.usual))
    off = [abs(e - s) / by for e, s, by in zip(expected, seen.seconds, scales, strict=True)]
    return off, scales


def _misfit(seen: _Seen, found: Sequence[float], weights: Sequence[float]) -> float:
    errors, _ = _errors(seen, found)
    return sum(w * min(1.0, e) for w, e in zip(weights, errors, strict=True)) / sum(weights)


def _least_squares(
    columns: Sequence[Sequence[float]],
    times: Sequence[float],
    weights: Sequence[float],
    belief: tuple[Sequence[float], Sequence[float]],
) -> tuple[float, ...]:
    """Minimise the weighted squares of `row . c - time`, and of leaving the belief, over c >= 0."""
    believed, held_to = belief
    size = range(len(believed))
    weighted = [list(map(mul, weights, column)) for column in columns]
    right = [sum(map(mul, column, times)) for column in weighted]
    matrix = [[0.0 for _ in size] for _ in size]
    for i in size:
        for j in range(i + 1):
            matrix[i][j] = sum(map(mul, weighted[i], columns[j]))
    for i in size:
        right[i] += held_to[i] * believed[i]
        matrix[i][i] += held_to[i]
        for j in range(i):
            matrix[j][i] = matrix[i][j]
    whole = _solve(matrix, right, size)
    if whole is not None and min(whole) >= 0:
        return tuple(whole)  # the best without a limit, so the best within it
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
    """Solve for the chosen coefficients by elimination, scaled; None if that can not be done."""
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
