"""A length or an address from a peer is believed: heap overflow, reads and writes anywhere.

llama.cpp multiplied lengths of a saved state without a check; Mooncake's data port took any
address and size; a name that the caller chose was the key under which others were served.
CVE-2026-43629, CVE-2026-103764, CVE-2026-111392
"""

import pytest

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import unpack_keys
from holdfast.codec.pack import verify
from holdfast.errors import BlockError, ProtocolError
from holdfast.limits import PAYLOAD_BYTES_MAX
from holdfast.testing.payloads import header_of, key_of, namespace_of, record_of
from holdfast.wire.frame import read_head


@pytest.mark.parametrize("body", [0xFFFF_FFFF, 3 << 20])
def test_a_frame_that_is_too_long_is_refused_before_memory_is_allocated(body):
    head = body.to_bytes(4, "little") + bytes(4) + bytes(8)
    with pytest.raises(ProtocolError, match="the limit is"):
        read_head(head)


def test_a_payload_beyond_the_limit_is_refused():
    head = bytes(8) + (PAYLOAD_BYTES_MAX * 2).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="the limit is"):
        read_head(head)


def test_the_length_in_a_record_is_checked_against_its_slot():
    namespace = namespace_of(3_000)
    record = record_of(namespace, key_of(1))
    assert verify(record[:2_000], key_of(1), namespace.fingerprint, 3_000) == "corrupt"
    assert verify(record, key_of(1), namespace.fingerprint, 2_999) == "corrupt"
    assert read_header(record)[0] == header_of(namespace, key_of(1))


def test_keys_of_another_width_are_refused():
    with pytest.raises(BlockError, match="are not a multiple of 16"):
        unpack_keys(b"a name of my own!")
