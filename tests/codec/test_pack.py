"""Records: golden bytes; any change to identity or payload is noticed, no other block passes."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.envelope import (
    Header,
    header_of_record,
    read_header,
    stamp,
    stored_bytes,
    write_header,
)
from holdfast.codec import pack
from holdfast.errors import Outcome, UnknownFormatError
from holdfast.testing.payloads import header_of, key_of, namespace_of, record_of

NAMESPACE = namespace_of(300)
KEY = key_of(0)


def verify(record, key=KEY, namespace=NAMESPACE):
    return pack.verify(record, key, namespace.fingerprint, namespace.raw_bytes)


def test_the_tag_matches_the_golden_vector():
    header = Header(
        key=bytes([1]) * 16,
        parent=bytes([2]) * 16,
        fingerprint=bytes([3]) * 16,
        domain=bytes([4]) * 16,
        depth=5,
        tokens=128,
        payload_bytes=8,
        raw_bytes=8,
    )
    record = memoryview(bytearray(stored_bytes(8)))
    record[128:136] = b"holdfast"
    pack.pack(record, header)
    assert record[136:152].hex() == "cf6dcfc236a390fe6a034bf984d3d5a2"
    assert record[152:] == bytes(4096 - 152)
    assert record[136:152] == xxhash.xxh3_128(record[16:136]).digest()


@pytest.mark.parametrize("nbytes", [0, 1, 300, 3_952, 3_953, 70_000])
def test_a_packed_record_verifies(nbytes):
    namespace = namespace_of(nbytes)
    record = record_of(namespace, KEY)
    assert verify(record, namespace=namespace) is Outcome.OK
    assert len(pack.payload(record, nbytes)) == nbytes


def test_a_packed_record_contains_no_bytes_of_the_slots_previous_record():
    record = memoryview(bytearray(b"\xee" * 4096))
    pack.payload(record, 300)[:] = bytes(300)
    pack.pack(record, header_of(NAMESPACE, KEY))
    assert bytes(record[128:428]) == bytes(300)
    assert bytes(record[444:]) == bytes(4096 - 444)


def test_a_record_verifies_after_a_tier_stamps_it():
    record = record_of(NAMESPACE, KEY)
    stamp(record, 77)
    assert verify(record) is Outcome.OK


def test_every_flipped_bit_is_noticed():
    for bit in range(8 * (128 + 300 + 16)):
        record = record_of(NAMESPACE, KEY)
        record[bit // 8] ^= 1 << bit % 8
        assert verify(record) is not Outcome.OK, bit


def test_every_flipped_bit_of_the_identity_is_detected_even_with_a_valid_crc():
    """The CRC guards against accidents in the mark; the tag covers the identity."""
    for bit in range(8 * 16, 8 * 128):
        record = record_of(NAMESPACE, KEY)
        record[bit // 8] ^= 1 << bit % 8
        stamp(record, 0)
        assert verify(record) is not Outcome.OK, bit


@given(st.integers(0, 128 + 300 + 15))
def test_every_truncation_of_a_record_is_detected(end):
    record = record_of(NAMESPACE, KEY)
    assert verify(record[:end]) is Outcome.CORRUPT
    zeroed = memoryview(bytes(record[:end]).ljust(4096, b"\0"))
    assert end >= 443 or verify(zeroed) is Outcome.CORRUPT


@given(st.binary(max_size=5_000))
def test_noise_is_corrupt(noise):
    assert verify(memoryview(noise)) is Outcome.CORRUPT


def test_a_record_of_another_block_is_a_miss():
    assert verify(record_of(NAMESPACE, key_of(1))) is Outcome.MISS
    assert verify(record_of(namespace_of(300, seed=9), KEY)) is Outcome.MISS


def test_a_record_of_another_length_is_corrupt():
    assert verify(record_of(namespace_of(301), KEY)) is Outcome.CORRUPT


def test_a_payload_of_another_block_under_this_header_is_corrupt():
    record, other = record_of(NAMESPACE, KEY), record_of(NAMESPACE, key_of(1))
    record[128:] = other[128:]
    assert verify(record) is Outcome.CORRUPT


def test_an_unknown_seal_is_corrupt():
    record = record_of(NAMESPACE, KEY)
    header = header_of(NAMESPACE, KEY)._replace(seal=1)
    pack.pack(record, header)
    assert verify(record) is Outcome.CORRUPT


def test_a_payload_with_an_unknown_codec_is_corrupt():
    record = record_of(NAMESPACE, KEY)
    pack.pack(record, header_of(NAMESPACE, KEY)._replace(codec=1))
    assert verify(record) is Outcome.CORRUPT


def test_a_record_with_a_false_payload_length_is_corrupt():
    record = record_of(NAMESPACE, KEY)
    write_header(record, header_of(NAMESPACE, KEY)._replace(payload_bytes=2**32 - 1))
    assert verify(record) is Outcome.CORRUPT
    assert pack.verify(record, KEY, NAMESPACE.fingerprint, 2**32 - 1) is Outcome.CORRUPT


def of_format(number):
    record = record_of(NAMESPACE, KEY)
    record[16:18] = number.to_bytes(2, "little")
    stamp(record, 0)
    return record


def packed(**fields):
    """A record with a valid tag, whose header has other values in these fields."""
    record = record_of(NAMESPACE, KEY)
    pack.pack(record, header_of(NAMESPACE, KEY)._replace(**fields))
    return record


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(record_of(NAMESPACE, KEY), Outcome.OK, id="intact"),
        pytest.param(record_of(NAMESPACE, key_of(1)), Outcome.CORRUPT, id="another block"),
        pytest.param(record_of(NAMESPACE, KEY)[:100], Outcome.CORRUPT, id="cut in the header"),
        pytest.param(record_of(NAMESPACE, KEY)[:400], Outcome.CORRUPT, id="cut in the payload"),
        pytest.param(memoryview(bytes(4096)), Outcome.CORRUPT, id="zeros"),
        pytest.param(of_format(1), Outcome.UNREADABLE, id="an earlier format"),
        pytest.param(of_format(3), Outcome.UNREADABLE, id="a later format"),
        pytest.param(packed(codec=9, payload_bytes=200), Outcome.OK, id="an unknown codec"),
        pytest.param(packed(codec=9), Outcome.CORRUPT, id="a codec that shortens nothing"),
        pytest.param(packed(payload_bytes=200), Outcome.CORRUPT, id="shorter without a codec"),
        pytest.param(packed(raw_bytes=301), Outcome.CORRUPT, id="another decoded length"),
    ],
)
def test_only_provable_damage_is_corrupt_without_a_key(record, expected):
    assert pack.check_without_key(record, KEY, NAMESPACE) is expected


@pytest.mark.parametrize("number", [1, 3])
def test_a_record_of_another_format_is_reported_as_such(number):
    with pytest.raises(UnknownFormatError, match=f"has format {number}; this build reads 2"):
        read_header(of_format(number))
    assert header_of_record(of_format(number)) is None
