"""The codec of a tier: it encodes where that pays, counts what it does, and follows the rates."""

import pytest

from holdfast.blocks.envelope import header_of_record
from holdfast.codec.pack import pack, payload
from holdfast.codec.planes import Planes
from holdfast.errors import CodecMismatchError, Outcome
from holdfast.store.tier_codec import DecodeSlots, TierCodec
from holdfast.testing.payloads import header_of, key_of, namespace_of, record_of

NBYTES = 60_000
NAMESPACE = namespace_of(NBYTES)
MIB = 1 << 20


class ManualClock:
    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at


def opened(mode, threads=1):
    clock = ManualClock()
    return TierCodec("disk", mode, clock, DecodeSlots(threads)), clock


def compressible():
    record = record_of(NAMESPACE, key_of(1))
    payload(record, NBYTES)[:] = (b"\x07\x3f\xe1\x3f" * NBYTES)[:NBYTES]
    pack(record, header_of(NAMESPACE, key_of(1)))
    return record


def room():
    return memoryview(bytearray(len(record_of(NAMESPACE, key_of(1)))))


def read(codec, clock, bytes_per_s, times=40):
    """Let the tier deliver stored records at a rate."""
    for _ in range(times):
        codec.asked(8 * MIB)
        clock.at += 8 * MIB / bytes_per_s
        codec.arrived(8 * MIB, of=8 * MIB)


def compare(codec, seconds=0.016):
    """Let the tier deliver raw batches, with which encoded ones can be compared."""
    for _ in range(8):
        codec.delivered(8 * MIB, seconds, encoded=False)


def test_a_tier_does_not_encode_before_its_raw_records_were_measured():
    codec, clock = opened("auto")
    read(codec, clock, 0.5e9)
    assert not codec.wants(NAMESPACE)
    compare(codec)
    assert codec.wants(NAMESPACE)


def test_a_tier_whose_codec_is_off_never_encodes_and_still_decodes():
    off, _ = opened("off")
    planes, _ = opened("planes")
    assert not off.wants(NAMESPACE)
    into, back = room(), room()
    stored = planes.encode(compressible(), NAMESPACE, into, 2)
    assert off.decode(into[:stored], back) is Outcome.OK
    assert bytes(back) == bytes(compressible())
    assert off.status().decoded == 1
    assert not off.status().encodes


def test_a_slow_tier_encodes_and_a_fast_one_does_not():
    codec, clock = opened("auto")
    compare(codec)
    assert codec.wants(NAMESPACE)
    read(codec, clock, 20e9)
    assert not codec.wants(NAMESPACE)
    assert not codec.status().encodes
    read(codec, clock, 0.5e9)
    assert codec.wants(NAMESPACE)


def test_more_decoding_threads_pay_on_faster_tiers():
    one, clock = opened("auto", threads=1)
    read(one, clock, 4e9)
    four, clock = opened("auto", threads=4)
    read(four, clock, 4e9)
    compare(one)
    compare(four)
    assert (one.wants(NAMESPACE), four.wants(NAMESPACE)) == (False, True)


def test_a_codec_that_is_chosen_by_name_encodes_at_any_rate():
    codec, clock = opened("planes")
    read(codec, clock, 50e9)
    assert codec.wants(NAMESPACE)
    assert codec.status().encodes


def test_encoding_and_decoding_are_counted_in_raw_and_stored_bytes():
    codec, _ = opened("auto")
    record, into, back = compressible(), room(), room()
    stored = codec.encode(record, NAMESPACE, into, 2)
    header = header_of_record(into)
    assert header is not None
    assert header.codec == 1
    assert codec.decode(into[:stored], back) is Outcome.OK
    into[132] ^= 1
    assert codec.decode(into[:stored], back) is Outcome.CORRUPT
    status = codec.status()
    assert (status.encoded, status.raw_bytes, status.stored_bytes) == (1, len(record), stored)
    assert (status.decoded, status.undecodable) == (1, 1)


def test_a_model_whose_records_do_not_shrink_is_tried_rarely():
    codec, _ = opened("auto")
    compare(codec)
    tried = 0
    for _ in range(100):
        if codec.wants(NAMESPACE):
            tried += 1
            assert codec.encode(record_of(NAMESPACE, key_of(1)), NAMESPACE, room(), 2) == 0
    assert 4 <= tried <= 10
    assert codec.status().kept_raw == 100
    assert codec.wants(namespace_of(NBYTES, seed=1))


def test_a_record_that_does_not_come_back_is_counted_and_stored_raw(monkeypatch):
    def encode(*_):
        raise CodecMismatchError("it decodes to other bytes")

    monkeypatch.setattr(Planes, "encode", encode)
    codec, _ = opened("planes")
    assert codec.encode(compressible(), NAMESPACE, room(), 2) < 0
    assert codec.status().mismatches == 1
    assert codec.status().encoded == 0


@pytest.mark.parametrize("mode", ["auto", "off", "planes"])
def test_the_status_names_mode_and_rates(mode):
    codec, _ = opened(mode, threads=3)
    status = codec.status()
    assert (status.tier, status.mode, status.threads) == ("disk", mode, 3)
    assert status.read_bytes_per_s > 0
    assert status.decode_bytes_per_s > 0


def test_a_tier_stops_to_encode_if_encoded_records_arrive_later_than_raw_ones():
    codec, clock = opened("auto")
    read(codec, clock, 0.5e9)
    compare(codec)
    assert codec.wants(NAMESPACE)
    for _ in range(30):
        codec.delivered(8 * MIB, 0.020, encoded=True)
        codec.delivered(8 * MIB, 0.016, encoded=False)
    assert not codec.wants(NAMESPACE)
    for _ in range(60):
        codec.delivered(8 * MIB, 0.012, encoded=True)
    assert codec.wants(NAMESPACE)


def test_records_that_are_shorter_than_asked_count_with_their_own_bytes():
    """The index does not know the sizes of records on a shared tier: it asks for whole slots."""
    codec, clock = opened("auto")
    for _ in range(40):
        codec.asked(8 * MIB)
        clock.at += 0.004
        codec.arrived(5 * MIB, of=8 * MIB)
    assert codec.status().read_bytes_per_s == pytest.approx(5 * MIB / 0.004, rel=0.1)


def test_reads_that_failed_say_nothing_about_the_speed_of_a_tier():
    codec, clock = opened("auto")
    read(codec, clock, 1e9)
    before = codec.status().read_bytes_per_s
    for _ in range(40):
        codec.asked(8 * MIB)
        clock.at += 5.0
        codec.arrived(4 * MIB, of=8 * MIB, failed=True)
    assert codec.status().read_bytes_per_s == pytest.approx(before)
