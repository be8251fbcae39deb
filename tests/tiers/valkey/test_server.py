"""One server and the map of a cluster, where some of the servers say nothing."""

import socket
import threading
import time

import pytest

from holdfast.clock import SystemClock
from holdfast.errors import Outcome
from holdfast.tiers.pool.breaker import Phase
from holdfast.tiers.valkey import slots
from holdfast.tiers.valkey.server import Server
from holdfast.tiers.valkey.slots import SLOTS, Cluster
from holdfast.wire.address import HostPort
from holdfast.wire.resp import Login
from holdfast.wire.stream import Deadline


@pytest.fixture
def mute():
    """A server that takes every connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield HostPort(*listener.getsockname())


@pytest.fixture
def talking():
    """A server that keeps every slot, and says so whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = HostPort(*listener.getsockname())
        host = endpoint.host.encode()
        map_ = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (
            SLOTS - 1,
            len(host),
            host,
            endpoint.port,
        )

        def talk():
            connected, _ = listener.accept()
            with connected:
                while said := connected.recv(4096):
                    connected.sendall(map_ if b"CLUSTER" in said else b"+PONG\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        yield endpoint
    thread.join(30)


def test_who_is_called_when_the_time_is_over_is_not_blamed_for_it(mute):
    server = Server(mute, Login(), SystemClock())
    for _ in range(10):
        assert server.call(lambda _: None, Deadline.within(-1)) is Outcome.LATE
    assert server.patience.health() == (Phase.CLOSED, "")
    server.close()


def test_a_mute_server_leaves_time_to_ask_the_next_what_the_cluster_is(mute, talking, monkeypatch):
    monkeypatch.setattr(slots, "ASK_S", 60.0)
    cluster = Cluster([mute, talking], Login(), SystemClock())
    start_s = time.monotonic()
    server = cluster.server(b"tag", Deadline.within(4.0))
    assert time.monotonic() - start_s < 4
    assert server is not None
    assert server.endpoint == talking
    assert server.patience.health() == (Phase.CLOSED, "")
    cluster.close()


def test_who_has_little_time_goes_by_the_old_map_while_another_learns_it(
    mute, talking, monkeypatch, standstills
):
    cluster = Cluster([talking], Login(), SystemClock())
    assert cluster.server(b"tag", Deadline.within(20)).endpoint == talking
    monkeypatch.setattr(slots, "ASK_S", 60.0)
    monkeypatch.setattr(slots, "REFRESH_S", 0.0)
    monkeypatch.setattr(cluster, "_ranges", [slots.Range(0, SLOTS - 1, mute)])
    cluster.doubt()
    learning = threading.Thread(target=cluster.server, args=(b"tag", Deadline.within(4.0)))
    learning.start()
    try:
        while not cluster._learning.locked():
            time.sleep(0.001)
        start_s = time.monotonic()
        assert cluster.server(b"tag", Deadline.within(0.1)).endpoint == mute
        assert standstills.since(start_s) < 1
    finally:
        learning.join(30)
        cluster.close()
