"""A client says nothing to whoever else could have made the socket that it looks for."""

import contextlib
import logging
import os
import socket
import threading
import time

import pytest

from holdfast.errors import NodeGoneError, UntrustedPeerError
from holdfast.wire.frame import RECEIVE_BYTES, encode, request_reader
from holdfast.wire.local import messages as m
from holdfast.wire.local import peer_check
from holdfast.wire.local.client import Client
from holdfast.wire.local.reconnecting_client import ReconnectingClient

HELLO = m.Hello(m.PROTOCOL, "test", b"f" * 16, 4096, 16, "commons", publish=b"secret")
SERVICE, STRANGER = 4242, 65_533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def shared(tmp_path):
    """A folder like /tmp: everybody makes what they want in it, and removes what is theirs."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def listen():
    """Call with a path and a user whose process then listens there; returns what it heard.

    The socket's file is the user's, or that of `owner`.
    """
    with contextlib.ExitStack() as undo:

        def start(path, user, owner=None):
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            os.chown(path, user if owner is None else owner, -1)
            heard, wrote = os.pipe()
            undo.callback(os.close, heard)
            child = os.fork()
            if not child:
                try:
                    _answer(listener, user, wrote)
                finally:
                    os._exit(0)
            os.close(wrote)
            undo.callback(os.waitpid, child, 0)
            undo.callback(os.kill, child, 9)
            assert os.read(heard, 1) == b"L"
            return lambda: os.read(heard, 1)

        yield start


def _answer(listener, user, wrote):
    os.setgid(user)
    os.setuid(user)
    listener.listen()
    os.write(wrote, b"L")
    peer, _ = listener.accept()
    reader = request_reader()
    while (frame := reader.next()) is None:
        data = peer.recv(RECEIVE_BYTES)
        if not data:
            os.write(wrote, b"-")
            return
        reader.feed(data)
    os.write(wrote, b"H")
    peer.sendall(encode(frame.request_id, m.Welcome(m.PROTOCOL, "x", b"k" * 32, 0)))
    time.sleep(20)


def folder_of(user, parent, name="holdfast", mode=0o755):
    folder = parent / name
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, user, -1)
    return folder


def connect(path):
    return Client(f"unix://{path}", HELLO, 60)


@as_root
@forks
def test_a_folder_of_another_user_in_a_world_writable_folder_is_not_trusted(shared, listen):
    folder = folder_of(STRANGER, shared)
    listen(folder / "node.sock", STRANGER)
    told = (
        rf'holdfast" belongs to user {STRANGER}, and every user may create it in ".*/tmp"; remove'
    )
    with pytest.raises(UntrustedPeerError, match=told):
        connect(folder / "node.sock")


@as_root
@forks
@pytest.mark.parametrize("mode", [0o775, 0o1775])
def test_a_folder_of_another_user_in_a_group_writable_folder_is_not_trusted(tmp_path, listen, mode):
    team = tmp_path / "team"
    team.mkdir()
    team.chmod(mode)
    os.chown(team, 0, SERVICE)
    folder = folder_of(STRANGER, team)
    heard = listen(folder / "node.sock", STRANGER)
    told = rf'belongs to user {STRANGER}, and group {SERVICE} may create it in ".*/team"; remove it'
    with pytest.raises(UntrustedPeerError, match=told):
        connect(folder / "node.sock")
    os.chown(folder, 0, -1)
    os.chown(folder / "node.sock", 0, -1)
    with pytest.raises(UntrustedPeerError, match=f"a process of user {STRANGER} answers"):
        connect(folder / "node.sock")
    assert heard() == b"-"


@as_root
@forks
def test_the_node_of_a_service_user_is_trusted(tmp_path, listen):
    folder = folder_of(SERVICE, tmp_path)
    heard = listen(folder / "node.sock", SERVICE)
    with contextlib.closing(connect(folder / "node.sock")) as client:
        assert client.welcome.incarnation == "x"
    assert heard() == b"H"


@as_root
@forks
def test_nothing_is_sent_to_a_process_that_does_not_own_the_socket(tmp_path, listen):
    folder = folder_of(SERVICE, tmp_path)
    heard = listen(folder / "node.sock", STRANGER, SERVICE)
    told = rf"belongs to user {SERVICE}, and a process of user {STRANGER} answers; find out whose"
    with pytest.raises(UntrustedPeerError, match=told):
        connect(folder / "node.sock")
    assert heard() == b"-"


@as_root
def test_a_path_through_a_symlink_of_another_user_is_not_trusted(shared, tmp_path, fake_node):
    fake_node(lambda peer: peer.welcome())  # tmp_path/node.sock
    good = folder_of(0, tmp_path, "good")
    (good / "hop").symlink_to(shared / "theirs")
    (shared / "theirs").symlink_to(tmp_path)
    os.chown(shared / "theirs", STRANGER, -1, follow_symlinks=False)
    for way in (shared / "theirs", good / "hop", good / ".." / "tmp" / "theirs"):
        with pytest.raises(UntrustedPeerError, match='tmp/theirs" belongs to user'):
            connect(way / "node.sock")
    (good / "mine").symlink_to("../")
    with contextlib.closing(connect(good / "mine" / "node.sock")) as client:
        assert client.welcome.incarnation == "fake"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_node_in_a_folder_that_others_may_change_is_not_trusted(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "node.sock"))
        listener.listen()
        told = rf'may change folder ".*/open" \(mode {mode:04o}\), .*; have the node listen in'
        with pytest.raises(UntrustedPeerError, match=told):
            connect(folder / "node.sock")


def test_an_own_socket_in_a_world_writable_folder_is_trusted(shared):
    (shared / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shared / "node.sock"))
        assert peer_check.owners_of(f"{shared}/./node.sock") == {os.geteuid()}
    for path, words in ((shared / "loop", "Too many levels"), (shared / "none", "No such file")):
        with pytest.raises(NodeGoneError, match=words):
            connect(path)


def test_an_unmapped_user_of_a_user_namespace_may_be_the_owner(tmp_path, monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(peer_check.os, "geteuid", lambda: 1)
    monkeypatch.setattr(peer_check, "ROOT", 1)
    texts = {"overflowuid": str(os.getuid()), "uid_map": "0 0 4294967295\n"}
    monkeypatch.setattr(peer_check.Path, "read_text", lambda path, _: texts[path.name])
    with ours, theirs:
        user = peer_check.peer_of(ours).uid
        for every_user in ("0 0 4294967295\n", "0 0 1000\n1000 1000 4294966295\n"):
            texts["uid_map"] = every_user
            with pytest.raises(UntrustedPeerError):
                peer_check.check_listener(user, "/x", frozenset({7}))
        texts["uid_map"] = "0 100000 65536\n"
        peer_check.check_listener(user, "/x", frozenset({7}))


def test_an_untrusted_folder_in_place_of_a_lost_node_is_logged_once(tmp_path, caplog):
    folder = tmp_path / "there"
    folder.mkdir()
    caplog.set_level(logging.WARNING)
    link = ReconnectingClient(f"unix://{folder}/node.sock", HELLO, 5.0, retry_s=0.02)
    seen = threading.Event()

    def until(words):
        end = time.monotonic() + 60
        while words not in caplog.text:
            assert time.monotonic() < end, caplog.text
            seen.wait(0.01)

    until("No such file")
    (folder / "node.sock").touch()
    folder.chmod(0o777)
    until("other users may change folder")
    seen.wait(0.2)
    link.close()
    assert len(caplog.records) == 2, "each of the two once"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_an_own_folder_in_a_folder_that_others_may_write_to_is_trusted(tmp_path, mode):
    shared = tmp_path / "shared"
    own = shared / "holdfast"
    own.mkdir(parents=True, mode=0o700)
    shared.chmod(mode)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(own / "node.sock"))
        assert peer_check.owners_of(str(own / "node.sock")) == {os.geteuid()}
