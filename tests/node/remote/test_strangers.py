"""The target before anybody has joined: what a stranger may say, and what it costs."""

import socket
import struct
import threading
import time

import msgspec
import pytest

from holdfast.address import tcp_endpoint
from holdfast.errors import Outcome
from holdfast.node.remote.service import TargetLimits
from holdfast.testing.payloads import key_of, namespace_of, record_of

NAMESPACE = namespace_of(30_000)
RECORDS = [record_of(NAMESPACE, key_of(1))]


@pytest.fixture
def node(serve_here):
    """A target in this process and a client of it."""
    return serve_here(NAMESPACE, TargetLimits(handshakes=16, handshake_s=60.0, body_s=60.0))


def test_a_peer_is_turned_away_if_no_thread_can_start_and_the_next_is_served(
    node, monkeypatch, ended
):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "holdfast-peer":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(tcp_endpoint(node.address)) as raw:
        assert ended(raw)
    monkeypatch.undo()
    assert node.target.put(RECORDS[:1], 60) == [Outcome.OK]
    assert node.service.status().turned_away == 1


def test_an_unauthenticated_peer_cannot_announce_a_large_message(node, caplog, ended):
    with socket.create_connection(tcp_endpoint(node.address)) as raw:
        raw.sendall(struct.pack("<IIQ", 1 << 20, 1, 0))
        assert ended(raw)
    until_s = time.monotonic() + 60
    while "the limit is 131072" not in caplog.text and time.monotonic() < until_s:
        time.sleep(0.01)
    assert "request 1 announces 1048576 bytes, the limit is 131072" in caplog.text


def test_unauthenticated_connections_of_one_host_do_not_block_another_host(node):
    silent = [socket.create_connection(tcp_endpoint(node.address)) for _ in range(13)]
    until_s = time.monotonic() + 60
    while node.service.status().turned_away < 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert node.service.status().turned_away == 1
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.connect(tcp_endpoint(node.address))
        assert other.recv(16)
    for raw in silent:
        raw.close()


@pytest.mark.parametrize("said", [{"type": "join\nFAKE"}, {"type": "status", "\n" + "a" * 9999: 1}])
def test_an_unauthenticated_peer_cannot_inject_log_lines(node, caplog, said, ended):
    body = msgspec.msgpack.encode(said)
    with socket.create_connection(tcp_endpoint(node.address)) as raw:
        raw.sendall(struct.pack("<IIQ", len(body), 1, 0) + body)
        assert ended(raw)
    until_s = time.monotonic() + 60
    while "connection ended" not in caplog.text and time.monotonic() < until_s:
        time.sleep(0.01)
    assert "connection ended" in caplog.text
    told = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() and len(line) < 500 for line in told), told
