"""Pairs are judged within their round, so that what moves both sides moves no ratio."""

import pytest

from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed


def test_a_machine_that_slows_down_does_not_change_paired_ratios() -> None:
    slowing = [8.0, 4.0, 2.0, 1.0, 0.5]
    ours, limits = iter(slowing), iter(slowing)
    pairs = paired(5, lambda: Speed(0.9 * next(ours), 0.1), lambda: next(limits))
    assert pairs == (Speed(1.8, 0.1), 2.0, pytest.approx(0.9))
    row = speed_row("disk.read", pairs, 0.89, direct=True)
    assert (row.value, row.limit, row.ratio, row.ok) == (1.8, 2.0, pytest.approx(0.9), True)
    assert row.more == {"cpu_s_per_gb": 0.1, "direct": True}


def test_each_side_goes_first_in_every_other_round() -> None:
    turns: list[str] = []

    def ours() -> Speed:
        turns.append("ours")
        return timed(1, lambda: None)

    def limit() -> float:
        turns.append("limit")
        return 1.0

    paired(4, ours, limit)
    assert turns == ["limit", "ours", "ours", "limit"] * 2
