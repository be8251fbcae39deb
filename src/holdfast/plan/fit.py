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
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

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
_is_close = partial(math.isclose, rel_tol=1e-3)


class Observation(NamedTuple):
    """One measured duration and its features; `number` counts the observations of one fit."""

    features: tuple[float, ...]
    seconds: float
    number: int


class _Columns(NamedTuple):
    """Observations, oldest first; `usual` is the median time of each one's size."""

    features: Floats
    seconds: Floats
    usual: Floats


class Belief(NamedTuple):
    """The prior of a fit: coefficients, and the weight of each.

    A weight is roughly the number of observations that outweighs the prior's coefficient.
    """

    coefficients: tuple[float, ...]
    weights: tuple[float, ...]


class OnlineFit:
    """Fits the coefficients of `len(belief.coefficients)` features.

    `half_life` is in observations. At most `most` are kept; the oldest are dropped first. A fit
    takes less than a millisecond.
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
        if not _is_plausible(features, seconds):
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
        data = _Columns(
            np.array([one.features for one in kept]),
            np.array([one.seconds for one in kept]),
            np.array([usual[one.number] for one in kept]),
        )
        ages = self.count - np.array([one.number for one in kept])
        aged = np.maximum(AGED_MIN, 0.5 ** (ages / self._half_life))
        found = self._reweighted_fit(data, aged, aged)
        if len(kept) > LATEST:
            latest = _Columns(*(column[-LATEST:] for column in data))
            if _misfit(latest, found, np.ones(LATEST)) >= _CONTRADICTION:
                start = np.zeros(len(kept))
                start[-LATEST:] = 1.0
                other = self._reweighted_fit(data, aged, start)
                found = min(found, other, key=lambda each: _misfit(data, each, aged))
        return tuple(found.tolist())

    def _reweighted_fit(self, data: _Columns, aged: Floats, start: Floats) -> Floats:
        """Fit with the weights `start`, then repeatedly with Huber's weights for the errors."""
        prior, prior_weights = map(np.array, self.belief)
        usual_features = np.array([median(x) for x in (data.features.T / data.usual).tolist()])
        ridge = np.diag(prior_weights * np.maximum(_TINY, usual_features) ** 2)
        scales, weights, last = data.usual, start, prior
        for _ in range(_ROUNDS):
            relative, times = data.features / scales[:, None], data.seconds / scales
            weighted = relative.T * weights
            found = _least_squares(weighted @ relative + ridge, weighted @ times + ridge @ prior)
            if all(map(_is_close, last, found)):
                break
            last = found
            errors, scales = _errors(data, found)
            spread = _HUBER * max(_SPREAD_MIN, 1.4826 * median(errors.tolist()))
            weights = aged * np.minimum(1.0, spread / np.maximum(errors, _TINY))
        return found


def _is_plausible(features: Sequence[float], seconds: float) -> bool:
    """Return whether this may be a measurement. NaN is not: it fails every comparison."""
    return SECONDS_MIN <= seconds <= SECONDS_MAX and all(0 <= x <= FEATURE_MAX for x in features)


def _errors(data: _Columns, found: Floats) -> tuple[Floats, Floats]:
    """Return the relative error of each observation, and the time that it is relative to.

    The scale is the larger of the expected and the usual time. So an error of factor two weighs the
    same in both directions, and few errors exceed 1.
    """
    expected = data.features @ found
    scales = np.maximum(expected, data.usual)
    return np.abs(expected - data.seconds) / scales, scales


def _misfit(data: _Columns, found: Floats, weights: Floats) -> float:
    """Return the weighted mean of the relative errors, each at most 1."""
    errors, _ = _errors(data, found)
    return float(weights @ np.minimum(1.0, errors) / weights.sum())


def _least_squares(matrix: Floats, right: Floats) -> Floats:
    """Minimise `c . matrix . c / 2 - right . c` over c >= 0."""
    found = _solve(matrix, right)
    if found is not None and min(found) >= 0.0:
        return found  # the unconstrained minimum is feasible
    best, least = np.zeros(len(right)), 0.0
    for count in range(1, len(right)):
        for chosen in map(list, combinations(range(len(right)), count)):
            found = _solve(matrix[chosen][:, chosen], right[chosen])
            if found is None or min(found) < 0.0:
                continue
            if (value := -float(found @ right[chosen])) < least:
                best, least = np.zeros(len(right)), value
                best[chosen] = found
    return best


def _solve(matrix: Floats, right: Floats) -> Floats | None:
    """Solve the equations, scaled to a unit diagonal; return None if they are singular."""
    scale = np.sqrt(matrix.diagonal()) + _TINY
    try:
        return np.linalg.solve(matrix / scale / scale[:, None], right / scale) / scale
    except np.linalg.LinAlgError:
        return None
