"""When new records are encoded: while the tier is slower than the decoders, without flapping."""

import pytest

from holdfast.plan.codec_choice import (
    DECODE_DEFAULT,
    CodecRates,
    DecodeMeter,
    DeliveryComparison,
    decode_threads,
    worth_encoding,
)


@pytest.mark.parametrize(
    ("stored", "begins", "continues"),
    [
        (0.1e9, True, True),
        (1.2e9, True, True),
        (1.3e9, False, True),
        (1.7e9, False, True),
        (1.8e9, False, False),
        (14e9, False, False),
    ],
)
def test_encoding_begins_below_half_of_the_decoding_rate_and_ends_above_seven_tenths(
    stored, begins, continues
):
    rates = CodecRates(stored, 1.25e9, 2)
    assert worth_encoding(rates, encodes=False) is begins
    assert worth_encoding(rates, encodes=True) is continues


@pytest.mark.parametrize(
    ("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (9, 4), (128, 4)]
)
def test_half_of_the_cores_decode_and_at_most_four(cores, threads):
    assert decode_threads(cores) == threads


def test_a_decoding_rate_begins_at_the_default_and_follows_the_measurements():
    meter = DecodeMeter()
    assert meter.bytes_per_s == pytest.approx(DECODE_DEFAULT)
    for _ in range(200):
        meter.observe(8 << 20, (8 << 20) / 1e9)
    assert meter.bytes_per_s == pytest.approx(1e9, rel=0.02)
    for _ in range(200):
        meter.observe(8 << 20, (8 << 20) / 4e9)
    assert meter.bytes_per_s == pytest.approx(4e9, rel=0.1)


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (-1, 1.0), (1 << 20, 0.0), (1, -1.0)])
def test_an_impossible_observation_changes_nothing(nbytes, seconds):
    meter = DecodeMeter()
    meter.observe(nbytes, seconds)
    assert meter.bytes_per_s == pytest.approx(DECODE_DEFAULT)


def deliveries(raw_s, encoded_s, times=40):
    comparison = DeliveryComparison()
    for _ in range(times):
        comparison.observe(1 << 23, raw_s, encoded=False)
        comparison.observe(1 << 23, encoded_s, encoded=True)
    return comparison


@pytest.mark.parametrize(
    ("raw_s", "encoded_s", "slower"),
    [(0.008, 0.006, False), (0.008, 0.0081, False), (0.008, 0.009, True), (0.001, 0.1, True)],
)
def test_encoded_records_that_arrive_later_than_raw_ones_are_noticed(raw_s, encoded_s, slower):
    assert deliveries(raw_s, encoded_s).encoded_is_slower is slower


def test_a_few_batches_or_one_form_alone_say_nothing():
    assert not deliveries(0.001, 0.1, times=3).encoded_is_slower
    alone = DeliveryComparison()
    for _ in range(100):
        alone.observe(1 << 23, 0.1, encoded=True)
    assert not alone.encoded_is_slower


def test_impossible_deliveries_change_nothing():
    comparison = deliveries(0.008, 0.006)
    for _ in range(100):
        comparison.observe(0, 5.0, encoded=True)
        comparison.observe(1 << 23, 0.0, encoded=False)
    assert not comparison.encoded_is_slower


def test_raw_batches_are_known_after_a_few():
    comparison = DeliveryComparison()
    for _ in range(7):
        comparison.observe(1 << 23, 0.1, encoded=False)
    assert not comparison.knows_raw
    comparison.observe(1 << 23, 0.1, encoded=False)
    assert comparison.knows_raw


def test_encoded_records_that_were_slower_are_tried_again_after_many_raw_batches():
    comparison = deliveries(0.008, 0.016)
    for _ in range(2_047):
        comparison.observe(1 << 23, 0.008, encoded=False)
    assert comparison.encoded_is_slower
    comparison.observe(1 << 23, 0.008, encoded=False)
    assert not comparison.encoded_is_slower
