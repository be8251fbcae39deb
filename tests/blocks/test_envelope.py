"""The envelope: golden bytes, and damage at every byte of the header."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.envelope import (
    Header,
    read_header,
    resealed,
    stamp,
    stored_bytes,
    write_header,
)
from holdfast.errors import FormatError, UnknownFormatError

HEADER = Header(
    key=bytes([1]) * 16,
    parent=bytes([2]) * 16,
    fingerprint=bytes([3]) * 16,
    domain=bytes([4]) * 16,
    depth=5,
    tokens=128,
    payload_bytes=2 << 20,
    raw_bytes=3 << 20,
    codec=6,
    seal=7,
    epoch=8,
    nonce=bytes([9]) * 12,
    segment=bytes([10]) * 8,
)

sixteen = st.binary(min_size=16, max_size=16)
number = st.integers(0, 2**32 - 1)
headers = st.builds(
    Header,
    key=sixteen,
    parent=sixteen,
    fingerprint=sixteen,
    domain=sixteen,
    depth=number,
    tokens=number,
    payload_bytes=number,
    raw_bytes=number,
    codec=st.integers(0, 255),
    seal=st.integers(0, 255),
    epoch=number,
    nonce=st.binary(min_size=12, max_size=12),
    segment=st.binary(min_size=8, max_size=8),
    key_id=st.binary(min_size=4, max_size=4),
)


def written(header=HEADER, generation=11):
    record = memoryview(bytearray(b"\xee" * 256))
    write_header(record, header, generation)
    return record


def test_header_bytes_match_the_golden_vector():
    assert bytes(written()[:128]).hex() == (
        "484645310c3085240b0000000000000002000607050000008000000008000000"
        "0101010101010101010101010101010102020202020202020202020202020202"
        "0303030303030303030303030303030304040404040404040404040404040404"
        "00002000000030000a0a0a0a0a0a0a0a09090909090909090909090900000000"
    )


def test_writing_a_header_changes_no_byte_after_it():
    assert bytes(written()[128:]) == b"\xee" * 128


@given(headers, st.integers(0, 2**64 - 1))
def test_a_written_header_is_read_unchanged(header, generation):
    assert read_header(written(header, generation)) == (header, generation)


@given(headers, st.integers(0, 2**64 - 1))
def test_stamping_a_record_changes_only_the_generation_and_its_crc(header, generation):
    record = written(header, 0)
    identity = bytes(record[16:])
    stamp(record, generation)
    assert read_header(record) == (header, generation)
    assert bytes(record[16:]) == identity


def test_a_header_stamped_during_a_read_is_read_as_valid(monkeypatch):
    """A disk tier stamps a record in memory while a fetch checks its header."""
    record, crc32 = written(), zlib.crc32
    expected = read_header(record)

    def stamped_meanwhile(data, *start):
        monkeypatch.setattr("zlib.crc32", crc32)
        stamp(record, 77)
        return crc32(data, *start)

    monkeypatch.setattr("zlib.crc32", stamped_meanwhile)
    assert read_header(record) == expected
    assert read_header(record)[1] == 77


@given(headers, st.integers(0, 2**64 - 1), headers)
def test_a_resealed_header_equals_a_header_written_with_that_seal(header, generation, other):
    record, expected = memoryview(bytearray(128)), memoryview(bytearray(128))
    write_header(record, header, generation)
    before = bytes(record)
    seal = {"seal": other.seal, "epoch": other.epoch, "nonce": other.nonce, "key_id": other.key_id}
    write_header(expected, header._replace(**seal))
    assert bytes(resealed(before, **seal)) == bytes(expected)
    assert bytes(record) == before


def test_every_flipped_bit_is_noticed():
    for bit in range(8 * 128):
        record = written()
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            read_header(record)


def test_every_truncation_of_a_header_is_detected():
    record = written()
    for end in range(128):
        with pytest.raises(FormatError):
            read_header(record[:end])
    for end in range(124):  # the last four bytes are zero anyway
        with pytest.raises(FormatError):
            read_header(bytes(record[:end]).ljust(128, b"\0"))


@given(st.binary(max_size=300))
def test_noise_is_refused(noise):
    with pytest.raises(FormatError):
        read_header(noise)


@pytest.mark.parametrize("number", [1, 3])
def test_an_earlier_and_a_later_format_are_refused_by_number(number):
    record = written()
    record[16:18] = number.to_bytes(2, "little")
    stamp(record, 0)
    with pytest.raises(UnknownFormatError, match=f"has format {number}; this build reads 2"):
        read_header(record)


def test_a_record_is_as_long_as_its_stored_payload_needs():
    assert HEADER.stored_bytes == (2 << 20) + 4096


@given(st.integers(0, 1 << 28))
def test_a_record_is_the_fewest_sectors_that_hold_it(payload_bytes):
    size = stored_bytes(payload_bytes)
    assert size % 4096 == 0
    assert size - 4096 < 128 + payload_bytes + 16 <= size
