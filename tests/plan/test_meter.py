"""A meter learns from the line before a tier, and gets worse by itself while nothing comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.cost import LOWER_DEFAULT
from holdfast.plan.meter import QueueMeter

MIB = 1 << 20


def test_queued_bytes_are_counted():
    meter = QueueMeter()
    meter.asked(8 * MIB, 0.0)
    meter.asked(8 * MIB, 0.0)
    assert meter.estimate(0.0).queued_bytes == 16 * MIB
    meter.arrived(8 * MIB, 8 * MIB, 0.01)
    meter.dropped(8 * MIB, 0.01)
    assert meter.estimate(0.01).queued_bytes == 0


def test_parallel_read_batches_measure_the_tiers_bandwidth_and_not_one_batchs():
    meter = QueueMeter()
    for turn in range(12):
        now = turn * 1.0
        for _ in range(4):
            meter.asked(8 * MIB, now)
        for read_batch in range(4):
            meter.arrived(8 * MIB, 8 * MIB, now + (read_batch + 1) * 8 * MIB / 2e9)
    assert meter.estimate(99.0).bytes_per_s == pytest.approx(2e9, rel=0.1)


def test_a_stalled_queue_lowers_the_estimate_before_any_read_ends():
    meter = QueueMeter()
    meter.asked(8 * MIB, 0.0)
    assert meter.estimate(0.0).bytes_per_s == pytest.approx(LOWER_DEFAULT.bytes_per_s)
    assert meter.estimate(8.0).bytes_per_s == pytest.approx(MIB, rel=0.01)


def test_incomplete_reads_do_not_change_the_estimate():
    meter = QueueMeter()
    for turn in range(10):
        meter.asked(8 * MIB, float(turn))
        meter.arrived(MIB, 8 * MIB, turn + 1e-4)
    assert meter.fit.count == 0
    assert meter.queued_bytes == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.floats(0, 1), st.sampled_from(["all", "none", "drop"]))
    )
)
def test_the_queue_is_empty_after_all_reads_end_and_estimates_stay_valid(events):
    meter, now = QueueMeter(), 0.0
    for nbytes, _, _ in events:
        meter.asked(nbytes, now)
    for nbytes, waits_s, how in events:
        now += waits_s
        estimate = meter.estimate(now)
        assert estimate.bytes_per_s > 0
        assert estimate.latency_s >= 0
        if how == "drop":
            meter.dropped(nbytes, now)
        else:
            meter.arrived(nbytes if how == "all" else 0, nbytes, now)
    assert meter.queued_bytes == 0
