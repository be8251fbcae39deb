"""A namespace's public domain id betrays nothing of its key."""

from holdfast.blocks.namespace import Namespace, domain_id


def test_the_domain_id_matches_the_golden_vector():
    assert domain_id(bytes(range(32))).hex() == "aff1b0d71365f3b3be4ff76a46f81b10"


def test_different_domain_keys_have_different_ids():
    keys = [bytes([n]) * 32 for n in range(50)]
    assert len({domain_id(key) for key in keys}) == 50
    assert all(domain_id(key) not in key for key in keys)


def test_a_record_is_whole_sectors():
    assert Namespace(b"", b"", 2 << 20, 128).record_bytes == (2 << 20) + 4096
    assert Namespace(b"", b"", 4096 - 144, 128).record_bytes == 4096
