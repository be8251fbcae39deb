"""How well a figure is known, and whether more samples would change what it says."""

import random
from math import inf
from statistics import mean, median, stdev

import pytest

from holdfast_bench.harness.standard_error import (
    CONCLUSIVE_DISTANCE,
    CONCLUSIVE_ERROR,
    is_conclusive,
    of_mean,
    of_median,
    percentile_90,
    percentile_99,
)


@pytest.mark.parametrize(("standard_error", "figure"), [(of_median, median), (of_mean, mean)])
@pytest.mark.parametrize("count", [8, 40])
def test_the_standard_error_estimates_the_deviation_between_samples(standard_error, figure, count):
    rng = random.Random(1)
    drawn = [[rng.gauss(1.0, 0.1) for _ in range(count)] for _ in range(2_000)]
    apart = stdev(figure(samples) for samples in drawn)
    assert median(standard_error(samples) for samples in drawn) == pytest.approx(apart, rel=0.25)


def test_one_outlier_does_not_raise_the_standard_error_of_a_median():
    calm = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    assert of_median([*calm, 50.0]) < CONCLUSIVE_ERROR < of_mean([*calm, 50.0])


def test_too_few_samples_have_an_infinite_standard_error():
    assert of_median([1.0, 1.0, 1.0]) == inf
    assert of_mean([1.0]) == inf


def test_a_figure_is_conclusive_if_its_error_is_small_or_its_goal_is_far():
    assert is_conclusive(1.05, CONCLUSIVE_ERROR, 1.05)
    assert not is_conclusive(1.05, CONCLUSIVE_ERROR + 0.001, 1.05)
    for side in (-1, 1):
        assert is_conclusive(1.05 + side * 1.01 * CONCLUSIVE_DISTANCE * 0.03, 0.03, 1.05)
        assert not is_conclusive(1.05 + side * 0.99 * CONCLUSIVE_DISTANCE * 0.03, 0.03, 1.05)


def test_a_percentile_is_exceeded_by_its_share_of_the_samples():
    assert percentile_99([*range(100, 0, -1)]) == 99
    assert percentile_90([*range(100, 0, -1)]) == 90
    assert percentile_99([3.0, 1.0]) == percentile_90([3.0, 1.0]) == 3.0
