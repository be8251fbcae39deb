"""Whose socket is at the other end of a loopback connection, and who is turned away for it."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.errors import RefusedError
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import TargetService
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.wire.frame import encode
from holdfast.wire.local import peer_check
from holdfast.wire.remote import peer_user
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.messages import TARGET_PROTOCOL, Challenge

PEERS = StoreOptions(serves_peers=True)

MIB = 1 << 20
STRANGER = 65_534
NAMESPACE, KEYS = Namespace(b"f" * 16, b"d" * 16, 4096, 16), [b"k" * 16]
HOSTS = ["127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@contextlib.contextmanager
def connected(host):
    """Both ends of a connection: that which connected, that which accepted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as one:
            other, _ = listener.accept()
            with other:
                yield one, other


@contextlib.contextmanager
def as_user(user, work):
    """Do work in a child that is another user; yields what returns the next line it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work(lambda said: os.write(writing, f"{said}\n".encode()))
        except Exception as error:  # noqa: BLE001  # the parent asserts on it
            os.write(writing, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        try:
            yield said.readline
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


@pytest.fixture
def serving():
    """Call to serve a target in this process; returns its address."""
    with contextlib.ExitStack() as undo:

        def serve(**entry):
            store = Store(16 * MIB, [], {"default": b"s" * 32}, PEERS)
            undo.callback(store.close)
            store.start()
            service = TargetService(store)
            server = TargetServer(
                listener := bind("tcp://127.0.0.1:0"), service, EntryRules(**entry)
            )
            server.start()
            undo.callback(server.close)
            return address_of(listener)

        yield serve


def ask(address, **options):
    with contextlib.closing(TargetClient(address, Credentials(**options))) as target:
        return target.exist(NAMESPACE, KEYS, 60).outcome


@pytest.mark.parametrize("host", HOSTS)
def test_the_user_of_each_end_is_found_by_netlink_and_in_proc(host):
    with connected(host) as (one, other):
        for end in (one, other):
            pair = peer_user._pair(end)
            assert peer_user.is_loopback(end)
            assert peer_user.peer_user(end) == os.geteuid()
            assert peer_user._from_netlink(pair) == peer_user._from_proc(pair) == os.geteuid()


@pytest.mark.parametrize("host", HOSTS)
def test_an_end_that_was_closed_or_not_accepted_has_no_user(host):
    with connected(host) as (one, other):
        one.close()
        assert peer_user.peer_user(other) is None
        assert peer_user._from_proc(peer_user._pair(other)) is None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as one:
            assert peer_user.peer_user(one) is None
            assert peer_user._from_proc(peer_user._pair(one)) is None


def test_the_user_is_read_from_proc_without_netlink(monkeypatch):
    def refused(_):
        raise PermissionError

    monkeypatch.setattr(peer_user, "_from_netlink", refused)
    with connected("127.0.0.1") as (one, _):
        assert peer_user.peer_user(one) == os.geteuid()
    monkeypatch.setattr(peer_user, "_end", lambda _: None)
    with connected("127.0.0.1") as (one, _):
        assert peer_user.peer_user(one) is None


def test_the_overflow_user_id_counts_as_unknown(monkeypatch):
    monkeypatch.setattr(peer_user, "_from_netlink", lambda _: STRANGER)
    with connected("127.0.0.1") as (one, _):
        monkeypatch.setattr(peer_check, "_ALL_IDS", 0)
        assert peer_user.peer_user(one) == STRANGER
        monkeypatch.setattr(peer_check, "_ALL_IDS", 1 << 40)
        assert peer_user.peer_user(one) is None


def test_a_peer_of_an_unknown_user_is_refused(monkeypatch):
    monkeypatch.setattr(peer_user, "peer_user", lambda _: None)
    with pytest.raises(
        RefusedError, match=r"the peer belongs to a user that .* not tell; .* only user 0 "
    ):
        peer_user.check_peer(None, "the peer", "go")


def test_the_same_user_comes_in(serving):
    assert str(ask(serving())) == "ok"


@as_root
@forks
def test_another_user_of_the_machine_is_refused_by_name_unless_the_target_is_open(serving):
    told = (
        f"RefusedError: target .*: the peer belongs to user {STRANGER}; over loopback TCP .* only "
        "user 0 may be there; give the target tls or tokens, or set open: true"
    )
    for any_user, expected in ((False, told), (True, "ok")):
        address = serving(any_user=any_user)
        with as_user(STRANGER, lambda say, at=address: say(ask(at, any_user=True))) as next_line:
            assert re.match(expected, next_line())


@as_root
@forks
@pytest.mark.parametrize("is_open", [False, True])
def test_a_running_target_admits_other_users_only_if_it_is_open(tmp_path, is_open):
    file = tmp_path / "target.yaml"
    file.write_text(
        "listen: tcp://127.0.0.1:0\n"
        "tiers: [{kind: host, capacity: 16 MiB}]\n"
        f"open: {str(is_open).lower()}\n"
    )
    argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(file)]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(process.kill)
        address = process.stdout.readline().split()[1]
        assert str(ask(address)) == "ok"
        with as_user(STRANGER, lambda say: say(ask(address, any_user=True))) as next_line:
            assert (next_line() == "ok\n") is is_open


@as_root
@forks
def test_nothing_is_sent_to_another_users_process_on_a_targets_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        def answer(say):
            listener.listen()
            say("listening")
            for _ in range(2):
                peer, _ = listener.accept()
                peer.sendall(encode(0, Challenge(TARGET_PROTOCOL, b"n" * 32)))
                say(len(peer.recv(4096)) > 0)
                peer.close()

        with as_user(STRANGER, answer) as next_line:
            assert next_line() == "listening\n"
            told = rf"process behind this port belongs to user {STRANGER}; .* only user 0 may"
            with pytest.raises(RefusedError, match=told):
                ask(address)
            assert next_line() == "False\n"
            asking = threading.Thread(target=ask, args=(address,), kwargs={"any_user": True})
            asking.start()
            assert next_line() == "True\n", "this client was told that any user may be there"
            asking.join()
