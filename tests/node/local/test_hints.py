"""Hints over the socket: about a session that was followed, or a chain; a wrong one is refused."""

import pytest

from holdfast.errors import RefusedError
from holdfast.wire.local import messages as m


@pytest.fixture
def one(start_node, engine):
    return engine(start_node().address)


def test_hints_for_a_session_apply_to_the_context_of_its_lookups(one, names):
    keys = names("chat", 6)
    one.save(keys)
    one.call(m.Cover(b"".join(keys), session="chat-1"))
    assert one.call(m.Returns("chat-1", 5.0)) == m.Hinted(6)
    assert one.call(m.Closed("chat-1")) == m.Hinted(6)
    assert one.call(m.Closed("chat-1")) == m.Hinted(0), "it is over"


def test_sessions_with_one_name_in_two_domains_are_separate(start_node, engine, names, tmp_path):
    key_file = tmp_path / "other.key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    node = start_node(domains={"other": {"key_file": str(key_file)}})
    one, other = engine(node.address), engine(node.address, domain="other")
    keys = names("chat", 6)
    one.save(keys)
    one.call(m.Cover(b"".join(keys), session="chat-1"))
    assert other.call(m.Closed("chat-1")) == m.Hinted(0)
    assert one.call(m.Closed("chat-1")) == m.Hinted(6)


def test_a_hint_returns_the_number_of_blocks_pinned_or_prestaged(one, names):
    keys = names("chat", 6)
    one.save(keys[:4])
    assert one.call(m.Pin(b"".join(keys), 5.0)) == m.Hinted(4)
    assert one.call(m.Prestage(b"".join(keys), 0.0)) == m.Hinted(4)
    waits = m.Prestage(b"".join(keys), 0.0, queued=True, queued_tokens=9, queued_pairs=40.0)
    assert one.call(waits) == m.Hinted(4)
    assert one.call(m.Prestage(b"".join(names("nobody's", 3)), 0.0)) == m.Hinted(0)


def test_an_ephemeral_context_is_not_written_to_disk(one, names):
    for name, retention in (("a", "ephemeral"), ("b", "durable")):
        keys = names(name, 4)
        reserved = one.reserve(keys)
        one.fill(keys, reserved)
        assert one.call(m.Commit(reserved.ticket, retention)).blocks == 4
    one.until(lambda status: status["waiting_to_write"] == 0)
    fill = {tier["tier"]: tier["records"] for tier in one.status()["tiers"]}
    assert fill["host"] == 8
    assert fill["disk"] == 4


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (m.Closed(""), "session: a name of 0 characters is not from 1 to 256"),
        (m.Cover(b"", session="x" * 300), "session: a name of 300 characters"),
        (m.Returns("a", 1e9), r"returns\.in_s: 1e\+09 is not from 0 to 86400 seconds"),
        (m.Pin(b"", 3_601.0), r"pin\.ttl_s: 3601 is not from 0 to 3600 seconds"),
        (m.Pin(b"", 1.0, 61.0), r"pin\.deadline_s: 61 is not from 0 to 60 seconds"),
        (m.Prestage(b"", 1.0, -1.0), r"prestage\.deadline_s: -1 is not from 0 to 60 seconds"),
        (m.Prestage(b"k", 0.0), "1 bytes of keys are not a multiple of 16"),
        (m.Prestage(b"", 0.0, queued=True, queued_tokens=-1), "prestage: queued_tokens -1"),
        (m.Prestage(b"", 0.0, queued_pairs=1.0), r"queued_pairs 1\.0 do not satisfy"),
        (m.Commit(1, "forever"), "'forever' is not one of ephemeral, session, durable"),
    ],
)
def test_a_wrong_hint_is_refused_by_name(one, hint, words):
    with pytest.raises(RefusedError, match=words):
        one.call(hint)
    assert one.cover([]) == 0
