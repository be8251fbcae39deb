"""Encoded records: they verify, decode to the same block, and never hide damage or do harm."""

import pytest

from holdfast.blocks.envelope import SEAL_AES_GCM, header_of_record, stored_bytes
from holdfast.codec.codec import codec_named, register, unregister
from holdfast.codec.coded import (
    DAMAGED,
    MISMATCH,
    NOT_SHORTER,
    decode_record,
    encode_record,
)
from holdfast.codec.pack import pack, payload
from holdfast.errors import CodecMismatchError, FormatError, Outcome
from holdfast.testing.payloads import header_of, key_of, namespace_of

NBYTES = 40_001
NAMESPACE = namespace_of(NBYTES)
PLANES = codec_named("planes")


def raw_record(content=b"\x12\x3f\x99\x3f"):
    record = memoryview(bytearray(stored_bytes(NBYTES)))
    payload(record, NBYTES)[:] = (content * -(-NBYTES // len(content)))[:NBYTES]
    pack(record, header_of(NAMESPACE, key_of(3)))
    return record


def space():
    return memoryview(bytearray(b"\xee" * stored_bytes(NBYTES)))


def encoded(codec=PLANES, content=b"\x12\x3f\x99\x3f"):
    into = space()
    return into[: encode_record(raw_record(content), codec, into, 2)]


class Odd:
    """A codec that drops everything, and does what a test says when it decodes."""

    number, name = 201, "odd"

    def __init__(self, fault=None, on_encode=None):
        self.fault, self.on_encode = fault, on_encode

    def encode(self, raw, into, element_bytes):
        if self.on_encode is not None:
            raise self.on_encode
        return 1

    def decode(self, stored, into):
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def odd():
    """Register an `Odd` codec for the duration of a test."""
    codec = Odd()
    register(codec)
    yield codec
    unregister(codec)


def test_an_encoded_record_is_shorter_and_decodes_to_the_same_record():
    stored, back = encoded(), space()
    assert 0 < len(stored) <= len(back) - 4096
    assert len(stored) % 4096 == 0
    header = header_of_record(stored)
    assert (header.codec, header.raw_bytes) == (1, NBYTES)
    assert header.payload_bytes < NBYTES
    assert header.key == key_of(3)
    assert decode_record(stored, back) is Outcome.OK
    assert bytes(back) == bytes(raw_record())


def test_a_raw_record_decodes_to_itself():
    back = space()
    assert decode_record(raw_record(), back) is Outcome.OK
    assert bytes(back) == bytes(raw_record())


def test_a_record_that_does_not_shrink_is_stored_raw():
    import random

    record = raw_record(random.Random(4).randbytes(NBYTES))
    assert encode_record(record, PLANES, space(), 2) == NOT_SHORTER


@pytest.mark.parametrize("fault", [CodecMismatchError("differs"), RuntimeError("broken")])
def test_a_record_is_stored_raw_if_its_codec_fails(fault):
    assert encode_record(raw_record(), Odd(on_encode=fault), space(), 2) == MISMATCH


def test_damage_of_a_raw_record_is_not_hidden_by_a_new_tag():
    record = raw_record()
    record[500] ^= 1
    assert encode_record(record, PLANES, space(), 2) == DAMAGED
    record[20] ^= 1
    assert encode_record(record, PLANES, space(), 2) == DAMAGED


def test_an_encoded_record_is_not_encoded_again():
    stored = encoded()
    assert encode_record(stored, PLANES, space(), 2) == DAMAGED


@pytest.mark.parametrize("at", [10, 40, 130, 150])
def test_a_flipped_bit_is_corrupt(at):
    stored = encoded()
    stored[at] ^= 4
    assert decode_record(stored, space()) is Outcome.CORRUPT


def test_a_truncated_record_is_corrupt():
    assert decode_record(encoded()[:150], space()) is Outcome.CORRUPT
    assert decode_record(encoded()[:100], space()) is Outcome.CORRUPT


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"raw_bytes": NBYTES - 1}, Outcome.CORRUPT),
        ({"raw_bytes": 1 << 31}, Outcome.CORRUPT),
        ({"codec": 0}, Outcome.CORRUPT),
        ({"codec": 99}, Outcome.UNREADABLE),
        ({"seal": SEAL_AES_GCM}, Outcome.CORRUPT),
        ({"payload_bytes": 100}, Outcome.CORRUPT),
        ({"payload_bytes": 0}, Outcome.CORRUPT),
    ],
)
def test_a_header_that_lies_with_a_valid_tag_is_no_block(change, outcome):
    """Any process can forge an unsealed record, with its tag."""
    stored = encoded()
    pack(stored, header_of_record(stored)._replace(**change))
    assert decode_record(stored, space()) is outcome


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(FormatError("wrong"), Outcome.CORRUPT), (RuntimeError("broken"), Outcome.UNREADABLE)],
)
def test_a_codec_that_raises_is_an_outcome(odd, fault, outcome):
    stored = encoded(odd)
    odd.fault = fault
    assert decode_record(stored, space()) is outcome


def test_a_record_whose_codec_is_missing_is_unreadable_and_may_be_read_elsewhere(odd):
    stored = encoded(odd)
    unregister(odd)
    assert decode_record(stored, space()) is Outcome.UNREADABLE
