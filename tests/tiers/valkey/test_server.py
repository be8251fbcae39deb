"""One server, and the slot map of a cluster, with servers that do not answer."""

import socket
import threading

import pytest

from holdfast.address import HostPort
from holdfast.clock import SystemClock
from holdfast.errors import Outcome
from holdfast.tiers.breaker import BreakerPhase
from holdfast.tiers.valkey import slots
from holdfast.tiers.valkey.resp import RespLogin
from holdfast.tiers.valkey.server import ValkeyServer
from holdfast.tiers.valkey.slots import SLOTS, ServerCluster
from holdfast.wire.remote.stream import Deadline


@pytest.fixture
def silent():
    """A server that accepts every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield HostPort(*listener.getsockname())


@pytest.fixture
def answering():
    """A server that keeps all slots, and answers CLUSTER and PING."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = HostPort(*listener.getsockname())
        host = endpoint.host.encode()
        map_ = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (
            SLOTS - 1,
            len(host),
            host,
            endpoint.port,
        )

        def answer():
            connected, _ = listener.accept()
            with connected:
                while request := connected.recv(4096):
                    connected.sendall(map_ if b"CLUSTER" in request else b"+PONG\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield endpoint
    thread.join(60)


def test_a_call_after_its_deadline_does_not_count_as_a_server_failure(silent):
    server = ValkeyServer(silent, RespLogin(), SystemClock())
    for _ in range(10):
        assert server.call(lambda _: None, Deadline.within(-1)) is Outcome.LATE
    assert server.backoff.health() == {"state": "active", "phase": BreakerPhase.CLOSED}
    server.close()


def test_a_silent_server_leaves_time_to_request_the_map_from_the_next(
    silent, answering, monkeypatch
):
    monkeypatch.setattr(slots, "ASK_S", 60.0)
    cluster = ServerCluster([silent, answering], RespLogin(), SystemClock())
    server = cluster.server(b"tag", Deadline.within(20.0))
    assert server is not None
    assert server.endpoint == answering
    assert server.backoff.health() == {"state": "active", "phase": BreakerPhase.CLOSED}
    cluster.close()


def test_a_call_with_little_time_uses_the_old_map_during_a_refresh(silent, answering, monkeypatch):
    monkeypatch.setattr(slots, "ASK_S", 60.0)
    cluster = ServerCluster([answering], RespLogin(), SystemClock())
    assert cluster.server(b"tag", Deadline.within(20)).endpoint == answering
    monkeypatch.setattr(slots, "REFRESH_S", 0.0)
    monkeypatch.setattr(cluster, "_ranges", [slots.SlotRange(0, SLOTS - 1, silent)])
    cluster.invalidate()
    with cluster._refreshing:  # another call is requesting the map
        assert cluster.server(b"tag", Deadline.within(0.1)).endpoint == silent
    cluster.close()
