"""A token ends while its bearer is connected, and clocks that are apart are not in its way."""

import contextlib
import time
import types

import pytest

from holdfast.errors import Outcome, RefusedError
from holdfast.limits import MIB, TOKEN_S_MAX
from holdfast.node.remote import server, session
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.wire.remote import token
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.token import CLOCK_SKEW_S

PEERS = StoreOptions(serves_peers=True)

KEY = bytes(range(32))
NAMESPACE = namespace_of(30_000)
KEYS = [key_of(number) for number in range(4)]
RECORDS = [record_of(NAMESPACE, key) for key in KEYS]
LIFETIME_S = 60


@pytest.fixture
def peer(tmp_path):
    """A client that has joined with a token, and the file it reads tokens from."""
    with contextlib.ExitStack() as undo:
        store = undo.enter_context(Store(8 * MIB, [], {"default": b"s" * 32}, PEERS))
        service = TargetService(store)
        entry = EntryRules(token_keys=lambda: [KEY])
        server = TargetServer(bound := bind("tcp://127.0.0.1:0"), service, entry)
        address = address_of(bound)
        server.start()
        undo.callback(server.close)
        file = tmp_path / "token"
        file.touch(mode=0o600)
        client = TargetClient(address, Credentials(None, str(file)))
        undo.callback(client.close)
        yield client, file


def issue(file, lifetime_s=LIFETIME_S):
    may = ("read", "write")
    file.write_text(token.issue(KEY, "host-a", may, lifetime_s, time.time()))


def let_pass(monkeypatch, seconds):
    """Have the target's clock say that so much time went by since a connection was made."""
    now = types.SimpleNamespace(time=lambda: time.time() + seconds)
    monkeypatch.setattr(session, "time", now)


def test_a_token_expired_by_the_targets_clock_is_refused_until_it_is_renewed(peer, monkeypatch):
    client, file = peer
    issue(file)
    assert client.put(RECORDS[:2], 60) == [Outcome.OK] * 2
    let_pass(monkeypatch, LIFETIME_S + CLOCK_SKEW_S + 5)
    assert client.put(RECORDS[2:], 60) == [Outcome.GONE] * 2
    assert "token: expired" in client.refusal
    assert "connect with a new one" in client.refusal
    issue(file, 10 * LIFETIME_S)
    assert client.put(RECORDS[2:], 60) == [Outcome.OK] * 2
    assert client.exist(NAMESPACE, KEYS, 60).held == b"\1" * 4


def test_a_target_accepts_a_token_that_expired_within_the_clock_skew(peer, monkeypatch):
    client, file = peer
    issue(file)
    assert client.put(RECORDS, 60) == [Outcome.OK] * 4
    let_pass(monkeypatch, LIFETIME_S + CLOCK_SKEW_S - 5)
    assert client.exist(NAMESPACE, KEYS, 60).held == b"\1" * 4


@pytest.mark.parametrize("skew_s", [-40, 40])
def test_a_new_token_is_accepted_by_a_target_whose_clock_differs(peer, monkeypatch, skew_s):
    client, file = peer
    now = types.SimpleNamespace(time=lambda: time.time() + skew_s, sleep=time.sleep)
    monkeypatch.setattr(server, "time", now)
    let_pass(monkeypatch, skew_s)
    issue(file, TOKEN_S_MAX)
    assert client.put(RECORDS, 60) == [Outcome.OK] * 4
    assert client.exist(NAMESPACE, KEYS, 60).held == b"\1" * 4


def test_a_refusal_for_clock_skew_names_the_permitted_difference(peer, monkeypatch):
    client, file = peer
    behind_s = CLOCK_SKEW_S + 30
    now = types.SimpleNamespace(time=lambda: time.time() - behind_s, sleep=time.sleep)
    monkeypatch.setattr(server, "time", now)
    issue(file, TOKEN_S_MAX)
    with pytest.raises(RefusedError, match=r"clocks may differ by 60 s; .*compare the clocks"):
        client.exist(NAMESPACE, KEYS, 60)
