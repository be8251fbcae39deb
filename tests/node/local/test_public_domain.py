"""The public domain over the socket: readers are told its key, only a publisher gets a session."""

import os

import pytest

from holdfast.errors import RefusedError
from holdfast.limits import CHAIN_BLOCKS_MAX
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

TOKEN = bytes(range(32))


def secret(folder, name, data):
    file = folder / name
    file.write_bytes(data)
    file.chmod(0o600)
    return str(file)


@pytest.fixture
def node(start_node, tmp_path):
    public = {
        "key_file": secret(tmp_path, "commons.key", os.urandom(32)),
        "public": True,
        "publish_file": secret(tmp_path, "publish.key", TOKEN),
    }
    acme = {"key_file": secret(tmp_path, "acme.key", os.urandom(32))}
    return start_node(domains={"commons": public, "acme": acme})


def test_published_blocks_are_hits_for_every_domain(node, engine, names, payload):
    publisher = engine(node.address, domain="commons", publish=TOKEN)
    reader = engine(node.address, domain="acme")
    assert reader.client.welcome.common_key == publisher.client.welcome.domain_key
    assert publisher.client.welcome.common_key == b""
    common, own = names("system prompt", 6), names("as acme names it", 6)
    publisher.save(common)
    assert reader.cover(own) == 0
    covered = reader.call(m.Cover(b"".join(own), common=b"".join(common)))
    assert covered.blocks == covered.worth == 6
    fetched = reader.call(m.Fetch(b"".join(own), 5.0))
    assert fetched.sources == {"host": 6}
    view = reader.client.arena.view
    for key, place in zip(common, fetched.places, strict=True):
        right = payload(key)
        assert view[place + 128 : place + 128 + len(right)] == right


@pytest.mark.parametrize("shown", [b"", b"x" * 32])
def test_a_client_that_is_no_publisher_gets_no_session_in_a_public_domain(node, shown):
    hello = m.Hello(m.PROTOCOL, "reader", b"f" * 16, 4096, 16, "commons", publish=shown)
    with pytest.raises(RefusedError, match="'commons' is public: only a publisher"):
        Client(node.address, hello, 60.0)


def test_an_engine_that_would_publish_in_a_domain_that_is_not_public_is_refused(node):
    hello = m.Hello(m.PROTOCOL, "publisher", b"f" * 16, 4096, 16, "acme", publish=TOKEN)
    with pytest.raises(RefusedError, match=r"'acme' is not public .*; give the engine the public"):
        Client(node.address, hello, 60.0)


def test_invalid_public_keys_in_a_lookup_are_refused(node, engine, names):
    reader = engine(node.address, domain="acme")
    with pytest.raises(RefusedError, match="3 bytes of keys"):
        reader.call(m.Cover(b"".join(names("own", 1)), common=b"abc"))
    with pytest.raises(RefusedError, match="keys, the limit is"):
        reader.call(m.Cover(b"".join(names("own", 1)), common=bytes(16 * (CHAIN_BLOCKS_MAX + 1))))
