"""Sessions of several domains on one node: what one names, holds or does tells others nothing."""

import contextlib
import hashlib
import os
import time

import pytest

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.blocks.key import Chain, unpack_keys
from holdfast.blocks.namespace import Namespace
from holdfast.errors import HoldfastError, Outcome, RefusedError
from holdfast.probe import free_port
from holdfast.testing.payloads import record_of
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.remote import token
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials

PUBLISH = bytes(range(32))
TOKEN_KEY = bytes(range(32, 64))
BLOCKS = 40
TOKENS = 128
NBYTES = 20_000


class Tenant:
    """An engine of one domain. A block's payload follows from its key and the domain."""

    def __init__(self, engine, name):
        self.name, self.engine = name, engine
        self.call = engine.call

    def _right(self, key):
        return hashlib.shake_128(key + self.name.encode()).digest(NBYTES)

    def save(self, keys):
        reserved = self.engine.reserve(keys)
        view = self.engine.client.arena.view
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                view[place + HEADER_BYTES : place + HEADER_BYTES + NBYTES] = self._right(key)
        return self.call(m.Commit(reserved.ticket)).blocks

    def read(self, keys):
        fetched = self.call(m.Fetch(b"".join(keys), 10.0))
        view = self.engine.client.arena.view
        for key, place in zip(keys, fetched.places, strict=False):
            start = place + HEADER_BYTES
            assert view[start : start + NBYTES] == self._right(key), (self.name, key.hex())
        if fetched.lease:
            assert self.call(m.Release(fetched.lease)).valid
        return len(fetched.places)


@pytest.fixture
def secret(tmp_path):
    def write(name, data):
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_bytes(data)
        return str(file)

    return write


@pytest.fixture
def open_node(start_node, secret):
    """Call to start a node of two tenants and a public domain, reached over TCP as well."""

    def start(**settings):
        public = {
            "key_file": secret("commons.key", os.urandom(32)),
            "public": True,
            "publish_file": secret("publish.key", PUBLISH),
        }
        domains = {
            name: {"key_file": secret(f"{name}.key", os.urandom(32))} for name in ("acme", "globex")
        }
        return start_node(domains={**domains, "commons": public}, **settings)

    return start


@pytest.fixture
def tenants(engine):
    def connect(node, **options):
        return [Tenant(engine(node.address, domain=name), name) for name in ("acme", "globex")]

    return connect


def publisher_of(node, engine):
    return Tenant(engine(node.address, domain="commons", publish=PUBLISH), "commons")


def public_names(tenant, blocks=BLOCKS):
    """Name a prompt in the public domain, as every session can."""
    chain = Chain(tenant.engine.client.welcome.common_key, tenant.engine.fingerprint, TOKENS)
    chain.extend(range(blocks * TOKENS))
    return chain.keys


def test_a_session_lists_the_keys_of_its_own_domain_in_bounded_pages(open_node, tenants, names):
    acme, globex = tenants(open_node())
    theirs = names("acme's context", BLOCKS)
    assert acme.save(theirs) == BLOCKS
    page = acme.call(m.ListKeys(0, 7))
    assert len(page.keys) == 7 * 16
    found = page.keys
    while page.next:
        page = acme.call(m.ListKeys(page.next, 7))
        found += page.keys
    assert set(unpack_keys(found)) == set(theirs)
    assert globex.call(m.ListKeys()) == m.ListedKeys(b"")
    for start, limit, named in ((0, 4_097, "4097"), (0, 0, "limit is 0"), (-1, 5, "start is -1")):
        with pytest.raises(RefusedError, match=named):
            acme.engine.client.call(m.ListKeys(start, limit), m.ListedKeys, 60)


def test_a_connection_without_a_namespace_lists_no_keys(open_node):
    operator = Client(open_node().address, m.Hello(m.PROTOCOL, "operator"), 60)
    with contextlib.closing(operator), pytest.raises(HoldfastError, match=r"namespace|fingerprint"):
        operator.call(m.ListKeys(), m.ListedKeys, 60)


def test_a_reservation_does_not_reveal_what_another_domain_holds(open_node, tenants, names):
    acme, globex = tenants(open_node())
    theirs, unknown = names("acme's context", BLOCKS), names("never saved", BLOCKS)
    assert acme.save(theirs) == BLOCKS
    answers = []
    for keys in (theirs, unknown):
        reserved = globex.engine.reserve(keys)
        granted = sum(place >= 0 for place in reserved.places)
        assert globex.call(m.Cover(b"".join(keys))).blocks == 0
        committed = globex.call(m.Commit(reserved.ticket)).blocks
        answers.append((granted, reserved.outcome, committed))
    assert answers == [(BLOCKS, "ok", BLOCKS)] * 2
    assert acme.read(theirs) == BLOCKS


def test_a_domain_can_save_keys_that_another_domain_committed_first(open_node, tenants, names):
    acme, globex = tenants(open_node())
    future = names("acme's next context", BLOCKS)
    held_open = globex.engine.reserve(future)
    assert globex.save(future) == BLOCKS
    assert acme.save(future) == BLOCKS
    assert (acme.read(future), globex.read(future)) == (BLOCKS, BLOCKS)
    globex.call(m.Abort(held_open.ticket))
    assert acme.save(future) == 0
    assert acme.read(future) == BLOCKS


def test_equal_keys_in_two_domains_are_both_recovered_after_a_restart(
    open_node, start_node, tenants, names
):
    node = open_node()
    acme, globex = tenants(node)
    both, one = names("both", 12), names("acme's alone", 12)
    assert [acme.save(both), globex.save(both), acme.save(one)] == [12] * 3
    acme.engine.until_on_disk(36)
    node.stop()
    node.start()
    acme, globex = tenants(node)
    acme.engine.until_recovered()
    assert (acme.read(both), globex.read(both), acme.read(one)) == (12, 12, 12)
    assert globex.read(one) == 0


def test_a_tenant_can_not_squat_a_public_prompt(open_node, tenants, engine):
    node = open_node()
    acme, globex = tenants(node)
    common = public_names(acme)
    assert acme.save(common) == BLOCKS
    publisher = publisher_of(node, engine)
    assert publisher.save(common) == BLOCKS
    assert publisher.read(common) == BLOCKS
    own = [bytes([255 - byte for byte in key]) for key in common]
    covered = globex.call(m.Cover(b"".join(own), common=b"".join(common)))
    assert covered.blocks == BLOCKS
    globex.name = "commons"  # the payloads are the publisher's, under names of its own
    fetched = globex.call(m.Fetch(b"".join(own), 10.0))
    view = globex.engine.client.arena.view
    assert len(fetched.places) == BLOCKS
    for key, place in zip(common, fetched.places, strict=True):
        start = place + HEADER_BYTES
        assert view[start : start + NBYTES] == publisher._right(key)


def test_a_peer_can_not_squat_a_public_prompt_over_tcp(
    open_node, tenants, engine, secret, tmp_path
):
    listen = [
        f"unix://{tmp_path}/n.sock",
        f"tcp://127.0.0.1:{free_port()}",
    ]
    node = open_node(listen=listen, tokens={"key_file": secret("tokens.key", TOKEN_KEY)})
    acme, _ = tenants(node)
    common, fingerprint = public_names(acme), acme.engine.fingerprint
    issued = token.issue(TOKEN_KEY, "peer", token.VERBS, 600, time.time()).encode()
    peer = TargetClient(node.addresses[1], Credentials(token_file=secret("token", issued)))
    try:
        namespace = Namespace(fingerprint, b"any other domain", NBYTES, TOKENS)
        put = peer.put([record_of(namespace, key) for key in common], 60)
        assert put == [Outcome.OK] * BLOCKS
    finally:
        peer.close()
    publisher = publisher_of(node, engine)
    assert publisher.save(common) == BLOCKS
    assert publisher.read(common) == BLOCKS


def test_ticket_lease_and_plan_ids_do_not_reveal_activity_of_other_domains(
    open_node, tenants, names
):
    acme, globex = tenants(open_node())
    keys = names("a context", 2)
    acme.save(keys)
    tickets, leases, plans = [], [], []
    for work_item in range(12):
        reserved = acme.engine.reserve(names(f"turn {work_item}", 1))
        acme.call(m.Abort(reserved.ticket))
        fetched = acme.call(m.Fetch(b"".join(keys), 10.0))
        acme.call(m.Release(fetched.lease))
        covered = acme.call(m.Cover(b"".join(keys), tokens=3 * TOKENS))
        globex.save(names(f"theirs {work_item}", 1))
        tickets.append(reserved.ticket)
        leases.append(fetched.lease)
        plans.append(covered.plan)
    for numbers, bits in ((tickets, 63), (leases, 63), (plans, 53)):
        assert len(set(numbers)) == 12
        assert all(0 < number < 1 << bits for number in numbers)
        assert numbers != sorted(numbers), "a counter's numbers rise"
        assert max(numbers) - min(numbers) > 1 << (bits - 8)


def test_a_session_cannot_end_tickets_or_leases_of_another_session(open_node, tenants, names):
    acme, globex = tenants(open_node())
    keys = names("acme's", 4)
    reserved = acme.engine.reserve(keys)
    globex.call(m.Abort(reserved.ticket))
    assert globex.call(m.Commit(reserved.ticket)).blocks == 0
    assert acme.call(m.Commit(reserved.ticket)).blocks == 4
    fetched = acme.call(m.Fetch(b"".join(keys), 10.0))
    assert not globex.call(m.Release(fetched.lease)).valid
    assert acme.call(m.Release(fetched.lease)).valid
