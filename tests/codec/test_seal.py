"""Sealed records: golden bytes; nothing changed, swapped or foreign opens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.envelope import HEADER_BYTES, read_header, stamp, stored_bytes, write_header
from holdfast.codec import pack, seal
from holdfast.codec.seal import DataKey
from holdfast.errors import FormatError, Outcome
from holdfast.testing.payloads import (
    header_of,
    is_right,
    key_of,
    namespace_of,
    payload_of,
    record_of,
)

NAMESPACE = namespace_of(300)
KEY = key_of(0)
SECRET = bytes(range(32))
DATA_KEY = DataKey(seal.derive(SECRET, 1), 1)
NONCE = bytes(range(100, 112))
SIGNED_BYTES = range(16, 128 + 300 + 16)  # identity, payload, tag


def seal_into(record, into, data_key=DATA_KEY, nonce=NONCE):
    return data_key.sealer(record, nonce).seal(record, into)


def sealed(key=KEY, namespace=NAMESPACE, data_key=DATA_KEY, nonce=NONCE):
    record = memoryview(bytearray(b"\xee" * stored_bytes(namespace.raw_bytes)))
    assert seal_into(record_of(namespace, key), record, data_key, nonce) is Outcome.OK
    return record


def test_a_sealed_record_matches_the_golden_bytes():
    record = memoryview(bytearray(stored_bytes(8)))
    record[128:136] = b"holdfast"
    pack.pack(record, header_of(NAMESPACE, KEY)._replace(
        key=bytes([1]) * 16, parent=bytes([2]) * 16, fingerprint=bytes([3]) * 16,
        domain=bytes([4]) * 16, depth=5, tokens=128, payload_bytes=8, raw_bytes=8,
    ))  # fmt: skip
    into = memoryview(bytearray(stored_bytes(8)))
    data_key = DataKey(bytes(range(32)), 1)
    assert data_key.key_id.hex() == "9d9eb2b6"
    assert seal_into(record, into, data_key) is Outcome.OK
    assert bytes(into[:HEADER_BYTES]).hex() == (
        "484645315672f10d000000000000000002000001050000008000000001000000"
        "0101010101010101010101010101010102020202020202020202020202020202"
        "0303030303030303030303030303030304040404040404040404040404040404"
        "080000000800000000000000000000006465666768696a6b6c6d6e6f9d9eb2b6"
    )
    assert (
        bytes(into[HEADER_BYTES : HEADER_BYTES + 24]).hex()
        == "46b57126ab24b628503e0f2de24a7dbeb24833dd262c148e"
    )
    assert bytes(into[HEADER_BYTES + 24 :]) == bytes(4096 - HEADER_BYTES - 24)


def test_derived_and_wrapped_keys_match_the_golden_bytes():
    assert (
        seal.derive(SECRET, 7).hex()
        == "54a7a32c5a350d6002421db2b1cbea458158e07bf6f05a1c505f015a4117509a"
    )
    wrapped = DataKey(bytes([5]) * 32, 7).wrapped(SECRET, bytes([4]) * 16, NONCE)
    assert wrapped.hex() == (
        "6465666768696a6b6c6d6e6f17f622dfbaac19d14c2591348b32beca0b0c96ea"
        "a3b200c0cab77ddb7c632983a939fe79580d394c695d84fdd0e929a3"
    )
    assert seal.unwrap(wrapped, SECRET, bytes([4]) * 16, 7) == bytes([5]) * 32


@pytest.mark.parametrize("nbytes", [1, 300, 3_952, 3_953, 70_000])
def test_a_sealed_record_opens_to_the_original(nbytes):
    namespace = namespace_of(nbytes)
    record = sealed(namespace=namespace)
    assert DATA_KEY.open(record) is Outcome.OK
    assert is_right(record, namespace, KEY)
    assert bytes(record) == bytes(record_of(namespace, KEY))


@pytest.mark.parametrize("nbytes", [1, 300, 70_000])
def test_a_record_that_is_decoded_next_is_decrypted_without_a_tag(nbytes):
    namespace = namespace_of(nbytes)
    record, end = sealed(namespace=namespace), HEADER_BYTES + nbytes
    tag = bytes(record[end : end + 16])
    assert DATA_KEY.decrypt(record) is Outcome.OK
    assert bytes(record[:end]) == bytes(record_of(namespace, KEY)[:end])
    assert bytes(record[end : end + 16]) == tag


@pytest.mark.parametrize("at", [*range(16), HEADER_BYTES, HEADER_BYTES + 299, HEADER_BYTES + 300])
def test_a_damaged_record_that_is_decoded_next_is_not_decrypted(at):
    record = sealed()
    record[at] ^= 1
    assert DATA_KEY.decrypt(record) is Outcome.CORRUPT


def test_a_sealed_record_hides_its_payload_and_fails_plain_verification():
    record = sealed()
    assert bytes(payload_of(KEY, 300))[:32] not in bytes(record)
    assert pack.verify(record, KEY, NAMESPACE.fingerprint, 300) is Outcome.CORRUPT
    assert not is_right(record, NAMESPACE, KEY)


def test_a_sealed_record_opens_after_a_tier_stamps_it():
    record = sealed()
    stamp(record, 77)
    assert DATA_KEY.open(record) is Outcome.OK


@given(st.sampled_from(SIGNED_BYTES), st.integers(1, 255))
def test_a_sealed_record_with_a_changed_byte_does_not_open(at, change):
    record = sealed()
    record[at] ^= change
    assert DATA_KEY.open(record) is not Outcome.OK


@given(st.sampled_from(SIGNED_BYTES), st.integers(1, 255))
def test_a_sealed_record_with_a_changed_byte_and_a_valid_crc_does_not_open(at, change):
    record = sealed()
    record[at] ^= change
    stamp(record, 0)
    assert DATA_KEY.open(record) is not Outcome.OK


@given(st.integers(0, 127))
def test_a_truncated_record_does_not_open(kept_tenths):
    record = sealed()
    kept = len(SIGNED_BYTES) * kept_tenths // 128
    assert DATA_KEY.open(record[: 16 + kept]) is Outcome.CORRUPT


def test_records_with_swapped_bodies_do_not_open():
    one, other = sealed(KEY), sealed(key_of(1))
    body = bytes(one[HEADER_BYTES:])
    one[HEADER_BYTES:] = other[HEADER_BYTES:]
    other[HEADER_BYTES:] = body
    assert DATA_KEY.open(one) is DATA_KEY.open(other) is Outcome.CORRUPT


@pytest.mark.parametrize("field", ["key", "parent", "fingerprint", "domain"])
def test_a_record_with_a_header_of_another_record_does_not_open(field):
    record = sealed()
    header, _ = read_header(record)
    write_header(record, header._replace(**{field: bytes([9]) * 16}))
    assert DATA_KEY.open(record) is Outcome.CORRUPT


def test_a_record_of_another_epoch_is_a_miss_and_a_forged_epoch_is_corrupt():
    other = DataKey(seal.derive(SECRET, 2), 2)
    record = sealed(data_key=other)
    assert DATA_KEY.open(record) is Outcome.MISS
    header, _ = read_header(record)
    write_header(record, header._replace(epoch=1, key_id=DATA_KEY.key_id))
    assert DATA_KEY.open(record) is Outcome.CORRUPT


def test_a_record_is_a_miss_under_another_domains_key():
    assert DataKey(seal.derive(bytes(32), 1), 1).open(sealed()) is Outcome.MISS


@given(st.sampled_from(SIGNED_BYTES), st.integers(1, 255))
def test_a_damaged_record_is_not_sealed(at, change):
    record = record_of(NAMESPACE, KEY)
    sealer = DATA_KEY.sealer(record, NONCE)
    record[at] ^= change
    into = memoryview(bytearray(len(record)))
    assert sealer.seal(record, into) is Outcome.CORRUPT
    stamp(record, 0)
    late = DATA_KEY.sealer(record, NONCE)
    assert late is None or late.seal(record, into) is Outcome.CORRUPT
    assert bytes(into) == bytes(len(into))


def test_a_damaged_header_has_no_sealer():
    record = record_of(NAMESPACE, KEY)
    record[40] ^= 1
    assert DATA_KEY.sealer(record, NONCE) is None


def test_a_sealed_record_is_not_sealed_again():
    into = memoryview(bytearray(stored_bytes(300)))
    assert seal_into(sealed(), into) is Outcome.CORRUPT
    assert bytes(into) == bytes(len(into))


def test_a_sealer_seals_only_the_record_it_was_made_for():
    one, other = record_of(NAMESPACE, KEY), record_of(NAMESPACE, key_of(1))
    into = memoryview(bytearray(len(one)))
    assert DATA_KEY.sealer(one, NONCE).seal(other, into) is Outcome.CORRUPT
    assert bytes(into) == bytes(len(into))


def test_a_record_stamped_before_its_seal_is_sealed_correctly():
    record = record_of(NAMESPACE, KEY)
    sealer = DATA_KEY.sealer(record, NONCE)
    stamp(record, 77)
    into = memoryview(bytearray(len(record)))
    assert sealer.seal(record, into) is Outcome.OK
    assert bytes(into) == bytes(sealed())


def test_two_seals_of_one_block_have_different_ciphertexts():
    one, other = sealed(nonce=NONCE), sealed(nonce=bytes(12))
    assert bytes(one[HEADER_BYTES:160]) != bytes(other[HEADER_BYTES:160])


def test_the_repr_of_a_data_key_contains_no_secret():
    assert seal.derive(SECRET, 1).hex() not in repr(DATA_KEY)
    assert not hasattr(DATA_KEY, "__dict__")


def test_a_wrapped_key_opens_under_its_secret_domain_and_epoch_only():
    wrapped = DATA_KEY.wrapped(SECRET, NAMESPACE.domain, NONCE)
    assert seal.unwrap(wrapped, SECRET, NAMESPACE.domain, 1) == seal.derive(SECRET, 1)
    flipped = bytes([wrapped[20] ^ 1])
    for case in (
        (wrapped, bytes(32), NAMESPACE.domain, 1),
        (wrapped, SECRET, bytes(16), 1),
        (wrapped, SECRET, NAMESPACE.domain, 2),
        (wrapped[:-1], SECRET, NAMESPACE.domain, 1),
        (wrapped[:20] + flipped + wrapped[21:], SECRET, NAMESPACE.domain, 1),
    ):
        with pytest.raises(FormatError, match="epoch"):
            seal.unwrap(*case)


def test_a_data_key_has_32_bytes():
    with pytest.raises(FormatError, match="31 bytes"):
        DataKey(bytes(31), 1)
