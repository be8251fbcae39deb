"""A target behind TLS, in this process: who is idle stays, and nobody outlasts its end."""

import contextlib
import datetime as dt
import socket
import threading
import time
from pathlib import Path

import pytest

from holdfast.address import tcp_endpoint
from holdfast.errors import Outcome, RefusedError
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetLimits, TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.pool.connection_checks import TargetCondition, check_member
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials, ServerTls
from holdfast.wire.remote.stream import TlsStream

PEERS = StoreOptions(serves_peers=True)

NAMESPACE = namespace_of(30_000)
KEYS = [key_of(i) for i in range(4)]
STEP_S = 1.0
"""Limit of the rest of a message, and interval at which an idle target looks."""


class Behind:
    """A target, its server and its service."""

    def __init__(self, files, undo, **limits):
        store = Store(16 * MIB, [], {"default": b"s" * 32}, PEERS)
        undo.callback(store.close)
        store.start()
        self.service = TargetService(
            store, TargetLimits(idle_s=30, body_s=STEP_S, handshake_s=3_600, **limits)
        )
        listener = bind("tcp://127.0.0.1:0")
        self.address = address_of(listener)
        self.server = TargetServer(listener, self.service, EntryRules(ServerTls(files)))
        self.server.start()
        undo.callback(self.server.close)


@pytest.fixture
def files(tmp_path):
    """A certificate for both sides."""
    pytest.importorskip("cryptography")
    from holdfast_bench.harness.certificates import Authority

    return Authority(tmp_path).issue("peer", "127.0.0.1")


@pytest.fixture
def behind(files):
    """A target that looks up often while nothing is said."""
    with contextlib.ExitStack() as undo:
        yield Behind(files, undo)


def test_an_idle_peer_keeps_its_connection(behind, files):
    with contextlib.closing(TargetClient(behind.address, Credentials(tls=files))) as target:
        assert target.put([record_of(NAMESPACE, key) for key in KEYS], 60) == ["ok"] * 4
        for _ in range(2):
            time.sleep(1.5 * STEP_S)
            assert target.exist(NAMESPACE, KEYS, 60).held == b"\1" * 4
    assert behind.service.counters.accepted == 1
    assert behind.service.counters.protocol_errors == 0


def test_a_health_check_that_connects_and_closes_is_not_in_the_audit_log(behind):
    socket.create_connection(tcp_endpoint(behind.address), 60).close()
    while not behind.service.counters.protocol_errors:
        time.sleep(0.01)
    assert not behind.service.store.audit.counts().get("denied")


def test_closing_the_server_ends_a_tls_handshake_in_progress(behind):
    with socket.create_connection(tcp_endpoint(behind.address), 60) as raw:
        while not any(isinstance(each, TlsStream) for each in behind.server._peers.values()):
            time.sleep(0.01)
        behind.server.close()  # a wait for the handshake's end would take an hour
        assert raw.recv(1) == b""
    while any(thread.name == "holdfast-peer" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_a_peer_whose_handshake_starts_during_close_is_not_served(behind, monkeypatch):
    """The handshake begins after whoever closes has counted its peers."""
    opened, closing, wrap = threading.Event(), threading.Event(), TlsStream.__init__

    def held(stream, connected, context):
        wrap(stream, connected, context)
        opened.set()
        assert closing.wait(60)

    monkeypatch.setattr(TlsStream, "__init__", held)
    with socket.create_connection(tcp_endpoint(behind.address), 60) as raw:
        assert opened.wait(60)
        thread = threading.Thread(target=behind.server.close)
        thread.start()
        while not behind.server._closing:
            time.sleep(0.01)
        closing.set()
        thread.join(30)
        assert raw.recv(1) == b""
    assert behind.service.counters.requests == 0


def test_a_certificate_is_compared_with_the_tls_name_of_the_member(tmp_path):
    pytest.importorskip("cryptography")
    from holdfast_bench.harness.certificates import Authority

    files = Authority(tmp_path).issue("target", "*.flash.kv.svc")
    with contextlib.ExitStack() as undo:
        address = Behind(files, undo).address

        def held(tls_name):
            client = TargetClient(address, Credentials(tls=files), tls_name=tls_name)
            with contextlib.closing(client) as target:
                return target.exist(NAMESPACE, KEYS, 60)

        assert held("flash-0.flash.kv.svc").outcome is Outcome.OK
        for name in ("", "flash-0.other.kv.svc"):
            with pytest.raises(RefusedError, match="certificate"):
                held(name)


def test_a_host_beyond_the_limit_of_connections_learns_over_tls_that_the_target_is_busy(files):
    with contextlib.ExitStack() as undo:
        address = Behind(files, undo, connections=1).address
        first, second = (TargetClient(address, Credentials(tls=files)) for _ in range(2))
        undo.callback(first.close)
        undo.callback(second.close)
        assert first.exist(NAMESPACE, KEYS, 60).outcome is Outcome.OK
        assert second.exist(NAMESPACE, KEYS, 60).outcome is Outcome.UNSENT
        member = Member(id="t0", address=address)
        connect = lambda m: TargetClient(m.address, Credentials(tls=files))  # noqa: E731
        assert check_member(member, connect, 60).text().startswith("busy: the target serves 1 ")


def test_a_check_of_a_member_names_a_wrong_authority_and_a_missing_certificate(
    behind, files, tmp_path
):
    from holdfast_bench.harness.certificates import Authority

    other = tmp_path / "other"
    other.mkdir()
    stranger = Authority(other).issue("stranger", "127.0.0.1")
    member = Member(id="t0", address=behind.address)

    def check(tls):
        return check_member(member, lambda m: TargetClient(m.address, Credentials(tls=tls)), 60)

    assert check(files).condition is TargetCondition.FINE
    refused = check(stranger)
    assert refused.condition is TargetCondition.REFUSED
    assert "(unknown authority)" in refused.why
    assert check(None).condition in (TargetCondition.REFUSED, TargetCondition.UNREACHABLE)


SOON = dt.datetime.now(dt.UTC) + dt.timedelta(days=9)
PAST = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)


@pytest.mark.parametrize(
    ("of_target", "of_host", "words"),
    [
        ({"expires": PAST}, {}, "certificate is not accepted: certificate has expired"),
        ({"begins": SOON, "expires": SOON + dt.timedelta(9)}, {}, "certificate is not yet valid"),
        ({"address": "10.0.0.7"}, {}, "IP address mismatch"),
        ({}, {"expires": PAST}, "does not accept this side's certificate: certificate expired"),
    ],
)
def test_a_host_says_why_a_certificate_is_not_accepted(tmp_path, of_target, of_host, words):
    pytest.importorskip("cryptography")
    from holdfast_bench.harness.certificates import Authority

    authority = Authority(tmp_path)
    with contextlib.ExitStack() as undo:
        behind = Behind(authority.issue("target", **of_target), undo)
        own = authority.issue("host", **of_host)
        member = Member(id="t0", address=behind.address)
        checked = check_member(member, lambda m: TargetClient(m.address, Credentials(tls=own)), 60)
        assert checked.condition is TargetCondition.REFUSED
        assert words in checked.why


def test_a_replaced_certificate_is_loaded_unless_it_is_invalid(tmp_path, caplog):
    pytest.importorskip("cryptography")
    from holdfast_bench.harness.certificates import Authority

    authority = Authority(tmp_path)
    host = authority.issue("host")
    files = authority.issue("target", expires=PAST)
    with contextlib.ExitStack() as undo:
        behind = Behind(files, undo)

        def condition():
            member = Member(id="t0", address=behind.address)
            connect = lambda m: TargetClient(m.address, Credentials(tls=host))  # noqa: E731
            return check_member(member, connect, 60).condition

        assert condition() is TargetCondition.REFUSED
        authority.issue("target")
        assert condition() is TargetCondition.FINE
        Path(files.cert).write_text("half a fil")
        assert condition() is TargetCondition.FINE
        assert "the files that were read before stay in use: tls.cert, tls.key" in caplog.text
        authority.issue("target")
        assert condition() is TargetCondition.FINE
