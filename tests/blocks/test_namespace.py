"""A namespace's public domain id betrays nothing of its key."""

from holdfast.blocks.namespace import Namespace, domain_id, namespace_digest, namespace_of
from holdfast.testing.payloads import header_of, key_of
from holdfast.testing.payloads import namespace_of as namespace_with


def test_the_domain_id_matches_the_golden_vector():
    assert domain_id(bytes(range(32))).hex() == "aff1b0d71365f3b3be4ff76a46f81b10"


def test_different_domain_keys_have_different_ids():
    keys = [bytes([n]) * 32 for n in range(50)]
    assert len({domain_id(key) for key in keys}) == 50
    assert all(domain_id(key) not in key for key in keys)


def test_a_slot_is_whole_sectors():
    assert Namespace(b"", b"", 2 << 20, 128).slot_bytes == (2 << 20) + 4096
    assert Namespace(b"", b"", 4096 - 144, 128).slot_bytes == 4096


def test_a_namespace_has_the_decoded_length_and_no_stored_one():
    namespace = namespace_with(300)
    header = header_of(namespace, key_of(0))
    shorter = header._replace(codec=1, payload_bytes=200)
    assert namespace_of(header) == namespace_of(shorter) == namespace


def test_the_name_outside_a_process_depends_on_fingerprint_and_domain_only():
    one = Namespace(b"f" * 16, b"d" * 16, 300, 16)
    assert namespace_digest(one).hex() == "49e56fd886536c50176dc3e507098f4a"
    assert namespace_digest(one._replace(raw_bytes=301, block_tokens=32)) == namespace_digest(one)
    assert namespace_digest(one._replace(fingerprint=b"g" * 16)) != namespace_digest(one)
    assert namespace_digest(one._replace(domain=b"e" * 16)) != namespace_digest(one)
