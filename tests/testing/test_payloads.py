"""Test payloads are a function of the key in which no sector can pass for another."""

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.codec import pack
from holdfast.testing.payloads import (
    fill_record,
    header_of,
    is_right,
    key_of,
    namespace_of,
    payload_of,
    record_of,
)

NAMESPACE = namespace_of(200_000)


def test_a_payload_depends_on_nothing_but_its_key_and_length():
    assert payload_of(key_of(1), 100) == payload_of(key_of(1), 100)
    assert payload_of(key_of(1), 1 << 20)[:100] == payload_of(key_of(1), 100)
    assert [len(payload_of(key_of(1), n)) for n in (0, 1, 7, 65_537)] == [0, 1, 7, 65_537]


def test_no_sector_of_any_block_equals_another():
    sectors = [
        bytes(payload[at : at + 512])
        for number in range(4)
        for payload in [payload_of(key_of(number), 1 << 20)]
        for at in range(0, len(payload), 512)
    ]
    assert len(set(sectors)) == len(sectors)


def test_keys_and_namespaces_of_other_seeds_differ():
    keys = {key_of(number, seed) for number in range(50) for seed in range(5)}
    assert len(keys) == 250
    assert namespace_of(8, 1).fingerprint != namespace_of(8, 2).fingerprint


def test_a_record_is_right_for_its_key_only():
    record = record_of(NAMESPACE, key_of(1), depth=3)
    assert read_header(record)[0].depth == 3
    assert is_right(record, NAMESPACE, key_of(1))
    assert not is_right(record, NAMESPACE, key_of(2))
    record[5_000] ^= 1
    assert not is_right(record, NAMESPACE, key_of(1))


def test_a_record_that_verifies_with_wrong_bytes_is_an_error():
    record = record_of(NAMESPACE, key_of(1))
    fill_record(record, header_of(NAMESPACE, key_of(2)))
    pack.pack(record, header_of(NAMESPACE, key_of(1)))
    with pytest.raises(AssertionError, match="its payload is wrong"):
        is_right(record, NAMESPACE, key_of(1))
