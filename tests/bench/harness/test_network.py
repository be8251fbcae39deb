"""Hosts with addresses of their own, that leave nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.harness import network
from holdfast_bench.harness.network import LoopbackNetwork, NamespaceNetwork, open_network
from holdfast_bench.harness.process import ChildProcess, wait_until

SERVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    connection, peer = listener.accept()
    connection.sendall(peer[0].encode())
    connection.close()
"""

ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    print(connection.recv(100).decode())
"""


def place(host):
    return host.address.removeprefix("tcp://").rsplit(":", 1)


def answer(asking, serving, tmp_path):
    """Connect from one host to another; return the address that the other saw."""
    argv = [*serving.inside, sys.executable, "-c", SERVE, *place(serving)]
    with ChildProcess("server", argv, tmp_path / f"{place(serving)[0]}.log", {}) as server:
        wait_until(server, lambda: "listening" in server.tail(), 60)
        ask = [*asking.inside, sys.executable, "-c", ASK, *place(serving)]
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def namespaces():
    """The network namespaces that processes of ours live in."""
    found = set()
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal():
                found.add(str((process / "ns/net").readlink()))
        except OSError:
            continue  # it has ended
    return found


@pytest.fixture
def spaced(tmp_path):
    """A network of namespaces; skipped, with the reason, where there can be none."""
    with open_network(tmp_path / "log") as made:
        if not isinstance(made, NamespaceNetwork):
            pytest.skip("network namespaces need root, ip, unshare, and a kernel that allows them")
        yield made


def test_hosts_in_namespaces_reach_each_other_under_their_own_addresses(spaced, tmp_path):
    a, b = spaced.host(), spaced.host()
    assert a.address != b.address
    assert answer(a, b, tmp_path) == place(a)[0]
    assert answer(b, a, tmp_path) == place(b)[0]


def test_a_host_cut_off_from_the_network_is_unreachable_until_it_is_mended(spaced, tmp_path):
    a, b = spaced.host(), spaced.host()
    spaced.cut(b.address)
    ask = [*a.inside, sys.executable, "-c", ASK.replace(", 60)", ", 1)"), *place(b)]
    told = subprocess.run(ask, capture_output=True, text=True, check=False)
    assert "TimeoutError" in told.stderr or "No route" in told.stderr, told
    spaced.mend(b.address)
    assert answer(a, b, tmp_path) == place(a)[0]


def test_this_machines_own_network_is_left_as_it_was(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("no ip here to look with")
    look = ["ip", "-br", "addr"]
    before = subprocess.run(look, capture_output=True, check=True).stdout
    with open_network(tmp_path / "log") as made:
        made.host()
        assert subprocess.run(look, capture_output=True, check=True).stdout == before


def test_namespaces_are_removed_if_the_block_raises(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_network(tmp_path / "log") as made:  # noqa: PT012
        if not isinstance(made, NamespaceNetwork):
            pytest.skip("network namespaces need root, ip, unshare, and a kernel that allows them")
        held = str(Path(f"/proc/{made._switch.pid}/ns/net").readlink())
        assert held in namespaces()
        raise KeyboardInterrupt
    assert held not in namespaces()


def test_namespaces_are_removed_if_their_starter_is_killed(spaced, tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from holdfast_bench.harness.network import open_network\n"
        "with open_network(Path(sys.argv[1])) as made:\n"
        "    print(made._switch.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "other.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as starter:
        held = str(Path(f"/proc/{int(starter.stdout.readline())}/ns/net").readlink())
        starter.kill()
    with ChildProcess("clock", ["sleep", "60"], tmp_path / "clock.log", {}) as clock:
        wait_until(clock, lambda: held not in namespaces(), 60)


def test_hosts_are_loopback_ports_without_root(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with open_network(tmp_path / "log") as made:
        assert isinstance(made, LoopbackNetwork)
        a, b = made.host(), made.host()
    assert a.address != b.address
    assert answer(a, b, tmp_path) == "127.0.0.1"


def test_hosts_are_loopback_ports_if_the_kernel_refuses_namespaces(monkeypatch, tmp_path):
    def refuse(*_):
        raise HoldfastError("ip link add: Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(network.NamespaceNetwork, "_in", refuse)
    monkeypatch.setattr(network.NamespaceNetwork, "_hold", lambda *_: None)
    with open_network(tmp_path / "log") as made:
        assert isinstance(made, LoopbackNetwork)
