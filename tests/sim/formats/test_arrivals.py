"""Times in another unit than the format's, and numbers in place of times, are noticed."""

import pytest

from holdfast.errors import TraceError

TRAFFIC_S = [0, 0.5, 3.25, 4, 4, 7.5, 11, 12.25, 20, 21, 27, 31.5]
DATE_S = 1_764_000_000


def mooncake(times):
    return [{"timestamp": at, "input_length": 512, "hash_ids": [1]} for at in times]


def recorded(times):
    row = {"fingerprint": "ab", "tokens": 128, "keys": ["0a"]}
    return [{"at_s": at, **row} for at in times]


@pytest.mark.parametrize("rows", [mooncake, recorded])
@pytest.mark.parametrize("unit", [1, 1e3, 1e6, 1e9])
def test_the_unit_of_times_is_found_if_they_are_dates(loaded, rows, unit):
    trace = loaded(rows([(DATE_S + at) * unit for at in TRAFFIC_S]))
    assert trace.time_s.tolist() == pytest.approx(TRAFFIC_S, abs=1e-5)
    assert not trace.untimed
    natural = unit == (1e3 if rows is mooncake else 1)
    assert [" read as such" in remark for remark in trace.remarks] == [] if natural else [True]


def test_seconds_in_place_of_milliseconds_are_noticed(loaded):
    trace = loaded(mooncake(TRAFFIC_S))
    assert "349 requests a second if they are milliseconds" in trace.untimed
    assert "0.349 if they are seconds (give --time-unit ms or s)" in trace.untimed
    for unit, factor in (("s", 1), ("ms", 1e-3)):
        given = loaded(mooncake(TRAFFIC_S), time_unit=unit)
        assert given.time_s.tolist() == pytest.approx([at * factor for at in TRAFFIC_S])
        assert not given.untimed
    assert not loaded(mooncake([1000 * at for at in TRAFFIC_S])).untimed


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([0, 1, 2, 3], "number the requests: 0, 1, 2, ..."),
        ([1, 2, 3], "number the requests"),
        ([0, 1, 2, 0, 1], "number the requests"),
        ([7, 7, 7], "the same time"),
        ([None, None], "has no times"),
    ],
)
def test_request_numbers_are_not_accepted_as_arrival_times(loaded, times, why):
    trace = loaded(mooncake(times))
    assert why in trace.untimed
    assert trace.requests == len(times)


def test_the_unit_of_a_few_times_is_doubted_only_if_they_have_fractions(loaded):
    assert "if they are seconds" in loaded(mooncake([0.0, 0.2, 0.4])).untimed
    assert not loaded(mooncake([0, 4, 9])).untimed
    assert not loaded(mooncake([0.0, 1500.5, 4000.25])).untimed


@pytest.mark.parametrize("times", [[0, 1, 1, 2, 3], [0, 0.5, 2], [0, 1]])
def test_plausible_times_in_seconds_are_accepted(loaded, times):
    assert not loaded(recorded(times)).untimed


def test_conversations_without_times_keep_the_order_of_the_file(loaded):
    said = [{"from": "human", "value": "why? " * 99}, {"from": "gpt", "value": "so"}]
    trace = loaded([{"conversations": said}] * 3)
    assert trace.untimed == "it has no times"
    assert (trace.requests, trace.unique) == (3, trace.blocks // 3)


def test_a_mixture_of_lines_with_and_without_times_is_refused(loaded):
    with pytest.raises(TraceError, match="jsonl:2: some lines have a time and some have none"):
        loaded(mooncake([5, None]))


def test_a_time_unit_is_accepted_only_for_numeric_times(loaded):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,8,1\n"
    with pytest.raises(TraceError, match=r"time unit ms: Azure .* says the unit itself; omit it"):
        loaded(text, time_unit="ms")
    with pytest.raises(TraceError, match="time unit h: give one of s, ms, us, ns"):
        loaded(mooncake([5]), time_unit="h")
