"""Which users get in is the kernel's word, and where they get is the configuration's."""

import contextlib
import grp
import os
import pwd
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.byte_size import Size
from holdfast.config import Config
from holdfast.config.options import DomainOptions, HostOptions
from holdfast.errors import ConfigError, ProtocolError, RefusedError
from holdfast.node.local.sessions import NodeContext, NodeSession
from holdfast.node.local.socket_setup import socket_setup
from holdfast.node.local.threads import NodeThreads
from holdfast.node.local.users import PermittedUsers, group_of, users_of
from holdfast.store.store import Store
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast.wire.local.peer_check import ROOT, ConnectedPeer

MIB = 1 << 20
OWN, ALICE, MALLORY = 1000, 1001, 1002
USERS = PermittedUsers(OWN, {"acme": frozenset({ALICE})})


@pytest.fixture
def door():
    """Call with a user and a hello to open a session; its store has three domains."""
    keys = {name: name.encode().ljust(32, b"-") for name in ("acme", "other", "default")}
    store, threads = Store(16 * MIB, [], keys), NodeThreads()
    denied = []
    store.audit.deny = lambda who, why: denied.append((who, why))
    context = NodeContext(store, threads, USERS)

    def enter(user, domain=None):
        named = (b"f" * 16, 4096, 16, domain) if domain else ()
        return NodeSession(context, m.Hello(m.PROTOCOL, "test", *named), ConnectedPeer(0, user))

    yield SimpleNamespace(enter=enter, denied=denied, store=store, context=context)
    threads.close()
    store.close()


def test_a_domain_with_users_admits_only_those_users(door):
    assert door.enter(ALICE, "acme").welcome.domain_key == door.store.domain("acme")[0]
    for user in (OWN, ROOT):
        with pytest.raises(RefusedError, match=rf"domain 'acme' is not for user {user}; have dom"):
            door.enter(user, "acme")
    assert [who for who, _ in door.denied] == [f"user {OWN}", f"user {ROOT}"]


def test_a_domain_without_users_admits_only_the_nodes_user_and_root(door):
    for user in (OWN, ROOT):
        assert door.enter(user, "other").arena_fd is not None
    with pytest.raises(RefusedError, match=r"'other' is for user 1000 only, not for user 1001"):
        door.enter(ALICE, "other")


def test_an_unlisted_user_is_refused_with_the_owner_of_the_node(door):
    for domain in ("acme", "other", None):
        with pytest.raises(RefusedError, match="user 1002 may not use this node, which belongs to"):
            door.enter(MALLORY, domain)


def test_a_tenant_cannot_inspect_or_change_the_whole_node(door):
    with pytest.raises(RefusedError, match="may use domains of this node but not inspect the node"):
        door.enter(ALICE)
    session = door.enter(ALICE, "acme")
    for request in (
        m.Status(),
        m.List(),
        m.Plans(),
        m.Members(),
        m.Verify(b"", 0, 1.0, 0),
        m.Drop(b""),
        m.Domains("erase", "other"),
    ):
        with pytest.raises(RefusedError, match="not inspect the node"):
            session.answer(request).send(None)


def test_the_name_of_an_engine_is_printable(door):
    hello = m.Hello(m.PROTOCOL, "\x1b[2J\x9b31m\u202e\n version", b"f" * 16, 4096, 16, "other")
    session = NodeSession(door.context, hello, ConnectedPeer(0, OWN))
    session.answer(m.Observed([(64.0, 0.0, 0.01)]))
    (engine,) = door.store.plans().engines
    assert engine.engine == r"\x1b[2J\x9b31m\u202e\n"


@pytest.mark.parametrize("field", ["peer", "domain", "description", "publish", "fingerprint"])
def test_a_hello_with_an_overlong_field_is_refused_before_access_checks(door, field):
    value = (b"1 " if field in ("publish", "fingerprint") else "1 ") * 40_000
    named = {"fingerprint": b"f" * 16, "raw_bytes": 4096, "block_tokens": 16, "domain": "acme"}
    hello = m.Hello(m.PROTOCOL, **{"peer": "test", **named, field: value})
    with pytest.raises(
        ProtocolError, match=rf"^hello\.{field} has a length of 80000, the limit is \d+;"
    ):
        NodeSession(door.context, hello, ConnectedPeer(0, MALLORY))
    assert not door.denied


def config(users, group="", listen="unix:///run/holdfast/node.sock"):
    tiers = [HostOptions(capacity=Size(16 * MIB))]
    domains = {"acme": DomainOptions(key_file="acme.key", users=users)}
    return Config(listen=listen, tiers=tiers, domains=domains, socket_group=group)


def test_user_and_group_names_resolve_to_ids_of_this_machine():
    root, group = pwd.getpwuid(0).pw_name, grp.getgrgid(0).gr_name
    users = users_of(config([root, 4242], group))
    users.check_domain(0, "acme")
    users.check_domain(4242, "acme")
    assert group_of(config([], group)) == 0
    assert group_of(config([], 77)) == 77
    assert group_of(config([])) is None


def test_a_user_or_group_that_is_not_there_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"domains\.acme\.users\.1: there is no user 'no-such'"):
        users_of(config([0, "no-such"], 0))
    with pytest.raises(ConfigError, match="socket_group: there is no group 'no-such'"):
        group_of(config([0], "no-such"))


def test_a_user_who_could_never_open_the_socket_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"user 4242 cannot open the socket.*set socket_group"):
        users_of(config([4242]))


def test_a_folder_that_the_group_can_not_enter_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    group = os.getegid()
    with (
        pytest.raises(ConfigError, match=rf"group {group} cannot enter folder .*with mode 0750"),
        socket_setup(f"unix://{closed}/node.sock", group),
    ):
        pass
    with socket_setup(f"unix://{tmp_path}/made/node.sock", group):
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o750
        assert (tmp_path / "made" / "node.sock").stat().st_mode & 0o777 == 0o660


def as_user(user, group, work):
    """Do work in a child that is another user; return what it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            said = str(work())
        except BaseException as error:  # noqa: BLE001  # the parent asserts on it
            said = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def open_folder():
    """Return a folder that other users can get into; it is removed after the node has ended."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-users-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_a_running_node_enforces_users_and_socket_group(open_folder, start_node, engine, names):
    folder = open_folder
    (folder / "acme.key").write_bytes(os.urandom(32))
    (folder / "acme.key").chmod(0o600)
    acme = {"key_file": str(folder / "acme.key"), "users": [ALICE], "seal": False}
    os.chown(folder, -1, ALICE)
    folder.chmod(0o750)
    node = start_node(folder, domains={"acme": acme}, socket_group=ALICE)
    assert (folder / "node.sock").stat().st_mode & 0o777 == 0o660
    chain = names("a", 3)

    def save(domain="acme"):
        one = engine(node.address, domain=domain)
        return one.save(chain), one.read(chain)

    def look():
        return Client(node.address, m.Hello(m.PROTOCOL, "look"), 60)

    assert as_user(ALICE, ALICE, save) == "(3, (3, {'host': 3}))"
    assert "'default' is for user 0 only" in as_user(ALICE, ALICE, lambda: save("default"))
    assert "not inspect the node" in as_user(ALICE, ALICE, look)
    assert "user 1002 may not use this node" in as_user(MALLORY, ALICE, save)
    assert "Permission denied" in as_user(MALLORY, MALLORY, save)
    with pytest.raises(RefusedError, match="'acme' is not for user 0"):
        save()
