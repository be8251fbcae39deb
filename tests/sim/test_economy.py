"""What a run costs, and what is said where the figures hold less than they seem to."""

import pytest

from holdfast.sim.economy import assumptions, economy_figures
from holdfast.sim.figures import paid_request_figures

ENGINE = {"gpu": "H200x2", "prefill": {"a": 1.0}, "decode_tokens_per_s": 10, "decodes_at_once": 1}
DISK = {"kind": "disk", "medium": "nvme-tlc"}


@pytest.fixture
def priced(made, ran):
    """Run requests of so many seconds apart that take 1 s to compute and 2 s to answer."""

    def run(apart, tier):
        trace = made([[0, 1], [2, 3], [4, 5]], [0, 0, 0], [apart] * 3)
        trace = trace._replace(output_tokens=trace.output_tokens + 20)
        return ran(trace, {"engine": ENGINE, "tiers": [tier], "token_bytes": 1_000})

    return run


def test_the_assumptions_say_if_a_run_needs_more_gpu_hours_than_it_has(priced):
    run = priced(0, {"kind": "host", "capacity_tokens": 400})
    said = [line for line in assumptions(run) if "of the engines there are" in line]
    assert [line.startswith("without the ladder, ") for line in said] == [False, True]
    # 9 s of two GPUs, in a run of 5 s
    assert "need 1.80 of the engines there are, 0.005 GPU hours of 0.0028: dollars" in said[0]
    gpu_dollars = economy_figures(run)[0].more["gpu_dollars"]
    price = run.fleet.hardware.gpu.dollars_per_hour.mid
    assert gpu_dollars == pytest.approx(price * 18 / 3_600)


def test_the_assumptions_omit_gpu_hours_if_the_engines_have_time(priced):
    assert not [line for line in assumptions(priced(10, DISK)) if "there are" in line]


def test_an_object_store_is_charged_by_segments_and_ranges_not_by_blocks(priced):
    run = priced(10, {"kind": "object", "medium": "s3-standard"})
    medium = run.fleet.hardware.tier_specs[0].medium
    read, written = run.tier_bytes(0)
    [store] = run.fleet.tier_states(0)
    stored_gb = store.peak * run.fleet.hardware.namespace.slot_bytes / 1e9
    months = run.span_s / (8_760 / 12 * 3_600)
    puts = 2 * written / (64 << 20) + len(run.fleet.workers) * run.span_s / 60
    calls = puts * medium.dollars_per_million_puts.mid / 1e6
    calls += read / (8 << 20) * medium.dollars_per_million_gets.mid / 1e6
    assert written > 0
    assert economy_figures(run)[0].more["object_dollars"] == pytest.approx(
        stored_gb * medium.dollars_per_gb_month.mid * months + calls
    )
    [row] = paid_request_figures(run)
    assert (row.what, row.value) == ("sim.paid_requests.0.object", pytest.approx(calls))
    assert row.more["puts"] + row.more["lists"] == pytest.approx(puts)
    assert paid_request_figures(priced(10, DISK)) == []


def test_two_tiers_of_one_kind_are_paid_together(made, ran):
    trace = made([[0, 1], [2, 3], [4, 5]], [0, 0, 0], [10] * 3)
    trace = trace._replace(output_tokens=trace.output_tokens + 20)

    def paid(*tiers):
        run = ran(trace, {"engine": ENGINE, "tiers": [*tiers], "token_bytes": 1_000})
        return economy_figures(run)[0]

    qlc = {**DISK, "medium": "nvme-qlc"}
    both = paid(DISK, qlc)
    dollars = both.more["gpu_dollars"] + both.more["disk_dollars"]
    assert both.value == pytest.approx(dollars / 60 * 1e6)
    assert both.more["disk_dollars"] > max(paid(one).more["disk_dollars"] for one in (DISK, qlc))


def test_the_assumptions_say_that_writes_per_day_of_short_runs_are_overstated(priced):
    [said] = [line for line in assumptions(priced(1_799, DISK)) if line.startswith("writes per")]
    assert said.startswith("writes per day are extrapolated from 1.0 hours, which over")
    whole_day = priced(43_200, DISK)
    assert not [line for line in assumptions(whole_day) if line.startswith("writes per day")]
    memory = priced(10, {"kind": "host", "capacity_tokens": 400})
    assert not [line for line in assumptions(memory) if line.startswith("writes per day")]
